# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""How far converted encoders agree with their full-attention source, for a grid of settings, healed or not.

    python examples/conversion/agreement.py --output_file runs/agreement.jsonl --speeches_file speeches.jsonl
    python examples/conversion/table.py --input_file runs/agreement.jsonl

Texts: the 500 held-out Wikipedia extracts, and 200 windows of 500 tokens from the middle of speeches. Figures: the
mean cosine between a text's mean-pooled embeddings by both models, Spearman's correlation of the similarities of all
pairs of texts by both, and each layer's relative error over the real tokens, |ours - source| / |source|.
"""

import itertools
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import conversion_data
import torch
from measuring import Records
from scipy.stats import spearmanr
from torch.nn import functional as F
from tqdm import tqdm
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from linformer_hf import training


@dataclass
class Arguments(conversion_data.CalibrationArguments):
    """Which settings are compared, and on what."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Source; the packaged MiniLM if not given."}
    )
    speeches_file: str | None = field(default=None, metadata={"help": "Long texts, jsonl or txt, may be .xz."})
    calibration_speeches: bool = field(
        default=False,
        metadata={"help": "Heal on the speeches of which no window is taken, and on as many extracts."},
    )
    num_windows: int = field(default=200, metadata={"help": "Windows, each of another speech."})
    window_length: int = field(default=500, metadata={"help": "Tokens of a window, special ones included."})
    projection_types: list[str] = field(
        default_factory=lambda: ["mean_pooling", "max_pooling", "convolution", "random", "linear"],
        metadata={"help": "The settings are all combinations of these,"},
    )
    projection_inits: list[str] = field(
        default_factory=lambda: ["mean_pooling", "random", "spectral"],
        metadata={"help": "these (for linear),"},
    )
    projected_lengths: list[int] = field(
        default_factory=lambda: [256, 128, 64, 16, 0],
        metadata={"help": "these k (0, no projection, once, where there is a window),"},
    )
    local_attention_windows: list[int] = field(
        default_factory=lambda: [0, 32, 64, 128], metadata={"help": "and these w."}
    )
    num_global_tokens: int = field(default=1, metadata={"help": "Where there is a window."})
    projection_sharing: str = field(default="layerwise", metadata={"help": "Of projections with weights."})


def settings(args: Arguments) -> list[dict[str, Any]]:
    """The grid, as options of `conversion_data.convert`."""
    kinds = [
        (kind, init)
        for kind in args.projection_types
        for init in (args.projection_inits if kind == "linear" else [None])
    ]
    return [
        {
            "projection_type": kind,
            "projection_init": init if k else None,
            "projection_sharing": args.projection_sharing,
            "projected_length": k,
            "local_attention_window": w,
            "num_global_tokens": args.num_global_tokens if w else 0,
        }
        for (kind, init), k, w in itertools.product(kinds, args.projected_lengths, args.local_attention_windows)
        if k or (w and (kind, init) == kinds[0])
    ]


@torch.inference_mode()
def layer_outputs(model: PreTrainedModel, batch: BatchEncoding) -> tuple[torch.Tensor, ...]:
    """Hidden states after each layer, (b, n, c) each."""
    return model(**batch, output_hidden_states=True).hidden_states[1:]


class Reference:
    """The source's outputs on some texts, computed once.

    Args:
        source: The model.
        batches: From `conversion_data.batches`.
    """

    def __init__(self, source: PreTrainedModel, batches: list[tuple[list[int], BatchEncoding]]):
        self.batches = batches
        self.outputs = [layer_outputs(source, batch) for _, batch in tqdm(batches, desc="source")]
        self.embeddings = self.embed([outputs[-1] for outputs in self.outputs])

    def embed(self, last: list[torch.Tensor]) -> torch.Tensor:
        """Mean-pooled embeddings of length 1, (texts, c), from the last hidden states of each batch."""
        embeddings = torch.empty(sum(len(places) for places, _ in self.batches), last[0].shape[-1])
        for (places, batch), states in zip(self.batches, last, strict=True):
            embeddings[places] = conversion_data.mean_pooled(states, batch["attention_mask"])
        return F.normalize(embeddings)

    def compare(self, model: PreTrainedModel) -> dict[str, Any]:
        """Figures on another model's agreement.

        Args:
            model: The model.

        Returns:
            `cosine`, `spearman` and `layer_errors`.
        """
        errors, norms, last = 0.0, 0.0, []
        for (_, batch), theirs in zip(tqdm(self.batches, leave=False), self.outputs, strict=True):
            ours, real = layer_outputs(model, batch), batch["attention_mask"].bool()
            errors += torch.stack([(o - t)[real].square().sum() for o, t in zip(ours, theirs, strict=True)]).double()
            norms += torch.stack([t[real].square().sum() for t in theirs]).double()
            last.append(ours[-1])
        embeddings = self.embed(last)
        pairs = torch.triu_indices(len(embeddings), len(embeddings), 1).unbind()
        similarities = [(e @ e.T)[pairs] for e in (embeddings, self.embeddings)]
        return {
            "cosine": (embeddings * self.embeddings).sum(1).mean().item(),
            "spearman": float(spearmanr(*similarities).statistic),
            "layer_errors": [round(error, 4) for error in (errors / norms).sqrt().tolist()],
        }


def split_speeches(args: Arguments) -> tuple[list[str], list[str]]:
    """The speeches of which windows are taken, of all times, and the others."""
    speeches = conversion_data.read_texts(args.speeches_file)
    count = min(args.num_windows, len(speeches))
    places = [place * len(speeches) // count for place in range(count)]
    return [speeches[place] for place in places], [s for place, s in enumerate(speeches) if place not in places]


def held_out_texts(args: Arguments, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Token ids of the extracts and, where there is a file, of the windows of speeches."""
    _, extracts = conversion_data.wikipedia_extracts()
    texts = {"extracts": [ids[: args.window_length - 2] for ids in conversion_data.tokenize(tokenizer, extracts)]}
    if args.speeches_file:
        chosen, _ = split_speeches(args)
        texts["speeches"] = [
            ids[max(0, len(ids) - args.window_length) // 2 :][: args.window_length - 2]
            for ids in conversion_data.tokenize(tokenizer, chosen)
        ]
    return {
        name: [conversion_data.framed(tokenizer, ids) for ids in rows[: args.max_texts]]
        for name, rows in texts.items()
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    (args,) = training.parse_arguments(Arguments, argv=argv)
    torch.set_num_threads(args.threads)
    records = Records(args.output_file)
    shared = {"max_texts": args.max_texts, **args.calibration()}
    others = None
    if args.calibration_speeches:
        shared["calibration_speeches"] = True
        _, others = split_speeches(args)
    runs = records.missing([{**options, **shared} for options in settings(args)])
    source, tokenizer = conversion_data.load_encoder(args.model_name_or_path)
    references = {
        name: Reference(source, conversion_data.batches(tokenizer, rows))
        for name, rows in (held_out_texts(args, tokenizer) if runs else {}).items()
    }
    for run in tqdm(runs, desc="settings"):
        options = {name: value for name, value in run.items() if name not in shared}
        start = time.perf_counter()
        model = conversion_data.convert(source, tokenizer, args, texts=others, **options)
        seconds = time.perf_counter() - start
        figures = {
            f"{name}_{figure}": value
            for name, reference in references.items()
            for figure, value in reference.compare(model).items()
        }
        records.add(run, {**figures, "conversion_seconds": seconds})
    return {"records": records.records}


if __name__ == "__main__":
    main(sys.argv[1:])
