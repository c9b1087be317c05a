"""Makes a Linformer of a trained encoder of Transformers, with its head.

    python -m linformer_hf.convert_hf SOURCE OUTPUT --max_position_embeddings 4096

does so with a checkpoint, and `convert_encoder` with a model.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from .command_line import load_tokenizer, parse_arguments, save
from .configuration_linformer import LinformerConfig
from .healing import HealingArguments, by_name, calibrate
from .lengthen import tile_positions
from .modeling_linformer import (
    LinformerForMaskedLM,
    LinformerForMultipleChoice,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
    LinformerPreTrainedModel,
)


logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------------------------
# What becomes what
# ---------------------------------------------------------------------------------------------------------------------

# Names in the source's state dict, as regular expressions, and what they are called here; `None` leaves a tensor out.
# The first row that fits counts.
Rows = list[tuple[str, str | None]]


@dataclass(frozen=True)
class Head:
    """What a head of the source becomes.

    Attributes:
        target: The class here, which computes the same from the same weights.
        rows: The names of the head's tensors.
        always_gelu: Whether the source's code has "gelu" where `config.hidden_act` is used here.
    """

    target: type[LinformerPreTrainedModel]
    rows: Rows
    always_gelu: bool = False


@dataclass(frozen=True)
class Family:
    """A family of sources.

    Attributes:
        stem: What the names of its classes begin with.
        rows: The names of the encoder's tensors.
        heads: Behind the stem, the rest of each class's name: what it becomes, or why it cannot be converted.
        renamed_fields: Fields here that the source's configuration has under another name.
        constants: Fields here that the source's code sets.
        position_offset: Whether the first position's embedding lies behind that of the padding token's id.
    """

    stem: str
    rows: Rows
    heads: dict[str, Head | str]
    renamed_fields: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    position_offset: bool = False


_ENCODER = r"(?:bert\.|roberta\.|electra\.)?"  # the encoder's name in a model with a head
_POSITIONS = "linformer.embeddings.position_embeddings.weight"
_TOKEN_TYPES = "linformer.embeddings.token_type_embeddings.weight"

BERT_ROWS: Rows = [
    (_ENCODER + r"pooler\..*", None),  # this family has no pooler: an unused parameter stops distributed training
    (_ENCODER + r"((?:embeddings|encoder)\..*)", r"linformer.\1"),
]
DISTILBERT_ROWS: Rows = [
    (r"(?:distilbert\.)?(embeddings\..*)", r"linformer.\1"),
    *(
        (rf"(?:distilbert\.)?transformer\.(layer\.\d+)\.{theirs}\.(.*)", rf"linformer.encoder.\1.{ours}.\2")
        for theirs, ours in {
            r"attention\.q_lin": "attention.self.query",
            r"attention\.k_lin": "attention.self.key",
            r"attention\.v_lin": "attention.self.value",
            r"attention\.out_lin": "attention.output.dense",
            r"sa_layer_norm": "attention.output.LayerNorm",
            r"ffn\.lin1": "intermediate.dense",
            r"ffn\.lin2": "output.dense",
            r"output_layer_norm": "output.LayerNorm",
        }.items()
    ),
]

BERT_LM_ROWS: Rows = [
    (r"cls\.seq_relationship\..*", None),  # next-sentence prediction
    (r"cls\.predictions\.bias", None),  # what counts is decoder.bias, with which it is tied or unused
    (r"cls\.predictions\.transform\.dense\.(.*)", r"lm_head.dense.\1"),
    (r"cls\.predictions\.transform\.LayerNorm\.(.*)", r"lm_head.layer_norm.\1"),
    (r"cls\.predictions\.(decoder\..*)", r"lm_head.\1"),
]
ROBERTA_LM_ROWS: Rows = [(r"lm_head\.bias", None), (r"(lm_head\..*)", r"\1")]
DISTILBERT_LM_ROWS: Rows = [
    (r"vocab_transform\.(.*)", r"lm_head.dense.\1"),
    (r"vocab_layer_norm\.(.*)", r"lm_head.layer_norm.\1"),
    (r"vocab_projector\.(.*)", r"lm_head.decoder.\1"),
]
ELECTRA_LM_ROWS: Rows = [
    (r"generator_predictions\.dense\.(.*)", r"lm_head.dense.\1"),
    (r"generator_predictions\.LayerNorm\.(.*)", r"lm_head.layer_norm.\1"),
    (r"generator_lm_head\.(.*)", r"lm_head.decoder.\1"),
]
# The source's pooler, dense and tanh of the first token, is the first half of a classification head here.
POOLED_ROWS: Rows = [
    (_ENCODER + r"pooler\.(dense\..*)", r"classifier.\1"),
    (r"classifier\.(.*)", r"classifier.out_proj.\1"),
]
CLASSIFIER_ROWS: Rows = [(r"(classifier\..*)", r"\1")]

# Heads that are the same in all families
TOKEN_HEADS: dict[str, Head | str] = {
    "Model": Head(LinformerModel, []),
    "ForTokenClassification": Head(LinformerForTokenClassification, CLASSIFIER_ROWS),
    "ForQuestionAnswering": Head(LinformerForQuestionAnswering, [(r"(qa_outputs\..*)", r"\1")]),
}
ROBERTA_HEADS: dict[str, Head | str] = {
    **TOKEN_HEADS,
    "ForMaskedLM": Head(LinformerForMaskedLM, ROBERTA_LM_ROWS, always_gelu=True),
    "ForSequenceClassification": Head(LinformerForSequenceClassification, CLASSIFIER_ROWS),
    "ForMultipleChoice": Head(LinformerForMultipleChoice, POOLED_ROWS),
}

FAMILIES: dict[str, Family] = {
    "bert": Family(
        stem="Bert",
        rows=BERT_ROWS,
        heads={
            **TOKEN_HEADS,
            "ForMaskedLM": Head(LinformerForMaskedLM, BERT_LM_ROWS),
            "ForPreTraining": Head(LinformerForMaskedLM, BERT_LM_ROWS),
            "ForSequenceClassification": Head(LinformerForSequenceClassification, POOLED_ROWS),
            "ForMultipleChoice": Head(LinformerForMultipleChoice, POOLED_ROWS),
        },
    ),
    "roberta": Family("Roberta", BERT_ROWS, ROBERTA_HEADS, position_offset=True),
    "xlm-roberta": Family("XLMRoberta", BERT_ROWS, ROBERTA_HEADS, position_offset=True),
    "camembert": Family("Camembert", BERT_ROWS, ROBERTA_HEADS, position_offset=True),
    "distilbert": Family(
        stem="DistilBert",
        rows=DISTILBERT_ROWS,
        heads={
            **TOKEN_HEADS,
            "ForMaskedLM": Head(LinformerForMaskedLM, DISTILBERT_LM_ROWS),
            "ForSequenceClassification": "its head has ReLU where a Linformer's has tanh",
            "ForMultipleChoice": "its head has ReLU where a Linformer's has tanh",
        },
        renamed_fields={
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        constants={"layer_norm_eps": 1e-12, "type_vocab_size": 2},  # it ignores the tokenizer's two token types
    ),
    "electra": Family(
        stem="Electra",
        rows=BERT_ROWS,
        heads={
            **TOKEN_HEADS,
            "ForMaskedLM": Head(LinformerForMaskedLM, ELECTRA_LM_ROWS, always_gelu=True),
            "ForPreTraining": Head(LinformerModel, [(r"discriminator_predictions\..*", None)]),
            "ForSequenceClassification": "its head has gelu where a Linformer's has tanh",
            "ForMultipleChoice": "its head has gelu where a Linformer's has tanh",
        },
    ),
}

# Why encoders that one might try cannot be converted
_RELATIVE = "its relative positions need a score for each pair of tokens, n×n of them"
_ROTARY = "its rotary positions turn the key of each token, but a projected position mixes tokens"
_NARROW = "its embeddings are projected to the hidden size behind their LayerNorm, for which a Linformer has no place"
_BLOCK = "its layers are not known to be BERT's"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("deberta", "deberta-v2", "mpnet", "xlnet", "funnel", "t5"), _RELATIVE),
    **dict.fromkeys(("modernbert", "nomic_bert", "eurobert", "esm", "roformer"), _ROTARY),
    **dict.fromkeys(("albert", "rembert"), _NARROW),
}

# Configuration fields that mean the same in the source
KEPT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "classifier_dropout",
    "tie_word_embeddings",
    "id2label",
    "label2id",
    "problem_type",
)

# The configuration's own fields and their types
OPTIONS: dict[str, Any] = dict(LinformerConfig.__annotations__)

# What a Linformer may have beside the source's tensors
NEW_TENSORS = r"(.*\.)?((key|value|shared)_projection|(projected|local)_norm)\..*"


# ---------------------------------------------------------------------------------------------------------------------
# Conversion
# ---------------------------------------------------------------------------------------------------------------------


def convert_encoder(model: PreTrainedModel, **linformer_options: Any) -> LinformerPreTrainedModel:
    """Makes a Linformer with the weights, the head and the labels of a trained encoder.

    By default, keys and values are pooled to 64 positions, and each token also sees the tokens of its own and of both
    neighbouring blocks of 64 and the first token exactly. Inputs of up to 128 tokens then give the source's outputs
    exactly, and longer ones an approximation that further training improves. Dropout may lie in other places: BERT's
    pooler and DistilBERT's question answering differ from the heads here, in training only. Positions count real
    tokens here, so that padding on the left changes nothing; with BERT, DistilBERT and ELECTRA it does.

    Args:
        model: A BERT (MiniLM and others are), RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT or ELECTRA encoder, bare or
            with one of the heads in `FAMILIES`. Poolers without a classifier, next-sentence heads and ELECTRA's
            discriminator are left out. The model is not changed.
        **linformer_options: Fields of `LinformerConfig` that shall differ from the source's or from the defaults here:
            `projection_type="mean_pooling"`, `projected_length=64`, `local_attention_window=64` and
            `num_global_tokens=1`. Without a window, `local_attention_window=0`, `projected_length` is 256. All are at
            most the longest input. A larger `max_position_embeddings` repeats the source's position embeddings.

    Returns:
        The model with the same head, on the device, in the dtype and in the mode of the source.

    Raises:
        ValueError: If the source is of another family or has a head that a Linformer would compute otherwise, is a
            decoder, has relative positions, holds tensors that have no place here, or if an option is unknown, would
            change the shape of a tensor or cut positions off. The message gives the reason.

    Example:
        ```python
        >>> from transformers import AutoModel
        >>> from linformer_hf.convert_hf import convert_encoder

        >>> model = convert_encoder(AutoModel.from_pretrained("bert-base-uncased"), max_position_embeddings=4096)
        ```
    """
    source: Any = getattr(model, "config", None)
    family = _family(source, type(model).__name__)
    head = _head(model, family)
    if unknown := linformer_options.keys() - OPTIONS.keys() - set(KEPT_FIELDS):
        raise ValueError(
            f"{', '.join(sorted(unknown))} cannot be chosen here: give fields that `help(LinformerConfig)` describes; "
            "device and dtype are the source's"
        )
    padding_index: Any = getattr(model.base_model.embeddings, "padding_idx", None)
    state_dict, left_out = convert_state_dict(model.state_dict(), family, head, padding_index)
    longest = len(state_dict[_POSITIONS])

    names = {name: family.renamed_fields.get(name, name) for name in KEPT_FIELDS}
    options = {name: getattr(source, theirs) for name, theirs in names.items() if hasattr(source, theirs)}
    options |= family.constants | {"max_position_embeddings": longest} | linformer_options
    if options["max_position_embeddings"] != longest:
        state_dict[_POSITIONS] = tile_positions(state_dict[_POSITIONS], options["max_position_embeddings"])
    config = LinformerConfig(**(_defaults(options) | options))
    if head.always_gelu and config.hidden_act not in ("gelu", "gelu_python"):
        raise ValueError(
            f"`model` is a {type(model).__name__}, whose head has gelu whatever `hidden_act` is, but a Linformer's "
            f"would have {config.hidden_act!r}: convert the encoder alone, `model.base_model`"
        )
    converted = head.target(config)
    nn.Module.to(converted, device=model.device, dtype=model.dtype)
    if isinstance(converted, LinformerModel):
        state_dict = {name.removeprefix("linformer."): tensor for name, tensor in state_dict.items()}
    new = load_state_dict(converted, state_dict)
    logger.info("%s becomes %s: %d tensors", type(model).__name__, type(converted).__name__, len(state_dict))
    logger.info("left out: %s", ", ".join(left_out) or "none")
    logger.info("new: %s", ", ".join(new) or "none")
    return converted.train(model.training)


def convert_state_dict(
    state_dict: dict[str, torch.Tensor], family: Family, head: Head, padding_index: int | None = None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Gives the tensors of a source the names that they have here.

    Args:
        state_dict: The source's; it is not changed.
        family: One of `FAMILIES`.
        head: One of the family's.
        padding_index: Where the first position's embedding lies behind the padding token's id, this id.

    Returns:
        The tensors under the names of `head.target` (those of the encoder with "linformer." before them), and the
        source's names that have no place in it.

    Raises:
        ValueError: If a name is in no row of the tables, or there are no position embeddings.
    """
    rows = head.rows + family.rows
    renamed, left_out, unknown = {}, [], []
    for name, tensor in state_dict.items():
        match, target = next(((m, target) for row, target in rows if (m := re.fullmatch(row, name))), (None, None))
        if match is None:
            unknown.append(name)
        elif target is None:
            left_out.append(name)
        else:
            renamed[match.expand(target)] = tensor
    if unknown:
        raise ValueError(
            f"The source has tensors that a Linformer has no place for: {', '.join(unknown)}. Convert the encoder "
            "(`model.base_model`) or a model without them"
        )
    if _POSITIONS not in renamed:
        raise ValueError(f"The source lacks tensors that a Linformer needs: {_POSITIONS}")
    if family.position_offset and padding_index is not None:
        renamed[_POSITIONS] = renamed[_POSITIONS][padding_index + 1 :]
    if types := family.constants.get("type_vocab_size"):  # the source has no embeddings of token types
        renamed[_TOKEN_TYPES] = renamed[_POSITIONS].new_zeros(types, renamed[_POSITIONS].shape[1])
    return renamed, left_out


def _family(config: Any, name: str) -> Family:
    """The family of a source with this configuration, if it can be converted; `name` is what it is called if none."""
    model_type = getattr(config, "model_type", name)
    if model_type not in FAMILIES:
        reason = REFUSED.get(model_type, _BLOCK)
        raise ValueError(f"`model` is a {model_type!r}; {reason}. One of {', '.join(FAMILIES)} can be converted")
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ValueError("`model` is a decoder, but a Linformer cannot be causal: convert an encoder")
    if (positions := getattr(config, "position_embedding_type", None)) not in (None, "absolute"):
        raise ValueError(f"`model` has {positions!r} positions, but must have 'absolute' ones: others need n×n scores")
    if (width := getattr(config, "embedding_size", config.hidden_size)) != config.hidden_size:
        raise ValueError(
            f"`model` has an `embedding_size` of {width} and a `hidden_size` of {config.hidden_size}, but they must "
            f"be equal: {_NARROW}"
        )
    return FAMILIES[model_type]


def _head(model: PreTrainedModel, family: Family) -> Head:
    """What the head of a source becomes."""
    classes = [base.__name__ for base in type(model).__mro__]
    name, head = next(
        ((name, head) for name in classes for rest, head in family.heads.items() if name == family.stem + rest),
        (classes[0], f"those of {', '.join(family.stem + rest for rest in family.heads)} can be converted"),
    )
    if isinstance(head, str):
        raise ValueError(f"`model` is a {name}; {head}. Convert the encoder alone, `model.base_model`")
    return head


def _defaults(options: dict[str, Any]) -> dict[str, Any]:
    """The values here of the fields that make a Linformer, given some of them and the longest input."""
    longest = options["max_position_embeddings"]
    window = options.get("local_attention_window", min(64, longest))
    local = any(window) if isinstance(window, Sequence) else window > 0
    return {
        "projection_type": "mean_pooling",
        "projected_length": min(64 if local else 256, longest),
        "local_attention_window": window,
        "num_global_tokens": 1 if local else 0,
    }


def load_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> list[str]:
    """Copies a source's tensors into a Linformer.

    Args:
        model: The Linformer; it is changed.
        state_dict: What `convert_state_dict` returns.

    Returns:
        The names of the tensors that the model has beside them: of projections and their norms.

    Raises:
        ValueError: If a tensor has no place or another shape, a needed one is missing, or one would be lost by tying.
    """
    own = model.state_dict()
    for name, tensor in state_dict.items():
        if name not in own or own[name].shape != tensor.shape:
            raise ValueError(
                f"`{name}` has the shape {tuple(tensor.shape)} in the source, but in the target "
                f"{tuple(own[name].shape) if name in own else 'no place'}: leave out the option that says so"
            )
    new = sorted(own.keys() - state_dict.keys())
    if others := [name for name in new if not re.fullmatch(NEW_TENSORS, name)]:
        raise ValueError(f"The source lacks tensors that a Linformer needs: {', '.join(others)}")
    model.load_state_dict(state_dict, strict=False)
    if lost := [name for name, tensor in state_dict.items() if not torch.equal(own[name].to(tensor), tensor)]:
        raise ValueError(
            f"The source's {', '.join(lost)} would be lost, since `tie_word_embeddings=True` makes them the same "
            "tensor as others that differ in the source: give `tie_word_embeddings=False`"
        )
    return new


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

# The Auto class for each choice of a head
TASKS = {
    "feature-extraction": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
}


@dataclass
class LinformerArguments:
    """The fields of `LinformerConfig` that people set; those that are not given are as in `convert_encoder`."""

    max_position_embeddings: int | None = field(
        default=None, metadata={"help": "Longest input in tokens, if longer than the source's: positions repeat."}
    )
    projection_type: str | None = field(
        default=None,
        metadata={
            "help": "How n tokens become k positions; mean_pooling if not given.",
            "choices": get_args(OPTIONS["projection_type"]),
        },
    )
    projection_sharing: str | None = field(
        default=None,
        metadata={
            "help": "What shares a projection with weights; layerwise if not given.",
            "choices": get_args(OPTIONS["projection_sharing"]),
        },
    )
    projected_length: list[int] | None = field(
        default=None, metadata={"help": "k, or one for each layer; 64 if not given, and 256 without a window."}
    )
    local_attention_window: list[int] | None = field(
        default=None, metadata={"help": "Size of the blocks of exact attention, or one for each layer; 0 for none."}
    )
    num_global_tokens: int | None = field(
        default=None, metadata={"help": "First tokens that see all and are seen by all; 1 if not given."}
    )

    def options(self) -> dict[str, Any]:
        """What was given, for `convert_encoder`."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {n: v[0] if isinstance(v, list) and len(v) == 1 else v for n, v in given.items()}


@dataclass
class ConversionArguments:
    """What is read."""

    task: str | None = field(
        default=None,
        metadata={"help": "Which head to convert; that of SOURCE's config.json if not given.", "choices": list(TASKS)},
    )
    dtype: str = field(default="auto", metadata={"help": "float32, bfloat16, float16, or the source's."})


def load_source(source: str, task: str | None = None, dtype: str = "auto") -> PreTrainedModel:
    """Loads a model to convert.

    Args:
        source: Folder or Hub name.
        task: A key of `TASKS`, whose Auto class loads the model. Otherwise the class that the source's configuration
            names does, or `AutoModel` where that is none of `FAMILIES`.
        dtype: As `from_pretrained`.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: If it cannot be converted, or if the source lacks tensors, which would be random.
    """
    config = AutoConfig.from_pretrained(source)
    family = _family(config, source)
    classes = {family.stem + rest for rest in family.heads}
    named = next((name for name in config.architectures or [] if name in classes), "AutoModel")
    name = TASKS[task] if task else named
    model, report = getattr(transformers, name).from_pretrained(source, dtype=dtype, output_loading_info=True)
    _, left_out = convert_state_dict(model.state_dict(), family, _head(model, family))
    if missing := sorted(set(report["missing_keys"]) - set(left_out)):
        raise ValueError(
            f"{source} has no {', '.join(missing)}, which would be random in a {type(model).__name__}: choose another "
            f"--task ({', '.join(TASKS)})"
        )
    unused = sorted(report["unexpected_keys"])
    if foreign := [name for name in unused if re.search(r"\blayer\.\d+\.", name)]:
        raise ValueError(
            f"{source} has {', '.join(foreign)}, which the layers of a {type(model).__name__} do not have: it is "
            "another model, or its adapters have to be merged first"
        )
    logger.info("not used by %s: %s", type(model).__name__, ", ".join(unused) or "none")
    return model


def main(argv: list[str] | None = None) -> None:
    """Converts and saves.

    Args:
        argv: The command line's arguments if None.
    """
    linformer, arguments, healing, paths = parse_arguments(
        LinformerArguments,
        ConversionArguments,
        HealingArguments,
        name="convert_hf",
        description="Makes a Linformer of a trained encoder of Transformers, with its head and its tokenizer.",
        source_help="Folder or Hub name of the encoder.",
        argv=argv,
    )
    tokenizer = load_tokenizer(paths.source)
    source = load_source(paths.source, arguments.task, arguments.dtype)
    converted = convert_encoder(source, **linformer.options())
    figures = list(calibrate(converted, source, tokenizer, healing).values())
    save(converted, tokenizer, paths, by_name(figures[-1]) if figures else None)


__all__ = ["FAMILIES", "convert_encoder", "convert_state_dict", "load_source", "load_state_dict"]


if __name__ == "__main__":
    main()
