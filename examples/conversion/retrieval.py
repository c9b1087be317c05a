# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""Finds the second half of each speech by its first half: a lengthened conversion against its 512-token source.

    python examples/conversion/retrieval.py --output_file runs/retrieval.jsonl --speeches_file speeches.jsonl

The mean-pooled embedding of each first half is compared with those of all second halves. Of each half, a model reads
as many tokens from the start as its setting says. Figures: share of first halves whose own second half is nearest
(`accuracy`), and the mean of 1 / its rank (`reciprocal_rank`).
"""

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import conversion_data
import torch
from measuring import Records
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from linformer_hf import training
from linformer_hf.training import parse_overrides


SOURCE_LENGTH = 512


@dataclass
class Arguments(conversion_data.CalibrationArguments):
    """Which settings are compared, and on what."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Source; the packaged MiniLM if not given."}
    )
    speeches_file: str | None = field(default=None, metadata={"help": "Speeches, jsonl or txt, may be .xz."})
    max_position_embeddings: int = field(default=4096, metadata={"help": "Tokens of a half that conversions read."})
    settings: list[str] = field(
        default_factory=lambda: [
            "projected_length=64,local_attention_window=64",
            "projected_length=64,local_attention_window=128",
            "projected_length=128,local_attention_window=0",
        ],
        metadata={"help": conversion_data.SETTINGS_HELP},
    )


def runs(args: Arguments) -> list[dict[str, Any]]:
    """The source cut off, the source in chunks of the same text, and conversions; `length` is what is read."""
    longest = args.max_position_embeddings
    return [
        {"model": "source", "length": SOURCE_LENGTH},
        {"model": "source, chunks", "length": longest},
        *(
            {"model": "conversion", "setting": setting, "length": longest, **args.calibration()}
            for setting in args.settings
        ),
    ]


@torch.inference_mode()
def embed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[list[int]], length: int
) -> torch.Tensor:
    """Mean-pooled embeddings of length 1 of the texts' beginnings.

    Args:
        model: An encoder.
        tokenizer: Its tokenizer.
        texts: Token ids without special tokens.
        length: How many tokens to read, special ones included. Where this is more than the model's longest input, the
            text is read in chunks, and the mean is over the tokens of all.

    Returns:
        (texts, c).
    """
    size = min(length, model.config.max_position_embeddings) - 2
    chunks = [
        (place, conversion_data.framed(tokenizer, text[start : start + size]))
        for place, text in enumerate(texts)
        for start in range(0, min(len(text), length - 2), size)
    ]
    sums = torch.zeros(len(texts), model.config.hidden_size)
    for places, batch in tqdm(conversion_data.batches(tokenizer, [ids for _, ids in chunks]), leave=False):
        mask = batch["attention_mask"].unsqueeze(-1)
        owners = torch.tensor([chunks[place][0] for place in places])
        sums.index_add_(0, owners, (model(**batch).last_hidden_state * mask).sum(1))  # a sum has the mean's direction
    return F.normalize(sums)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    (args,) = training.parse_arguments(Arguments, argv=argv)
    torch.set_num_threads(args.threads)
    records = Records(args.output_file)
    source, tokenizer = conversion_data.load_encoder(args.model_name_or_path)
    speeches = conversion_data.read_texts(args.speeches_file)[: args.max_texts]
    documents = conversion_data.tokenize(tokenizer, speeches)
    first = [ids[: len(ids) // 2] for ids in documents]
    second = [ids[len(ids) // 2 :] for ids in documents]
    for run in tqdm(records.missing([{**run, "texts": len(speeches)} for run in runs(args)])):
        model, length = source, run["length"]
        if run["model"] == "conversion":
            options = {"max_position_embeddings": length, **parse_overrides(run["setting"])}
            model = conversion_data.convert(source, tokenizer, args, **options)
        start = time.perf_counter()
        queries, candidates = (embed(model, tokenizer, halves, length) for halves in (first, second))
        similarities = queries @ candidates.T
        ranks = (similarities > similarities.diag().unsqueeze(1)).sum(1) + 1
        figures = {"accuracy": ranks.eq(1).double().mean().item(), "reciprocal_rank": (1 / ranks).mean().item()}
        records.add(run, {**figures, "seconds": time.perf_counter() - start})
    return {"records": records.records}


if __name__ == "__main__":
    main(sys.argv[1:])
