# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""Compares a trained full-attention masked language model with its conversions, healed or not.

    python examples/conversion/masked_lm.py --output_file runs/masked_lm.jsonl --model_name_or_path runs/mlm

The README beside this file trains that model with `run_mlm.py`. Text: the held-out Wikipedia extracts, packed and
masked as in the evaluation of that training, so that the source's loss is the one that it reported. Figures: loss in
nat, share of right first guesses, and the entropy of the token frequencies of the training text, which a model that
knows nothing else would have as its loss.
"""

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import conversion_data
import torch
from measuring import Records
from tqdm import tqdm
from transformers import AutoTokenizer

from linformer_hf import training
from linformer_hf.convert_hf import load_source
from linformer_hf.training import parse_overrides


@dataclass
class Arguments(conversion_data.CalibrationArguments):
    """Which settings are compared, and on what."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "The trained masked language model."})
    max_seq_length: int = field(default=512, metadata={"help": "Tokens of a block."})
    settings: list[str] = field(
        default_factory=lambda: [
            "projected_length=64,local_attention_window=64",
            "projected_length=128,local_attention_window=0",
            "projected_length=256,local_attention_window=0",
            "projection_type=linear,projected_length=128,local_attention_window=0",
            "projection_type=linear,projected_length=256,local_attention_window=0",
        ],
        metadata={"help": conversion_data.SETTINGS_HELP},
    )


def unigram_entropy(documents: list[list[int]]) -> float:
    """Entropy in nat of the frequencies of the documents' tokens."""
    counts = torch.tensor([token for ids in documents for token in ids]).bincount().double()
    return torch.distributions.Categorical(probs=counts).entropy().item()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    (args,) = training.parse_arguments(Arguments, argv=argv)
    if args.model_name_or_path is None:
        raise ValueError("--model_name_or_path is missing: pass a masked language model that run_mlm.py trained")
    torch.set_num_threads(args.threads)
    records = Records(args.output_file)
    source = load_source(args.model_name_or_path, "fill-mask", "float32")
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    train, held_out = conversion_data.wikipedia_extracts()
    entropy = unigram_entropy(conversion_data.tokenize(tokenizer, train))
    blocks = conversion_data.packed(tokenizer, held_out, args.max_seq_length)[: args.max_texts]
    masked = conversion_data.masked_batches(tokenizer, blocks)
    shared = {"max_seq_length": args.max_seq_length, "max_texts": args.max_texts}
    runs = [
        {"setting": "source", **shared},
        *({"setting": setting, **shared, **args.calibration()} for setting in args.settings),
    ]
    for run in tqdm(records.missing(runs)):
        start = time.perf_counter()
        model = source
        if run["setting"] != "source":
            model = conversion_data.convert(source, tokenizer, args, **parse_overrides(run["setting"]))
        seconds = time.perf_counter() - start
        scores = conversion_data.masked_lm_scores(model, masked)
        records.add(run, {**scores, "unigram_entropy": entropy, "conversion_seconds": seconds})
    return {"records": records.records}


if __name__ == "__main__":
    main(sys.argv[1:])
