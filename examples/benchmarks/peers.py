"""The models that the benchmarks compare, all of one width, depth and number of heads, and how each is set up.

`MODELS` names them. Whatever a model is, `build` makes it a function of token ids (b, n) alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BigBirdConfig,
    FNetConfig,
    LongformerConfig,
    ModernBertConfig,
    NystromformerConfig,
    PreTrainedConfig,
    RobertaConfig,
    RobertaModel,
    YosoConfig,
)

from linformer_hf import LinformerConfig, LinformerModel
from linformer_hf.modeling_linformer import LinformerSelfAttention


WIDTH, INTERMEDIATE, HEADS = 768, 3072, 12
IGNORED = -100  # label of tokens that are not to be predicted


class Shape(NamedTuple):
    """What all models of one comparison share.

    Attributes:
        length: n, tokens of a text.
        projected_length: k, of the Linformers.
        layers: Number of layers.
        dtype: Name of the number format.
        batch_size: b.
        device: As torch names it.
        heads: Number of attention heads.
        vocabulary: Number of tokens; without a head it makes no difference but for what the weights take.
    """

    length: int
    projected_length: int = 128
    layers: int = 2
    dtype: str = "bfloat16"
    batch_size: int = 1
    device: str = "cpu"
    heads: int = HEADS
    vocabulary: int = 1000

    def token_ids(self) -> torch.Tensor:
        """Random token ids, (b, n), the same each time."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(5, 1000, (self.batch_size, self.length), generator=generator).to(self.device)

    def labels(self) -> torch.Tensor:
        """(b, n), a label for 15 % of the tokens and -100 for the others."""
        generator = torch.Generator().manual_seed(1)
        chosen = torch.rand((self.batch_size, self.length), generator=generator) < 0.15
        return torch.where(chosen.to(self.device), self.token_ids(), IGNORED)


def sizes(shape: Shape, positions: int) -> dict[str, Any]:
    """Fields that the configurations of Transformers have in common."""
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": WIDTH,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": positions,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


def linformer(shape: Shape) -> PreTrainedConfig:
    """The paper's best: linear, one matrix for all layers."""
    return LinformerConfig(**sizes(shape, shape.length), projected_length=min(shape.projected_length, shape.length))


def linformer_window(shape: Shape) -> PreTrainedConfig:
    """What conversions use: mean pooling k=64, w=64, one global token."""
    window = {"projection_type": "mean_pooling", "local_attention_window": 64, "num_global_tokens": 1}
    return LinformerConfig(**sizes(shape, shape.length), projected_length=64, **window)


def roberta(shape: Shape, attention: str) -> PreTrainedConfig:
    """Full attention."""
    config = RobertaConfig(**sizes(shape, shape.length + 2), type_vocab_size=1, layer_norm_eps=1e-5)
    config._attn_implementation = attention
    return config


def modernbert(shape: Shape) -> PreTrainedConfig:
    """sdpa; window 128, each third layer full, as released; gated feed-forward of 2048, which costs what 3072 does."""
    config = ModernBertConfig(
        **{**sizes(shape, shape.length), "intermediate_size": INTERMEDIATE * 2 // 3},
        cls_token_id=0,
        sep_token_id=2,
        sparse_prediction=True,
        reference_compile=False,
    )
    config._attn_implementation = "sdpa"
    return config


def nystromformer(shape: Shape) -> PreTrainedConfig:
    """64 landmarks and a convolution of 65 as released, segments that fit the length; float32 weights and autocast."""
    return NystromformerConfig(**sizes(shape, shape.length + 2), segment_means_seq_len=shape.length)


def longformer(shape: Shape) -> PreTrainedConfig:
    """Window 512 as released."""
    return LongformerConfig(**sizes(shape, shape.length + 2), attention_window=512)


def bigbird(shape: Shape) -> PreTrainedConfig:
    """Blocks of 64, three random ones, as released; full attention up to 704 tokens, which is its own choice."""
    return BigBirdConfig(**sizes(shape, shape.length), attention_type="block_sparse")


def yoso(shape: Shape) -> PreTrainedConfig:
    """The expectation on a CPU, since hashing is a CUDA kernel; as released on a GPU."""
    return YosoConfig(**sizes(shape, shape.length + 2), use_expectation=not shape.device.startswith("cuda"))


def fnet(shape: Shape) -> PreTrainedConfig:
    """float32 weights and autocast, since there is no Fourier transform of bfloat16."""
    fields = sizes(shape, shape.length)
    fields.pop("num_attention_heads")
    return FNetConfig(**fields)


def pypi_linformer(shape: Shape) -> nn.Module:
    """`linformer` 0.2.3, keys and values projected by one matrix each, per layer."""
    from linformer import LinformerLM

    k = min(shape.projected_length, shape.length)
    return LinformerLM(shape.vocabulary, WIDTH, shape.length, shape.layers, k=k, heads=shape.heads)


def pypi_linformer_pytorch(shape: Shape) -> nn.Module:
    """`linformer-pytorch` 0.19.3, one matrix for all layers; `none` or other sharings are slower."""
    from linformer_pytorch import LinformerLM

    options = {"dim_k": min(shape.projected_length, shape.length), "dim_ff": INTERMEDIATE, "nhead": shape.heads}
    return LinformerLM(shape.vocabulary, shape.length, WIDTH, depth=shape.layers, **options)


MODELS: dict[str, Callable[[Shape], PreTrainedConfig | nn.Module]] = {
    "linformer": linformer,
    "linformer_compiled": linformer,
    "linformer_window": linformer_window,
    "roberta_eager": partial(roberta, attention="eager"),
    "roberta_sdpa": partial(roberta, attention="sdpa"),
    "modernbert_sdpa": modernbert,
    "nystromformer": nystromformer,
    "longformer": longformer,
    "bigbird": bigbird,
    "yoso": yoso,
    "fnet": fnet,
    "pypi_linformer": pypi_linformer,
    "pypi_linformer_pytorch": pypi_linformer_pytorch,
}
# The models with a k of their own.
PROJECTED = ("linformer", "linformer_compiled", "pypi_linformer", "pypi_linformer_pytorch")


def build(name: str, shape: Shape, head: bool = False) -> nn.Module:
    """Makes a model, in float32 on the CPU, with random weights.

    Args:
        name: One of `MODELS`.
        shape: What to make it for.
        head: Whether with the masked-LM head.

    Returns:
        The model, which returns hidden states (b, n, c), or logits; in a tuple or an output class, or alone.
    """
    config = MODELS[name](shape)
    if isinstance(config, nn.Module):
        if not head:
            config.to_logits = nn.Identity()
        return config
    options = {} if head or isinstance(config, (LinformerConfig, ModernBertConfig)) else {"add_pooling_layer": False}
    if isinstance(config, (FNetConfig, NystromformerConfig, YosoConfig)):
        options = {}  # the first has a pooler in any case, the others none
    model = (AutoModelForMaskedLM if head else AutoModel).from_config(config, **options)
    if name == "linformer_compiled":
        return torch.compile(model, fullgraph=True, dynamic=True)  # type: ignore[return-value]
    return model


def forward_pass(name: str, shape: Shape) -> Callable[[], Any]:
    """An inference pass of a model, its weights in `shape.dtype`."""
    model, ids = build(name, shape).eval().to(shape.device), shape.token_ids()
    dtype = getattr(torch, shape.dtype)
    if name not in ("fnet", "nystromformer"):  # these have parts that do not work in bfloat16
        return partial(model.to(dtype), ids)

    def run() -> Any:
        with torch.autocast(shape.device.split(":")[0], dtype, enabled=dtype != torch.float32):
            return model(ids)

    return run


def training_step(name: str, shape: Shape, checkpointing: bool = False) -> Callable[[], None]:
    """A masked-LM step: forward, backward and fused AdamW; float32 weights, autocast in `shape.dtype`.

    Args:
        name: One of `MODELS`.
        shape: What to make it for.
        checkpointing: Whether with gradient checkpointing.

    Returns:
        The step.
    """
    model = build(name, shape._replace(vocabulary=50265), head=True).train().to(shape.device)
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids, labels, dtype = shape.token_ids(), shape.labels(), getattr(torch, shape.dtype)

    def step() -> None:
        with torch.autocast(shape.device.split(":")[0], dtype, enabled=dtype != torch.float32):
            if name.startswith("pypi"):
                loss = F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())
            else:
                loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def unavoidable_products(name: str, shape: Shape) -> Callable[[], None]:
    """The matrix products that a Linformer cannot do without, as plain ones of contiguous matrices."""
    config = MODELS[name](shape)
    n, k, d = shape.length, config.projected_length, WIDTH // shape.heads  # type: ignore[union-attr]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=getattr(torch, shape.dtype), device=shape.device)

    square, states, projected = random(WIDTH, WIDTH), random(shape.batch_size * n, WIDTH), random(k, WIDTH)
    up, down, wide = random(INTERMEDIATE, WIDTH), random(WIDTH, INTERMEDIATE), random(len(states), INTERMEDIATE)
    products = [partial(F.linear, states, square)] * 2 + [partial(F.linear, states, up), partial(F.linear, wide, down)]
    if window := config.local_attention_window:  # type: ignore[union-attr]
        blocks, keys = -(-len(states) // window), 3 * window + config.num_global_tokens + k  # type: ignore[union-attr]
        products += [partial(F.linear, states, square)] * 2  # all keys and values
        queries = random(blocks * shape.heads, window, d)
    else:
        queries, keys = random(shape.batch_size * shape.heads, n, d), k
        products += [partial(torch.matmul, random(k, n), states.view(shape.batch_size, n, WIDTH))]
    products += [partial(F.linear, projected.repeat(shape.batch_size, 1), square)] * 2
    scores = random(*queries.shape[:2], keys)
    products += [partial(torch.bmm, queries, random(len(queries), d, keys))]
    products += [partial(torch.bmm, scores, random(len(queries), keys, d))]

    def run() -> None:
        for _ in range(shape.layers):
            for product in products:
                product()

    return run


def transformer_heads_that_fit(length: int, memory: float) -> int:
    """Of RoBERTa with eager attention: its scores are there in bfloat16 twice and in float32, 8 bytes each.

    Args:
        length: n.
        memory: Bytes that may be used.

    Returns:
        The largest number up to 12 that divides the width; at least 1.
    """
    fitting = [heads for heads in range(1, HEADS + 1) if WIDTH % heads == 0 and 8 * heads * length**2 < memory]
    return max(fitting, default=1)


@torch.inference_mode()
def difference_to_roberta(length: int = 61) -> float:
    """Largest difference to RoBERTa in float32 where k = n and E = F = identity, with RoBERTa's weights."""
    shape = Shape(length, projected_length=length)
    theirs = RobertaModel(roberta(shape, "eager"), add_pooling_layer=False).eval()
    ours = LinformerModel(linformer(shape)).eval()
    weights = theirs.state_dict()
    positions = "embeddings.position_embeddings.weight"
    weights[positions] = weights[positions][2:]
    ours.load_state_dict({**weights, "encoder.shared_projection.weight": torch.eye(length)})
    inputs = shape.token_ids()
    return (ours(inputs).last_hidden_state - theirs(inputs).last_hidden_state).abs().max().item()


class PyPIAttention:
    """The self-attention of the package `linformer` and ours with the same weights."""

    def __init__(self, shape: Shape):
        from linformer import LinformerSelfAttention as TheirSelfAttention

        config = linformer(shape)
        config.projection_sharing = "headwise"
        config._attn_implementation = "sdpa"
        self.theirs = TheirSelfAttention(WIDTH, shape.length, k=shape.projected_length, heads=shape.heads).eval()
        self.ours = LinformerSelfAttention(config, 0).eval()
        self.output = nn.Linear(WIDTH, WIDTH)
        t, o = self.theirs, self.ours
        pairs = [(o.query.weight, t.to_q.weight), (o.key.weight, t.to_k.weight), (o.value.weight, t.to_v.weight)]
        pairs += [(o.key_projection.weight, t.proj_k.T), (o.value_projection.weight, t.proj_v.T)]  # type: ignore
        with torch.no_grad():
            for own, other in [*pairs, (self.output.weight, t.to_out.weight), (self.output.bias, t.to_out.bias)]:
                own.copy_(other)
            for layer in (o.query, o.key, o.value):
                layer.bias.zero_()
        dtype = getattr(torch, shape.dtype)
        for module in (self.theirs, self.ours, self.output):
            module.to(dtype)
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(1, shape.length, WIDTH, generator=generator).to(dtype)

    def run_ours(self) -> torch.Tensor:
        """(b, n, c)."""
        return self.output(self.ours(self.inputs)[0])

    def run_theirs(self) -> torch.Tensor:
        """(b, n, c)."""
        return self.theirs(self.inputs)

    @classmethod
    @torch.inference_mode()
    def difference(cls) -> float:
        """Largest difference of the outputs in float32."""
        pair = cls(Shape(512, dtype="float32"))
        return (pair.run_ours() - pair.run_theirs()).abs().max().item()
