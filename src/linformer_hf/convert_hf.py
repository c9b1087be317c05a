"""Makes a Linformer of a trained BERT or RoBERTa encoder of Transformers."""

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .configuration_linformer import LinformerConfig
from .modeling_linformer import LinformerForMaskedLM, LinformerModel, LinformerPreTrainedModel


logger = logging.get_logger(__name__)

# Names in the source's state dict, as regular expressions, and what they are called here; `None` leaves a tensor out.
# The first row that fits counts. Layers and embeddings have RoBERTa's names in all three families.
RENAMES: dict[str, list[tuple[str, str | None]]] = {
    "bert": [
        (r"(bert\.)?pooler\..*", None),  # this family has no pooler: an unused parameter stops distributed training
        (r"cls\.seq_relationship\..*", None),  # next-sentence prediction
        (r"cls\.predictions\.bias", None),  # the same tensor as decoder.bias
        (r"cls\.predictions\.transform\.dense\.(.*)", r"lm_head.dense.\1"),
        (r"cls\.predictions\.transform\.LayerNorm\.(.*)", r"lm_head.layer_norm.\1"),
        (r"cls\.predictions\.decoder\.(.*)", r"lm_head.decoder.\1"),
        (r"(?:bert\.)?((?:embeddings|encoder)\..*)", r"linformer.\1"),
    ],
    "roberta": [
        (r"(roberta\.)?pooler\..*", None),
        (r"lm_head\.bias", None),  # the same tensor as decoder.bias
        (r"(lm_head\..*)", r"\1"),
        (r"(?:roberta\.)?((?:embeddings|encoder)\..*)", r"linformer.\1"),
    ],
}

# Configuration fields that mean the same in the source.
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
)


def convert_encoder(model: PreTrainedModel, **linformer_options: Any) -> LinformerPreTrainedModel:
    """Makes a Linformer with the weights of a BERT or RoBERTa encoder or masked language model.

    The projections are mean pooling, so that inputs of up to k tokens give the source's outputs exactly, and longer
    ones an approximation that further training improves. Only projections are new; the source is not changed.

    Args:
        model: A `BertModel`, `BertForMaskedLM`, `BertForPreTraining`, `RobertaModel` or `RobertaForMaskedLM`.
        **linformer_options: Fields of `LinformerConfig` that shall differ from the source's or from the defaults here,
            `projection_type="mean_pooling"` and `projected_length=256` (or the longest input, if that is shorter).

    Returns:
        A `LinformerForMaskedLM` if the source has a masked-LM head, else a `LinformerModel`; on the device, in the
        dtype and in the mode of the source.

    Raises:
        ValueError: If the source is of another family, is a decoder, has relative positions, holds tensors that have
            no place here, or if an option would change the shape of a tensor.

    Example:
        ```python
        >>> from transformers import AutoModel
        >>> from linformer_hf.convert_hf import convert_encoder

        >>> model = convert_encoder(AutoModel.from_pretrained("bert-base-uncased"), projected_length=128)
        ```
    """
    source: Any = getattr(model, "config", None)
    if (family := getattr(source, "model_type", type(model).__name__)) not in RENAMES:
        raise ValueError(f"`model` is a {family!r}, but must be one of {', '.join(map(repr, RENAMES))}")
    if getattr(source, "is_decoder", False) or getattr(source, "add_cross_attention", False):
        raise ValueError("`model` is a decoder, but a Linformer cannot be causal: convert an encoder")
    if (positions := getattr(source, "position_embedding_type", None)) not in (None, "absolute"):
        raise ValueError(f"`model` has {positions!r} positions, but must have 'absolute' ones: others need n×n scores")

    state_dict, left_out = rename_state_dict(model.state_dict(), source.model_type)
    position_key = "linformer.embeddings.position_embeddings.weight"
    if source.model_type == "roberta":  # its positions start behind the padding token's id
        embeddings: Any = model.base_model.embeddings
        padding_index = embeddings.padding_idx
        state_dict[position_key] = state_dict[position_key][0 if padding_index is None else padding_index + 1 :]
    longest = len(state_dict[position_key])

    options = {name: getattr(source, name) for name in KEPT_FIELDS if hasattr(source, name)}
    options |= {"max_position_embeddings": longest, "projection_type": "mean_pooling"}
    options |= {"projected_length": min(256, longest)} | linformer_options
    has_head = any(name.startswith("lm_head.") for name in state_dict)
    converted = (LinformerForMaskedLM if has_head else LinformerModel)(LinformerConfig(**options))
    if not has_head:
        state_dict = {name.removeprefix("linformer."): tensor for name, tensor in state_dict.items()}
    new = _load(converted, state_dict)
    logger.info(f"{len(state_dict)} tensors taken over; left out: {left_out or 'none'}; new: {new or 'none'}")
    nn.Module.to(converted, device=model.device, dtype=model.dtype)
    return converted.train(model.training)


def rename_state_dict(
    state_dict: dict[str, torch.Tensor], model_type: str
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Renames a state dict of a source family.

    Args:
        state_dict: The source's.
        model_type: A key of `RENAMES`.

    Returns:
        The tensors under the names of `LinformerForMaskedLM`, and the source's names that have no place in it.

    Raises:
        ValueError: If a name is in no row of the table.
    """
    renamed, left_out, unknown = {}, [], []
    for name, tensor in state_dict.items():
        match, target = next(
            ((m, target) for row, target in RENAMES[model_type] if (m := re.fullmatch(row, name))), (None, None)
        )
        if match is None:
            unknown.append(name)
        elif target is None:
            left_out.append(name)
        else:
            renamed[match.expand(target)] = tensor
    if unknown:
        raise ValueError(
            f"`model` has tensors that a Linformer has no place for: {', '.join(unknown)}. Convert the encoder "
            "(`model.base_model`) or a masked language model without further heads"
        )
    return renamed, left_out


def _load(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> list[str]:
    """Copies the tensors into the model and gives the names of those that the model has beside them."""
    own = model.state_dict()
    for name, tensor in state_dict.items():
        if name not in own or own[name].shape != tensor.shape:
            raise ValueError(
                f"`{name}` has the shape {tuple(tensor.shape)} in the source, but in the target "
                f"{tuple(own[name].shape) if name in own else 'no place'}: leave out the option that says so"
            )
    new = sorted(own.keys() - state_dict.keys())
    if others := [name for name in new if "_projection." not in name]:
        raise ValueError(f"`model` lacks tensors that a Linformer needs: {', '.join(others)}")
    model.load_state_dict(state_dict, strict=False)
    if lost := [name for name, tensor in state_dict.items() if not torch.equal(own[name].to(tensor), tensor)]:
        raise ValueError(
            f"The source's {', '.join(lost)} would be lost, since `tie_word_embeddings=True` makes them the same "
            "tensor as others that differ in the source: leave that option out"
        )
    return new


__all__ = ["convert_encoder", "rename_state_dict"]
