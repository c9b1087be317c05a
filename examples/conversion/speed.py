# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""Times a forward pass of conversions beside their full-attention source, one text of each length.

    python examples/conversion/speed.py --output_file runs/speed.jsonl

The source's positions are repeated, as those of the conversions, and it runs with sdpa. Before that, in float32,
source and conversion are compared on a text that fits in the window. Times are medians of interleaved runs.
"""

import copy
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import conversion_data
import torch
from measuring import Records, interleaved_medians
from tqdm import tqdm
from transformers import PreTrainedModel

from linformer_hf import training
from linformer_hf.convert_hf import convert_encoder
from linformer_hf.healing import lengthen_source
from linformer_hf.training import parse_overrides


@dataclass
class Arguments(conversion_data.SharedArguments):
    """Which settings are compared, and how."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Source; the packaged MiniLM if not given."}
    )
    lengths: list[int] = field(default_factory=lambda: [512, 4096, 16384], metadata={"help": "Tokens of the texts."})
    dtype: str = field(default="bfloat16", metadata={"help": "Number format of the models."})
    repeats: int = field(default=5, metadata={"help": "Interleaved runs of each configuration; the median counts."})
    settings: list[str] = field(
        default_factory=lambda: [
            "projected_length=64,local_attention_window=64",
            "projected_length=128,local_attention_window=0",
        ],
        metadata={"help": conversion_data.SETTINGS_HELP},
    )


def token_ids(model: PreTrainedModel, length: int) -> torch.Tensor:
    """One text of random tokens, (1, length)."""
    return torch.randint(5, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def largest_difference(model: PreTrainedModel, source: PreTrainedModel) -> float:
    """Of the last hidden states on the longest text that is full attention in the conversion."""
    exact = 2 * model.config.local_attention_window or model.config.projected_length
    ids = token_ids(source, min(exact, source.config.max_position_embeddings))
    return (model(ids).last_hidden_state - source(ids).last_hidden_state).abs().max().item()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    (args,) = training.parse_arguments(Arguments, argv=argv)
    torch.set_num_threads(args.threads)
    records = Records(args.output_file)
    encoder, _ = conversion_data.load_encoder(args.model_name_or_path)
    for length in tqdm(args.lengths):
        shared = {"length": length, "dtype": args.dtype, "repeats": args.repeats}
        runs = [{**shared, "setting": setting} for setting in ("source", *args.settings)]
        if not records.missing(runs):
            continue
        positions = max(length, encoder.config.max_position_embeddings)
        source = lengthen_source(encoder, positions)
        models = {"source": source}
        for setting in args.settings:
            options = parse_overrides(setting)
            models[setting] = convert_encoder(encoder, max_position_embeddings=positions, **options)
        differences = {name: largest_difference(model, source) for name, model in models.items() if name != "source"}
        ids, dtype = token_ids(source, length), getattr(torch, args.dtype)
        # copies: the encoder is used again
        forward = {name: partial(copy.deepcopy(model).to(dtype), ids) for name, model in models.items()}
        seconds = interleaved_medians(forward, args.repeats)
        for run in records.missing(runs):
            name = run["setting"]
            figures = {"seconds": seconds[name], "times_faster": seconds["source"] / seconds[name]}
            records.add(run, {**figures, "float32_difference": differences.get(name)})
    return {"records": records.records}


if __name__ == "__main__":
    main(sys.argv[1:])
