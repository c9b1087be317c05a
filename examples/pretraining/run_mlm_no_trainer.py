# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""Pretrains a Linformer, or any other masked language model, on any text with a plain loop and Accelerate.

    accelerate launch run_mlm_no_trainer.py recipes/tiny.json --train_file corpus.txt --output_dir out

The flags are those of run_mlm.py, as far as `AccelerateArguments` has them.
"""

import sys
from typing import Any

import mlm_data

import linformer_hf  # noqa: F401 (makes the Auto classes know Linformer)
from linformer_hf import training


def main(argv: list[str] | None = None) -> dict[str, Any]:
    model_args, data_args, args = training.parse_arguments(
        mlm_data.ModelArguments, mlm_data.DataArguments, training.AccelerateArguments, argv=argv
    )
    checkpoint = training.start_run(args)
    setup = mlm_data.prepare(model_args, data_args, args, checkpoint)
    run = training.AccelerateRun(args, setup.model, setup.tokenizer, checkpoint)
    eval_loader = run.evaluation_loader(setup.eval_dataset, setup.eval_collator) if args.do_eval else None

    def evaluate() -> dict[str, float]:
        loss, _, _ = run.evaluate(eval_loader)
        return {"eval_loss": loss, "perplexity": training.perplexity(loss)}

    results = {}
    if args.do_train:
        results |= run.train(setup.train_dataset, setup.collator, evaluate if args.do_eval else None)
    if args.do_eval:
        results |= evaluate()
        run.log(results)
    return run.finish(results, **setup.card)


if __name__ == "__main__":
    main(sys.argv[1:])
