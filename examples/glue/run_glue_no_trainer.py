# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""Fine-tunes a Linformer, or any other encoder, on GLUE, IMDB or your own files with a plain loop and Accelerate.

    accelerate launch run_glue_no_trainer.py recipes/base.json --task_name mnli --model_name_or_path my-linformer \
        --output_dir out

The flags are those of run_glue.py, as far as `AccelerateArguments` has them.
"""

import sys
from typing import Any

import glue_data
from transformers import EvalPrediction

import linformer_hf  # noqa: F401 (makes the Auto classes know Linformer)
from linformer_hf import training


def main(argv: list[str] | None = None) -> dict[str, Any]:
    model_args, data_args, args = training.parse_arguments(
        glue_data.ModelArguments, glue_data.DataArguments, training.AccelerateArguments, argv=argv
    )
    checkpoint = training.start_run(args)
    setup = glue_data.prepare(model_args, data_args, args)
    run = training.AccelerateRun(args, setup.model, setup.tokenizer, checkpoint)
    loaders = {suffix: run.evaluation_loader(data, setup.collator) for suffix, data in setup.validation.items()}

    def evaluate(suffix: str = "") -> dict[str, float]:
        loss, logits, labels = run.evaluate(loaders[suffix], keep_logits=True)
        metrics = setup.compute_metrics(EvalPrediction(logits.numpy(), labels.numpy()))
        return {f"eval_{name}{suffix}": value for name, value in {"loss": loss, **metrics}.items()}

    results = dict(setup.truncated)
    if args.do_train:
        results |= run.train(setup.train_dataset, setup.collator, evaluate if args.do_eval else None)
    for suffix in loaders:
        results |= evaluate(suffix)
    run.log(results)
    for suffix, dataset in setup.test.items():
        _, logits, _ = run.evaluate(run.evaluation_loader(dataset, setup.collator), keep_logits=True)
        glue_data.write_predictions(setup, suffix, logits.numpy(), args.output_dir)
    return run.finish(results, **setup.card)


if __name__ == "__main__":
    main(sys.argv[1:])
