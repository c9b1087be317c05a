"""Makes a Linformer of a checkpoint of the authors' code, without fairseq.

    python -m linformer_hf.convert_fairseq CHECKPOINT.pt OUTPUT --dict dict.txt --tokenizer roberta-base

Their code: https://github.com/facebookresearch/fairseq/tree/main/examples/linformer.
"""

import argparse
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from .command_line import load_tokenizer, parse_arguments, save
from .configuration_linformer import LinformerConfig
from .convert_hf import Family, Head, Rows, convert_state_dict, load_state_dict
from .modeling_linformer import LinformerForMaskedLM, LinformerForSequenceClassification, LinformerPreTrainedModel


logger = logging.getLogger(__name__)

# The only class that a checkpoint may hold, beside those that PyTorch knows to be harmless.
ALLOWED = (argparse.Namespace,)

_ENCODER = r"encoder\.sentence_encoder\."
_LAYER = _ENCODER + r"layers\.(\d+)\."
_PARTS = {
    r"self_attn\.q_proj": "attention.self.query",
    r"self_attn\.k_proj": "attention.self.key",
    r"self_attn\.v_proj": "attention.self.value",
    r"self_attn\.out_proj": "attention.output.dense",
    r"self_attn\.compress_k": "attention.self.key_projection",
    r"self_attn\.compress_v": "attention.self.value_projection",
    r"self_attn_layer_norm": "attention.output.LayerNorm",
    r"fc1": "intermediate.dense",
    r"fc2": "output.dense",
    r"final_layer_norm": "output.LayerNorm",
}
FAIRSEQ = Family(
    stem="",
    rows=[
        (r"encoder\.(.*\.)?version", None),
        (_ENCODER + r".*compress_(k|v|layer)\.bias", None),  # stored, but their forward takes the weight alone
        (_ENCODER + r"embed_tokens\.(.*)", r"linformer.embeddings.word_embeddings.\1"),
        (_ENCODER + r"embed_positions\.(.*)", r"linformer.embeddings.position_embeddings.\1"),
        (_ENCODER + r"layernorm_embedding\.(.*)", r"linformer.embeddings.LayerNorm.\1"),
        (_ENCODER + r"layer_norm\.(.*)", r"linformer.encoder.LayerNorm.\1"),
        (_ENCODER + r"compress_layer\.(.*)", r"linformer.encoder.shared_projection.\1"),
        *((rf"{_LAYER}{theirs}\.(.*)", rf"linformer.encoder.layer.\1.{ours}.\2") for theirs, ours in _PARTS.items()),
    ],
    heads={},
    constants={"type_vocab_size": 1},
    position_offset=True,
)
_LM = r"encoder\.lm_head\."
LM_ROWS: Rows = [
    (_LM + r"(weight|bias)", r"lm_head.decoder.\1"),
    (_LM + r"(dense|layer_norm)\.(.*)", r"lm_head.\1.\2"),
]

# Their options that are fields here
SIZES = {
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_embed_dim": "intermediate_size",
}
DROPOUTS = {
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "pooler_dropout": "classifier_dropout",
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "relu": "relu",
    "tanh": "tanh",
    "linear": "linear",
}
# Their options with the one value that there is a place for here
FIXED = {"no_scale_embedding": True, "encoder_layers_to_keep": None, "pooler_activation_fn": "tanh"}

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]  # fairseq's ids, and the configuration's defaults


def convert_fairseq(
    checkpoint: str | Path, dictionary: str | Path | None = None, classification_head: str | None = None
) -> LinformerPreTrainedModel:
    """Makes a Linformer of a checkpoint of `linformer_roberta`.

    Args:
        checkpoint: A `.pt` file. It is read without running any code that it may hold.
        dictionary: The `dict.txt` of its training, with whose size the word embeddings are compared. The special
            tokens have fairseq's ids: 0 begins, 1 pads and 2 ends.
        classification_head: The name of the head to convert, where the checkpoint has any; `"none"` for the
            masked-LM head.

    Returns:
        The model, in evaluation mode and in the checkpoint's dtype.

    Raises:
        ValueError: If the file is no such checkpoint, needs code to be read, was made with an option or holds tensors
            that there is no place for, does not fit the dictionary, or if the head has to be chosen.
    """
    settings, theirs = _read(Path(checkpoint))
    head = _head(theirs, classification_head)
    for name, value in FIXED.items():
        counts = name != "pooler_activation_fn" or head.target is LinformerForSequenceClassification
        if counts and settings.get(name, value) != value:
            raise ValueError(f"{checkpoint} has `{name}` = {settings[name]!r}, but a Linformer only {value!r}")
    if (activation := settings.get("activation_fn", "gelu")) not in ACTIVATIONS:
        raise ValueError(f"{checkpoint} has the activation {activation!r}, but must have one of {list(ACTIVATIONS)}")
    if missing := SIZES.keys() - settings.keys():
        raise ValueError(f"{checkpoint} does not say its {', '.join(sorted(missing))}")

    sharing: Any
    sharing, theirs, copies = _without_copies(theirs, bool(settings.get("shared_kv_compressed")))
    ours, left_out = convert_state_dict(theirs, FAIRSEQ, head, SPECIAL_TOKENS.index("<pad>"))
    shapes = {name: tuple(weight.shape) for name, weight in ours.items()}
    num_words, hidden_size = shapes.get("linformer.embeddings.word_embeddings.weight", (0, 0))
    if dictionary is not None and len(symbols := read_dictionary(dictionary)) != num_words:
        raise ValueError(
            f"{dictionary} has {len(symbols)} symbols with the special ones, but {checkpoint} has {num_words} word "
            "embeddings: give the dictionary of its training"
        )
    projections = {shape for name, shape in shapes.items() if "_projection" in name}
    num_positions, _ = shapes.get("linformer.embeddings.position_embeddings.weight", (0, 0))
    k, n = next(iter(projections), (0, 0))
    if not num_words or len(projections) != 1 or n != num_positions:
        raise ValueError(
            f"{checkpoint} has embeddings of {num_words} words and {num_positions} positions, and projections of the "
            f"shapes {sorted(projections)}: it is no Linformer, or damaged"
        )
    words, decoder = ours["linformer.embeddings.word_embeddings.weight"], ours.get("lm_head.decoder.weight")
    fields = SIZES | DROPOUTS
    options: dict[str, Any] = {here: settings[there] for there, here in fields.items() if there in settings}
    config = LinformerConfig(
        vocab_size=num_words,
        hidden_size=hidden_size,
        hidden_act=ACTIVATIONS[activation],
        max_position_embeddings=n,
        projected_length=k,
        projection_sharing=sharing,
        projection_initializer="normal",
        freeze_projections=bool(settings.get("freeze_compress")),
        norm_first=bool(settings.get("encoder_normalize_before")),
        tie_word_embeddings=decoder is None or torch.equal(decoder, words),
        **options,
    )
    if "classifier.out_proj.bias" in ours:
        config.num_labels = len(ours["classifier.out_proj.bias"])
    model = head.target(config)
    nn.Module.to(model, dtype=words.dtype)
    if new := load_state_dict(model, ours):
        raise ValueError(f"{checkpoint} has no {', '.join(new)}, which a Linformer needs")
    logger.info(
        "%s: %d tensors become a %s, %s", checkpoint, len(theirs) - len(left_out), type(model).__name__, sharing
    )
    logger.info("second names of the same tensors: %s", ", ".join(copies) or "none")
    logger.info("left out: %s", ", ".join(left_out) or "none")
    return model.eval()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The options and tensors of a checkpoint, under the names that fairseq's last version gives them."""
    if not path.is_file():
        raise ValueError(f"There is no checkpoint {path}")
    try:
        with torch.serialization.safe_globals(list(ALLOWED)):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        if not (needed := re.search(r"GLOBAL (\S+)", str(error))):
            raise ValueError(f"{path} is no checkpoint of PyTorch: {error}") from error
        raise ValueError(
            f"{path} cannot be read without running code that it names: {needed[1]}. Only tensors, plain values and "
            "argparse.Namespace are read: save it again without the rest"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"{path} is no checkpoint of PyTorch: {error}") from error
    parts = checkpoint if isinstance(checkpoint, dict) else {}
    settings = parts.get("args") or (parts.get("cfg") or {}).get("model")
    tensors = parts.get("model")
    if not isinstance(settings, argparse.Namespace) or not isinstance(tensors, dict):
        raise ValueError(
            f"{path} is no checkpoint of fairseq: it must hold tensors under 'model', and options under 'args' or "
            f"under 'model' in 'cfg', but holds {', '.join(map(str, parts)) or type(checkpoint).__name__}"
        )
    return vars(settings), _modern_names(tensors)


def _modern_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What fairseq itself does with the names of its older versions when it loads a file."""
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^decoder\.", "encoder.", name).replace(".emb_layer_norm.", ".layernorm_embedding.")
        if match := re.fullmatch(r"(.*\.)in_proj_(weight|bias)", name):
            parts = zip("qkv", tensor.chunk(3), strict=True)
            renamed |= {f"{match[1]}{letter}_proj.{match[2]}": part for letter, part in parts}
        else:
            renamed[name] = tensor
    return renamed


def _head(tensors: dict[str, torch.Tensor], name: str | None) -> Head:
    """The masked-LM head, or a classification head."""
    prefix = r"classification_heads\."
    there = sorted({match[1] for key in tensors if (match := re.match(prefix + r"(.+?)\.(dense|out_proj)\.", key))})
    if name not in (*there, *(["none"] if there else []), *([] if there else [None])):
        raise ValueError(
            f"`classification_head` is {name!r}, but the checkpoint has {', '.join(there) or 'no such head'}: "
            + ("choose one, or 'none' for the masked-LM head" if there else "leave it out")
        )
    if name in there:
        rows: Rows = [
            (prefix + re.escape(str(name)) + r"\.(.*)", r"classifier.\1"),
            (prefix + ".*", None),
            (_LM + ".*", None),
        ]
        return Head(LinformerForSequenceClassification, rows)
    return Head(LinformerForMaskedLM, [(prefix + ".*", None), *LM_ROWS])


def _without_copies(
    tensors: dict[str, torch.Tensor], shared_kv: bool
) -> tuple[str, dict[str, torch.Tensor], list[str]]:
    """How projections are shared, the tensors without those that no layer uses under that name, and their names.

    The tensors count, not the option: a version of their code had the option, and a projection in each layer.
    """
    model_s = "encoder.sentence_encoder.compress_layer.weight"
    owned = {name: weight for name, weight in tensors.items() if re.fullmatch(_LAYER + r".*compress_.\.weight", name)}
    pairs = [(name.replace("compress_v", "compress_k"), name) for name in owned if "compress_v" in name]
    if model_s in tensors and all(torch.equal(weight, tensors[model_s]) for weight in owned.values()):
        sharing, copies = "layerwise", list(owned)
    elif shared_kv or all(key in owned and torch.equal(owned[key], owned[value]) for key, value in pairs):
        sharing, copies = "key_value", [model_s, *(value for _, value in pairs)]
    else:
        sharing, copies = "headwise", [model_s]
    copies = [name for name in copies if name in tensors]
    return sharing, {name: weight for name, weight in tensors.items() if name not in copies}, copies


def read_dictionary(path: str | Path) -> list[str]:
    """Reads a dictionary of fairseq.

    Args:
        path: A `dict.txt`, a symbol and its count in each line.

    Returns:
        The symbols in the order of their ids, with fairseq's special ones: four before them, `<mask>` behind them if
        the file does not have it.

    Raises:
        ValueError: If there is no such file, a line has no count, or a symbol comes twice.
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no dictionary {path}")
    symbols = list(SPECIAL_TOKENS)
    for number, line in enumerate(Path(path).read_text("utf-8").strip("\n").split("\n"), start=1):
        line, replaces = line.removesuffix(" #fairseq:overwrite"), line.endswith(" #fairseq:overwrite")
        symbol, _, count = line.rstrip().rpartition(" ")
        if not symbol or not count.isdigit():
            raise ValueError(f"{path} has {line!r} in line {number}, but must have a symbol and its count")
        if symbol in symbols and not replaces:
            raise ValueError(f"{path} has {symbol!r} a second time in line {number}")
        symbols.append(symbol)
    return symbols if "<mask>" in symbols else [*symbols, "<mask>"]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: LinformerConfig, symbols: list[str] | None) -> None:
    """Refuses a tokenizer whose ids are not those of the model.

    Args:
        tokenizer: The tokenizer.
        config: The model's configuration.
        symbols: From `read_dictionary`, if there is a dictionary.

    Raises:
        ValueError: If it has more tokens than the model, or another id for a special token.
    """
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model only {config.vocab_size}: give the one of its "
            "training"
        )
    wanted = {"cls": config.bos_token_id, "pad": config.pad_token_id, "sep": config.eos_token_id}
    if symbols is not None:
        wanted["mask"] = symbols.index("<mask>")
    for name, index in wanted.items():
        if (given := getattr(tokenizer, f"{name}_token_id")) != index:
            raise ValueError(
                f"The tokenizer's {name} token has the id {given}, but the model's has {index}: give the one of its "
                "training"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class FairseqArguments:
    """What comes with the checkpoint."""

    dict: str | None = field(default=None, metadata={"help": "The dict.txt of its training."})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of a tokenizer with the same ids, to be saved along."}
    )
    classification_head: str | None = field(
        default=None, metadata={"help": "Name of the head to convert, or none for masked LM, where it has any."}
    )


def main(argv: list[str] | None = None) -> None:
    """Converts and saves.

    Args:
        argv: The command line's arguments if None.
    """
    arguments, paths = parse_arguments(
        FairseqArguments,
        name="convert_fairseq",
        description="Makes a Linformer of a checkpoint of the authors' fairseq code.",
        source_help="The .pt file.",
        argv=argv,
    )
    model = convert_fairseq(paths.source, arguments.dict, arguments.classification_head)
    tokenizer = None
    if arguments.tokenizer is not None:
        tokenizer = load_tokenizer(arguments.tokenizer)
        symbols = None if arguments.dict is None else read_dictionary(arguments.dict)
        check_tokenizer(tokenizer, model.config, symbols)
    save(model, tokenizer, paths)


__all__ = ["check_tokenizer", "convert_fairseq", "read_dictionary"]


if __name__ == "__main__":
    main()
