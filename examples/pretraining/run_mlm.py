# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""Pretrains a Linformer, or any other masked language model, on any text with the Trainer.

    python run_mlm.py recipes/tiny.json --train_file corpus.txt --output_dir out
    python run_mlm.py --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1 --train_tokenizer \
        --max_seq_length 512 --config_overrides projected_length=128 --do_train --do_eval --output_dir out

`--model_type roberta` trains the full-attention baseline with the same flags.
"""

import sys
from typing import Any

import mlm_data

import linformer_hf  # noqa: F401 (makes the Auto classes know Linformer)
from linformer_hf import training


def main(argv: list[str] | None = None) -> dict[str, Any]:
    model_args, data_args, args = training.parse_arguments(
        mlm_data.ModelArguments, mlm_data.DataArguments, training.TrainingArguments, argv=argv
    )
    checkpoint = training.start_run(args)
    setup = mlm_data.prepare(model_args, data_args, args, checkpoint)
    trainer = training.Trainer(
        model=setup.model,
        args=args,
        train_dataset=setup.train_dataset,
        eval_dataset=setup.eval_dataset,
        data_collator=setup.collator,
        eval_collator=setup.eval_collator,
        processing_class=setup.tokenizer,
    )
    results = {}
    if args.do_train:
        results |= trainer.train(resume_from_checkpoint=checkpoint).metrics
    if args.do_eval:
        results |= trainer.evaluate()
        results["perplexity"] = training.perplexity(results["eval_loss"])
    return trainer.finish(results, **setup.card)


if __name__ == "__main__":
    main(sys.argv[1:])
