# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""Fine-tunes a Linformer, or any other encoder, on a GLUE task, IMDB or your own csv or json files with the Trainer.

python run_glue.py recipes/base.json --task_name mnli --model_name_or_path my-linformer --output_dir out
python run_glue.py --train_file train.csv --validation_file val.csv --test_file test.csv --do_train --do_eval \
        --do_predict --model_name_or_path my-linformer --output_dir out
"""

import sys
from typing import Any

import glue_data

import linformer_hf  # noqa: F401 (makes the Auto classes know Linformer)
from linformer_hf import training


def main(argv: list[str] | None = None) -> dict[str, Any]:
    model_args, data_args, args = training.parse_arguments(
        glue_data.ModelArguments, glue_data.DataArguments, training.TrainingArguments, argv=argv
    )
    checkpoint = training.start_run(args)
    setup = glue_data.prepare(model_args, data_args, args)
    trainer = training.Trainer(
        model=setup.model,
        args=args,
        train_dataset=setup.train_dataset,
        eval_dataset=setup.validation.get(""),
        data_collator=setup.collator,
        compute_metrics=setup.compute_metrics,
        processing_class=setup.tokenizer,
    )
    results = dict(setup.truncated)
    if args.do_train:
        results |= trainer.train(resume_from_checkpoint=checkpoint).metrics
    for suffix, dataset in setup.validation.items():
        prefix = f"eval{suffix}"  # in the log; the results have the names of Transformers' script, eval_accuracy_mm
        metrics = trainer.evaluate(dataset, metric_key_prefix=prefix)
        results |= {name.replace(prefix, "eval") + suffix: value for name, value in metrics.items() if prefix in name}
    for suffix, dataset in setup.test.items():
        glue_data.write_predictions(setup, suffix, trainer.predict(dataset).predictions, args.output_dir)
    return trainer.finish(results, **setup.card)


if __name__ == "__main__":
    main(sys.argv[1:])
