"""Lets a converted encoder agree with its source again, on any text: how projections start, and a short training.

Shapes are written with b batch, n tokens, k projected positions, h heads, c hidden size, m masked tokens.
"""

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler
from tqdm.auto import tqdm
from transformers import DataCollatorForLanguageModeling, PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from .lengthen import tile_positions
from .modeling_linformer import LinformerPreTrainedModel
from .projections_linformer import MatrixProjection, Projection, pooling_matrix


logger = logging.getLogger(__name__)

PROJECTION_INITS = ("mean_pooling", "random", "identity", "spectral")

# Windows of calibration text that `spectral` looks at, and at most so many that are held out for the report
SPECTRAL_WINDOWS = 32
HELD_OUT_WINDOWS = 64


# ---------------------------------------------------------------------------------------------------------------------
# Text and reference
# ---------------------------------------------------------------------------------------------------------------------


def calibration_windows(path: str | Path, tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Cuts a text file in windows of tokens.

    Args:
        path: A text file; each line is a document. They are joined with a separator token between them.
        tokenizer: The source's; each window starts with its first and ends with its last special token.
        length: Tokens of a window, n.

    Returns:
        Token ids (windows, n).

    Raises:
        ValueError: If there is no such file, or the text does not fill two windows: one to learn from, one to test.
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no calibration file {path}")
    lines = [line for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    documents = tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"] if lines else []
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    tokens = torch.tensor([token for document in documents for token in (*document, last)], dtype=torch.long)
    if length < 3 or len(tokens) < 2 * (length - 2):
        raise ValueError(
            f"{path} has {len(tokens)} tokens, which do not fill two windows of {length}, two of them special: give "
            "more text or a shorter --max_seq_length (at least 3)"
        )
    pieces = tokens[: len(tokens) // (length - 2) * (length - 2)].view(-1, length - 2)
    return F.pad(F.pad(pieces, (1, 0), value=first), (0, 1), value=last)


def lengthen_source(source: PreTrainedModel, length: int) -> PreTrainedModel:
    """The source with more positions and full attention (sdpa): what a longer target shall agree with.

    Args:
        source: A BERT-like model with absolute positions.
        length: Positions that it shall have, without RoBERTa's offset.

    Returns:
        A copy with `tile_positions`, or the source itself if it is long enough.
    """
    positions, name = _positions(source)
    if length <= len(positions):
        return source
    weights = source.state_dict()
    others = weights[name][: len(weights[name]) - len(positions)]
    config = copy.deepcopy(source.config)
    config.max_position_embeddings = len(others) + length
    longer = type(source)(config)
    nn.Module.to(longer, device=source.device, dtype=source.dtype)
    longer.load_state_dict(weights | {name: torch.cat([others, tile_positions(positions, length)])})
    longer.set_attn_implementation("sdpa")
    return longer.train(source.training)


def _positions(source: PreTrainedModel) -> tuple[torch.Tensor, str]:
    """The source's position embeddings (n, c), behind those that RoBERTa never uses, and their name."""
    (name,) = (name for name, _ in source.named_parameters() if name.endswith("embeddings.position_embeddings.weight"))
    weight, padding_index = (
        source.get_parameter(name).detach(),
        getattr(source.base_model.embeddings, "padding_idx", None),
    )
    return weight[0 if padding_index is None else padding_index + 1 :], name


# ---------------------------------------------------------------------------------------------------------------------
# How projections start
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def initialize_projections(
    target: LinformerPreTrainedModel,
    method: str,
    source: PreTrainedModel | None = None,
    windows: torch.Tensor | None = None,
) -> None:
    """Fills the learned k×n projections of a model with `projection_type="linear"`.

    Args:
        target: The converted model; it is changed.
        method: `"mean_pooling"`: exactly the mean of n/k tokens. `"random"`: iid N(0, 1/k), as in the paper's
            Theorem 2. `"identity"`: for k = n, full attention exactly. `"spectral"`: see `spectral_matrix`; the
            attention matrices are those of all layers and heads together with `projection_sharing="layerwise"`, of
            the layer's heads with `"key_value"` and `"headwise"`, and of the head with `"none"`.
        source: The full-attention model, for `"spectral"`.
        windows: Token ids (windows, n) to run it on, for `"spectral"`, with n = `max_position_embeddings`.

    Raises:
        ValueError: If the projections are not learned matrices, the method is unknown, k is not n for `"identity"`,
            or source or windows of full length are missing for `"spectral"`.
    """
    projections = {name: module for name, module in target.named_modules() if isinstance(module, MatrixProjection)}
    if target.config.projection_type != "linear" or not projections:
        raise ValueError(
            f"`projection_type` is {target.config.projection_type!r}, whose start cannot be chosen: use 'linear'"
        )
    longest = target.config.max_position_embeddings
    grams = None
    if method == "spectral":
        if source is None or windows is None or windows.shape[1] != longest:
            given = None if windows is None else tuple(windows.shape)
            raise ValueError(
                f"'spectral' needs the source and windows of `max_position_embeddings` = {longest} tokens, but got "
                f"windows of shape {given}: give calibration text and no shorter --max_seq_length"
            )
        grams = attention_grams(source, windows, per_head=target.config.projection_sharing == "none")
    for name, projection in projections.items():
        k, n = projection.weight.shape[-2:]
        if method == "identity" and k != n:
            raise ValueError(f"'identity' needs `projected_length` = `max_position_embeddings`, but they are {k}, {n}")
        if method in ("mean_pooling", "identity"):  # the mean of one token is the token
            matrix = pooling_matrix(k, n)
        elif method == "random":
            matrix = projection.random_matrix()
        elif grams is not None:
            layer = re.search(r"\blayer\.(\d+)\.", name)
            matrix = spectral_matrix(grams.sum(0) if layer is None else grams[int(layer[1])], k)
        else:
            raise ValueError(f"{method!r} is no start of projections: use one of {', '.join(PROJECTION_INITS)}")
        projection.weight.copy_(matrix.to(projection.weight))


def attention_grams(source: PreTrainedModel, windows: torch.Tensor, per_head: bool = False) -> torch.Tensor:
    """Sums A^T A over the attention matrices A (n, n) of each layer.

    Args:
        source: The full-attention model; it is left as it was.
        windows: Token ids (windows, n), run one by one: the matrices of one window are in memory together.
        per_head: Whether heads are kept apart.

    Returns:
        (layers, h, n, n), or (layers, n, n) with the heads of a layer summed up.
    """
    implementation = source.config._attn_implementation
    grams: dict[int, torch.Tensor] = {}
    with _evaluating(source):
        source.set_attn_implementation("eager")  # the others keep no probabilities
        for window in tqdm(windows.to(source.device).split(1), desc="attention of the source", leave=False):
            for layer, attention in enumerate(source.base_model(window, output_attentions=True).attentions):
                rows = attention[0].float() if per_head else attention.float().flatten(0, 2)
                grams[layer] = grams.get(layer, 0) + rows.mT @ rows
        source.set_attn_implementation(implementation)
    return torch.stack(list(grams.values()))


def spectral_matrix(gram: torch.Tensor, projected_length: int) -> torch.Tensor:
    """The projection onto the leading right singular directions of attention matrices.

    By equations 4 to 6 of the paper (https://arxiv.org/abs/2006.04768), A V is closest to A E^T E V with the k leading
    right singular vectors of A as the rows of E. All bases of their span do this equally well, but singular vectors
    have no sign and mix tokens from everywhere, and projected keys have to be sensible keys. So this basis is taken:
    the one closest to mean pooling (the orthogonal Procrustes problem), scaled to the norm that pooling has. With
    k = n it is the identity.

    Args:
        gram: (..., n, n), the sum of A^T A.
        projected_length: k.

    Returns:
        (..., k, n) with orthogonal rows of equal norm.
    """
    directions = torch.linalg.eigh(gram.double())[1][..., -projected_length:].mT  # the largest eigenvalues come last
    pooling = pooling_matrix(projected_length, gram.shape[-1]).to(directions)
    left, _, right = torch.linalg.svd(pooling @ directions.mT)
    return (left @ right @ directions) * pooling.norm() * projected_length**-0.5


# ---------------------------------------------------------------------------------------------------------------------
# Healing
# ---------------------------------------------------------------------------------------------------------------------


def heal(
    target: LinformerPreTrainedModel,
    source: PreTrainedModel,
    windows: torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    steps: int,
    batch_size: int = 4,
    learning_rate: float = 5e-5,
    bf16: bool = False,
    seed: int = 0,
) -> list[float]:
    """Trains a converted model to have its source's hidden states after every layer.

    The loss is the mean over the layers of the relative squared error |ours - theirs|² / |theirs|². If both have a
    masked-LM head, 15 % of the tokens are masked, and the Kullback-Leibler divergence of the words' probabilities
    there is added. No dropout. First, projections with weights, then (without a window) all weights are trained with
    the source's hidden states as each layer's input, so that no layer learns from the others' mistakes. Last, all
    layers are trained together as they are used; then the relative squared error of the mean over each window's
    last hidden states is added: it hardly counts among the tokens' errors, but is what embeddings are made of.
    Every third batch on average is cut to a random length, so that the model is not healed for one length alone.

    Args:
        target: The converted model; it is changed.
        source: The model that it shall agree with, with as many positions (see `lengthen_source`).
        windows: Token ids (windows, n) without padding.
        tokenizer: Knows the mask token.
        steps: Optimizer steps of all phases together.
        batch_size: Windows of each step.
        learning_rate: Highest one of AdamW while all layers are trained together; 20 times that before.
        bf16: Whether to compute in bfloat16 where autocast does; the weights stay as they are.
        seed: Of the order of the windows and of the masks.

    Returns:
        The loss of each step.

    Raises:
        ValueError: If there are no steps, the target's weights have less than 32 bits, or the windows are too long.
    """
    if steps < 1:
        raise ValueError(f"`steps` is {steps}, but must be at least 1")
    if torch.finfo(target.dtype).bits < 32:
        raise ValueError(
            f"The weights are {target.dtype}, too coarse for small steps: convert in float32, and train with bf16"
        )
    batches = iter(_batches(target, source, windows, tokenizer, batch_size, seed, steps))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    with _evaluating(target, source), tqdm(total=steps, desc="healing") as progress:
        for parameters, num_steps, rate, alone in _phases(target, steps):
            optimizer = torch.optim.AdamW(parameters, lr=rate * learning_rate, weight_decay=0.0)
            scheduler = get_scheduler("linear", optimizer, num_steps // 10, num_steps)
            for _ in range(num_steps):
                with torch.autocast(target.device.type, torch.bfloat16, enabled=bf16):
                    outputs = _compare(target, source, _shortened(next(batches), generator), alone)
                    loss = outputs.loss(pooled=not alone)
                loss.backward(inputs=parameters)
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                progress.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
                progress.update()
    return losses


def _shortened(batch: Any, generator: torch.Generator) -> Any:
    """Cuts every third batch of `_batches`, on average, to a length from n/8 to n, keeping the last special token."""
    longest = batch["input_ids"].shape[1]
    length = int(torch.randint(-(-longest // 8), longest + 1, (1,), generator=generator))
    if length < 3 or torch.rand(1, generator=generator) >= 1 / 3:
        return batch
    kept = torch.tensor([*range(length - 1), longest - 1])
    return {name: batch[name][:, kept] for name in ("input_ids", "labels")}


def _phases(target: LinformerPreTrainedModel, steps: int) -> Iterator[tuple[list[nn.Parameter], int, float, bool]]:
    """What is trained, for how many steps, at how many times the learning rate, and whether each layer on its own."""
    everything = [parameter for parameter in target.parameters() if parameter.requires_grad]
    modules = [module for module in target.modules() if isinstance(module, Projection)]
    projections = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    first = steps // 5 if projections else 0
    # with a window, layers start nearly right, and so large steps on their own make them worse
    second = 0 if any(target.config.local_attention_windows) else (steps - first) // 2
    phases = [(projections, first, 20.0, True), (everything, second, 20.0, True)]
    phases.append((everything, steps - first - second, 1.0, False))
    yield from (phase for phase in phases if phase[1])


@torch.no_grad()
def agreement(
    target: LinformerPreTrainedModel,
    source: PreTrainedModel,
    windows: torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int = 4,
    seed: int = 0,
) -> dict[str, Any]:
    """Says how far a converted model agrees with its source.

    Args:
        target: The converted model.
        source: Its source, with as many positions.
        windows: Token ids (windows, n) without padding, best of text that `heal` did not see.
        tokenizer: Knows the mask token.
        batch_size: Windows at once.
        seed: Of the masks.

    Returns:
        `layer_errors`: for each layer, |ours - theirs| / |theirs| of the hidden states. If both have a masked-LM head,
        15 % of the tokens are masked, and over these there are also `source_loss`, `target_loss` (nat), `source_top1`,
        `target_top1` (share of words that are the first guess) and `same_top1` (share of first guesses in common).

    Raises:
        ValueError: If the windows are too long.
    """
    errors = torch.zeros(2, target.config.num_hidden_layers, dtype=torch.float64)
    words = torch.zeros(6, dtype=torch.float64)
    with _evaluating(target, source):
        for batch in tqdm(
            _batches(target, source, windows, tokenizer, batch_size, seed), desc="agreement", leave=False
        ):
            outputs = _compare(target, source, batch)
            errors += outputs.squared_errors().cpu()
            words += outputs.word_scores().cpu()
    figures: dict[str, Any] = {"layer_errors": (errors[0] / errors[1]).sqrt().tolist()}
    names = ("source_loss", "target_loss", "source_top1", "target_top1", "same_top1")
    return figures | (dict(zip(names, (words[:5] / words[5]).tolist(), strict=True)) if words[5] else {})


@dataclass
class _Outputs:
    """What both models say.

    Attributes:
        states: For each layer the target's and the source's hidden states, (b, n, c) each.
        words: The target's and the source's logits at masked tokens, (m, words), and the right ones, (m).
    """

    states: list[tuple[torch.Tensor, torch.Tensor]]
    words: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    def squared_errors(self) -> torch.Tensor:
        """(2, layers): squared norms of the differences, and of the source's hidden states."""
        norms = [
            ((ours.float() - theirs).square().sum(), theirs.float().square().sum()) for ours, theirs in self.states
        ]
        return torch.stack([torch.stack(column) for column in zip(*norms, strict=True)])

    def loss(self, pooled: bool) -> torch.Tensor:
        """The loss of `heal`; `pooled` adds the error of the means over tokens."""
        errors, norms = self.squared_errors()
        loss = (errors / norms).mean()
        if pooled:
            ours, theirs = (states.float().mean(dim=1) for states in self.states[-1])
            # relative to how windows differ, which says more than what all have in common; a lone one differs from 0
            common = theirs.mean(dim=0) if len(theirs) > 1 else 0.0
            loss = loss + (ours - theirs).square().sum() / (theirs - common).square().sum()
        if self.words is None or not len(self.words[2]):
            return loss
        ours, theirs = (logits.float().log_softmax(-1) for logits in self.words[:2])
        return loss + F.kl_div(ours, theirs, log_target=True, reduction="batchmean")

    def word_scores(self) -> torch.Tensor:
        """Sums over masked tokens, in the order of `agreement`, and their number."""
        if self.words is None:
            return torch.zeros(6)
        ours, theirs, labels = self.words
        guess, wanted = ours.argmax(-1), theirs.argmax(-1)
        sums = [F.cross_entropy(logits.float(), labels, reduction="sum") for logits in (theirs, ours)]
        sums += [(one == other).sum() for one, other in ((wanted, labels), (guess, labels), (guess, wanted))]
        return torch.stack([*sums, torch.ones_like(labels).sum()])


def _compare(target: PreTrainedModel, source: PreTrainedModel, batch: Any, alone: bool = False) -> _Outputs:
    """Runs both on a batch of `_batches`; with `alone`, each layer of the target takes the source's hidden states."""
    input_ids, labels = batch["input_ids"].to(target.device), batch["labels"].to(target.device)
    masked = labels != -100 if _have_words(target, source) else None
    with torch.no_grad():
        wanted, wanted_logits = _run(source, input_ids, masked)
    encoder: Any = target.base_model.encoder
    with ExitStack() as hooks:
        for layer, given in zip(encoder.layer, wanted[:-1], strict=True) if alone else ():
            hook = partial(_replace_input, given.to(target.dtype))
            hooks.callback(layer.register_forward_pre_hook(hook).remove)
        states, logits = _run(target, input_ids, masked)
    words = None if logits is None or wanted_logits is None else (logits, wanted_logits, labels[masked])
    return _Outputs(list(zip(states[1:], wanted[1:], strict=True)), words)


def _replace_input(given: torch.Tensor, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook before a layer's forward."""
    return (given, *args[1:])


def _run(
    model: PreTrainedModel, input_ids: torch.Tensor, masked: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Hidden states before and after each layer, (b, n, c), and logits (m, words) of the masked tokens, if any."""
    if masked is None:
        return model.base_model(input_ids, output_hidden_states=True).hidden_states, None

    def keep_masked(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[masked][None]
        return output

    # the head is by far the largest layer of a small model, and differs between the families: let it see less
    hook = model.base_model.register_forward_hook(keep_masked)
    try:
        outputs = model(input_ids, output_hidden_states=True)
    finally:
        hook.remove()
    return outputs.hidden_states, outputs["logits" if "logits" in outputs else "prediction_logits"][0]


def _have_words(*models: PreTrainedModel) -> bool:
    """Whether all models have a masked-LM head."""
    return all(model.get_output_embeddings() is not None for model in models)


def _batches(
    target: PreTrainedModel,
    source: PreTrainedModel,
    windows: torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    seed: int,
    steps: int | None = None,
) -> DataLoader:
    """Batches of windows, masked if both models have a masked-LM head: as many as `steps` says, or all in order."""
    longest, positions = target.config.max_position_embeddings, len(_positions(source)[0])
    if windows.shape[1] > min(longest, positions):
        raise ValueError(
            f"The windows have {windows.shape[1]} tokens, but the target takes {longest} and the source {positions}: "
            "give shorter windows (--max_seq_length), or make the source longer with `lengthen_source`"
        )
    generator = torch.Generator().manual_seed(seed)
    sampler = None if steps is None else RandomSampler(windows, num_samples=steps * batch_size, generator=generator)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=_have_words(target, source), seed=seed)
    dataset: Any = windows
    return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=collator, generator=generator)


@contextmanager
def _evaluating(*models: nn.Module) -> Iterator[None]:
    """Switches dropout off for a while."""
    modes = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class HealingArguments:
    """How projections start and what a converted model is trained on, for the command line of `convert_hf`."""

    projection_init: str | None = field(
        default=None,
        metadata={
            "help": "Start of --projection_type linear; mean_pooling with some noise if not given. spectral needs "
            "--calibration_file.",
            "choices": PROJECTION_INITS,
        },
    )
    calibration_file: str | None = field(
        default=None, metadata={"help": "Text to compare source and conversion on, a document a line."}
    )
    calibration_steps: int = field(default=0, metadata={"help": "Steps of training the conversion to agree."})
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Tokens of a window of that text; the longest input if not given."}
    )
    batch_size: int = field(default=4, metadata={"help": "Windows of each step."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Highest one while all layers are trained together."})
    bf16: bool = field(default=False, metadata={"help": "Compute these steps in bfloat16."})
    seed: int = field(default=0, metadata={"help": "Of the order of the windows and of the masks."})

    def __post_init__(self) -> None:
        if self.calibration_file is None and (self.calibration_steps or self.projection_init == "spectral"):
            raise ValueError("--calibration_steps and --projection_init spectral need text: give --calibration_file")


def calibrate(
    target: LinformerPreTrainedModel,
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: HealingArguments,
) -> dict[str, dict[str, Any]]:
    """Does what the arguments say: starts the projections, heals, and compares on held-out text.

    Args:
        target: The converted model; it is changed.
        source: What it was made of; it stays as it is.
        tokenizer: The tokenizer of both.
        args: The arguments.

    Returns:
        `before` and `after` healing what `agreement` says on the last tenth of the text; empty without text.

    Raises:
        ValueError: If the projections cannot start so, or the text is too short.
    """
    longest = target.config.max_position_embeddings
    windows = held_out = None
    if args.calibration_file is not None:
        source = lengthen_source(source, longest)
        windows = calibration_windows(args.calibration_file, tokenizer, args.max_seq_length or longest)
        windows, held_out = windows.split([len(windows) - (size := -(-len(windows) // 10)), size])
        held_out = held_out[:HELD_OUT_WINDOWS]
    if args.projection_init is not None:
        seen = None if windows is None else windows[:SPECTRAL_WINDOWS]
        initialize_projections(target, args.projection_init, source, seen)
    if windows is None or held_out is None:
        return {}
    figures = {"before": agreement(target, source, held_out, tokenizer, args.batch_size)}
    if args.calibration_steps:
        heal(
            target,
            source,
            windows,
            tokenizer,
            args.calibration_steps,
            args.batch_size,
            args.learning_rate,
            args.bf16,
            args.seed,
        )
        figures["after"] = agreement(target, source, held_out, tokenizer, args.batch_size)
    logger.info("%s", format_agreement(figures))
    return figures


def by_name(figures: dict[str, Any]) -> dict[str, float]:
    """What `agreement` returns, with a name for the error of each layer."""
    errors = {f"relative error of layer {i}": error for i, error in enumerate(figures["layer_errors"], start=1)}
    return {name: value for name, value in figures.items() if name != "layer_errors"} | errors


def format_agreement(figures: dict[str, dict[str, Any]]) -> str:
    """A table of what `calibrate` returns, with a column for `before` and one for `after`."""
    rows = [by_name(column) for column in figures.values()]
    lines = [["", *figures], *([name, *(f"{row[name]:.4f}" for row in rows)] for name in rows[0])]
    return "\n".join(f"{first:<28}" + "".join(f"{cell:>10}" for cell in cells) for first, *cells in lines)


__all__ = [
    "HealingArguments",
    "agreement",
    "by_name",
    "calibrate",
    "calibration_windows",
    "format_agreement",
    "heal",
    "initialize_projections",
    "lengthen_source",
    "spectral_matrix",
]
