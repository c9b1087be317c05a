"""Gives a Linformer another longest input: `lengthen` and `shorten`.

    python -m linformer_hf.lengthen SOURCE OUTPUT --max_position_embeddings 4096

does so with a checkpoint and its tokenizer. Shapes are written with n and N for the longest input before and after, k
projected positions, c hidden size.
"""

import copy
import logging
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig

from .command_line import load_tokenizer, parse_arguments, save
from .configuration_linformer import AUTO_MAP
from .modeling_linformer import LinformerPreTrainedModel


logger = logging.getLogger(__name__)

Method = Literal["tile", "interpolate"]


def lengthen(
    model: LinformerPreTrainedModel, max_position_embeddings: int, method: Method = "tile"
) -> LinformerPreTrainedModel:
    """Makes a model that takes longer inputs.

    Args:
        model: A Linformer, with any head; it is not changed.
        max_position_embeddings: Its new longest input, N.
        method: `"tile"` repeats position embeddings and the columns of learned k×n projections, draws the columns
            that random projections lack, and lets convolutions keep their kernel and have more positions k: outputs
            for inputs of up to n tokens do not change. `"interpolate"` stretches position embeddings, learned
            projections and kernels from n to N tokens, linearly, so that a projected position goes on to stand for the
            same part of the longest input; random projections are drawn anew. All outputs change, and want training.

    Returns:
        The longer model, with the head, device, dtype and mode of `model`.

    Raises:
        ValueError: If `model` is no Linformer, N is not more than n, the method is unknown, or a convolution's stride
            does not fit N.

    Example:
        ```python
        >>> from linformer_hf import LinformerForMaskedLM
        >>> from linformer_hf.lengthen import lengthen

        >>> model = lengthen(LinformerForMaskedLM.from_pretrained("my-linformer"), 4096)
        ```
    """
    longest = _longest_input(model)
    if max_position_embeddings <= longest:
        raise ValueError(
            f"`max_position_embeddings` is {max_position_embeddings}, but must be more than the {longest} that the "
            "model takes already: use `shorten` for less"
        )
    if method not in get_args(Method):
        raise ValueError(f"`method` is {method!r}, but must be one of {', '.join(get_args(Method))}")
    return _resize(model, max_position_embeddings, method)


def shorten(model: LinformerPreTrainedModel, max_position_embeddings: int) -> LinformerPreTrainedModel:
    """Makes a smaller model that takes shorter inputs only; the outputs for these do not change.

    Args:
        model: A Linformer, with any head; it is not changed.
        max_position_embeddings: Its new longest input, N.

    Returns:
        The shorter model, with the head, device, dtype and mode of `model`.

    Raises:
        ValueError: If `model` is no Linformer, N is not from 1 to n - 1, a k×n projection has more than N positions k,
            or a convolution's stride does not fit N.
    """
    longest = _longest_input(model)
    if not 0 < max_position_embeddings < longest:
        raise ValueError(
            f"`max_position_embeddings` is {max_position_embeddings}, but must be from 1 to {longest - 1}, since the "
            f"model takes {longest}: use `lengthen` for more"
        )
    return _resize(model, max_position_embeddings, "tile")


def tile_positions(weight: torch.Tensor, length: int) -> torch.Tensor:
    """Repeats position embeddings, as Longformer was made from RoBERTa (https://arxiv.org/abs/2004.05150, section 5).

    Args:
        weight: (n, c).
        length: How many positions the result has.

    Returns:
        (length, c), with position p as p mod n in `weight`.

    Raises:
        ValueError: If `length` is less than n.
    """
    if length < len(weight):
        raise ValueError(
            f"`max_position_embeddings` is {length}, but the source has {len(weight)} positions, which are not cut "
            f"off: give at least {len(weight)}"
        )
    return weight[torch.arange(length, device=weight.device) % len(weight)]


def _longest_input(model: Any) -> int:
    if not isinstance(model, LinformerPreTrainedModel):
        raise ValueError(f"`model` is a {type(model).__name__}, but must be a Linformer: `convert_hf` makes one")
    return model.config.max_position_embeddings


def _resize(model: LinformerPreTrainedModel, length: int, method: str) -> LinformerPreTrainedModel:
    """A copy with another longest input; `"tile"` to a smaller one cuts off."""
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = length
    config.num_global_tokens = min(config.num_global_tokens, length)
    if config.projection_type == "random":  # new columns, independent of those that are there
        config.projection_seed = (config.projection_seed + 1) % 2**32
    lengths = [_projected_length(model.config, k, length, method) for k in model.config.projected_lengths]
    config.projected_length = lengths if isinstance(config.projected_length, list) else lengths[0]
    resized = type(model)(config)
    nn.Module.to(resized, device=model.device, dtype=model.dtype)

    state_dict = resized.state_dict()
    for name, weight in model.state_dict().items():
        new = state_dict[name]
        if name.endswith("position_embeddings.weight"):
            weight = _resize_last_axis(weight.T, length, method).T
        elif new.shape == weight.shape:
            pass
        elif config.projection_type != "random":
            # what sums up to 1 goes on to do so
            scale = weight.shape[-1] / new.shape[-1] if method == "interpolate" else 1.0
            weight = scale * _resize_last_axis(weight, new.shape[-1], method)
        elif method == "interpolate":
            weight = new
        else:
            weight = torch.cat([weight[..., :length], new[..., weight.shape[-1] :]], dim=-1)
        state_dict[name] = weight
    resized.load_state_dict(state_dict)
    return resized.train(model.training)


def _resize_last_axis(weight: torch.Tensor, length: int, method: str) -> torch.Tensor:
    if method == "interpolate":
        rows = weight.flatten(0, -2)[None].float()
        return F.interpolate(rows, size=length, mode="linear").view(*weight.shape[:-1], length)
    return weight[..., torch.arange(length, device=weight.device) % weight.shape[-1]]


def _projected_length(config: Any, k: int, length: int, method: str) -> int:
    """A layer's k where the longest input is `length`."""
    if k == 0 or "pooling" in config.projection_type:
        return min(k, length)  # shorter inputs have no more positions anyway
    if config.projection_type != "convolution":
        if k > length:
            raise ValueError(
                f"`max_position_embeddings` is {length}, but must be at least `projected_length`, which is {k}, since "
                f"the rows of a {config.projection_type!r} projection are not cut off"
            )
        return k
    if method == "interpolate":
        return k
    stride = -(-config.max_position_embeddings // k)
    k = -(-length // stride)
    if -(-length // k) != stride:
        raise ValueError(
            f"`max_position_embeddings` is {length}, for which no `projected_length` gives the convolution's stride, "
            f"{stride}: give a multiple of it, such as {length // stride * stride} or {k * stride}"
        )
    return k


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class LengthArguments:
    """The new longest input."""

    max_position_embeddings: int = field(metadata={"help": "Longest input in tokens, more or less than before."})
    method: str = field(
        default="tile",
        metadata={
            "help": "tile keeps the outputs for inputs that are not longer than before, interpolate does not.",
            "choices": get_args(Method),
        },
    )


def main(argv: list[str] | None = None) -> None:
    """Lengthens or shortens a checkpoint, and saves it with its tokenizer.

    Args:
        argv: The command line's arguments if None.
    """
    arguments, paths = parse_arguments(
        LengthArguments,
        name="lengthen",
        description="Gives a Linformer another longest input.",
        source_help="Folder or Hub name of the Linformer.",
        argv=argv,
    )
    config = AutoConfig.from_pretrained(paths.source)
    if config.model_type != "linformer":
        raise ValueError(f"{paths.source} is a {config.model_type!r}, but must be a Linformer: `convert_hf` makes one")
    classes = {reference.rpartition(".")[2]: auto_class for auto_class, reference in AUTO_MAP.items()}
    name = next((name for name in config.architectures or [] if name in classes), "LinformerModel")
    model = getattr(transformers, classes[name]).from_pretrained(paths.source, dtype="auto")
    tokenizer = None
    try:
        tokenizer = load_tokenizer(paths.source)
    except ValueError as error:  # as `convert_fairseq` may leave it
        logger.warning("no tokenizer is saved: %s", error)
    if arguments.max_position_embeddings < config.max_position_embeddings:
        resized = shorten(model, arguments.max_position_embeddings)
    else:
        resized = lengthen(model, arguments.max_position_embeddings, arguments.method)
    logger.info("from %d to %d tokens", config.max_position_embeddings, resized.config.max_position_embeddings)
    save(resized, tokenizer, paths)


__all__ = ["lengthen", "shorten", "tile_positions"]


if __name__ == "__main__":
    main()
