"""Tiny configurations, random inputs, what is computed, and the one table of tolerances."""

import itertools
import os


os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may need a network

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import linformer_hf


torch.set_num_threads(1)  # the tensors here are far too small to share among threads

# Largest absolute difference allowed, except where the name says otherwise. Not relaxed to make a test pass.
TOLERANCE = {
    "float64": 1e-10,  # module against reference
    "float32": 1e-5,  # module against reference; padded against alone; eager against sdpa
    "whole_model": 1e-4,  # against RoBERTa and fairseq
    "bfloat16_relative_rms": 1e-2,
    "exact": 0.0,  # saved against loaded
}

TYPES = ("linear", "random", "mean_pooling", "max_pooling", "convolution")
SHARINGS = ("none", "headwise", "key_value", "layerwise")
LEARNED = ("linear", "convolution")  # the types whose projection is trained
STORED = ("linear", "random", "convolution")  # the types with a weight in the checkpoint
POOLINGS = ("mean_pooling", "max_pooling")

# Odd sizes, none of which divides another: n = 61, k = 7, h = 3, d = 10.
TINY = {
    "vocab_size": 53,
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 37,
    "max_position_embeddings": 61,
    "projected_length": 7,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

# every type, every sharing of the learned ones, and both ends of a list of k
VARIANTS = [{"projection_type": t, "projection_sharing": s} for t, s in itertools.product(STORED, SHARINGS)]
VARIANTS += [{"projection_type": t} for t in POOLINGS]
VARIANTS += [{"norm_first": True, "projection_sharing": "key_value"}]
# the local window: with every type, more global tokens than a block holds, without slots, in some layers only
WINDOW = {"local_attention_window": 5, "num_global_tokens": 2}
NO_SLOTS = {"projected_length": 0, **WINDOW}
WINDOWED = [
    {"projection_type": "mean_pooling", **WINDOW},
    {"projection_sharing": "headwise", "local_attention_window": 7},
    {"projection_type": "random", "dual_layer_norm": True, "layer_norm_eps": 1e-3, **WINDOW},
    {
        "projection_type": "convolution",
        "projection_sharing": "none",
        "norm_first": True,
        "local_attention_window": 3,
        "num_global_tokens": 4,
    },
    {
        "projection_type": "max_pooling",
        "projection_sharing": "key_value",
        "projected_length": [7, 3],
        "local_attention_window": [0, 5],
        "num_global_tokens": 1,
    },
    NO_SLOTS,
    {
        "projection_sharing": "key_value",
        "dual_layer_norm": True,
        "projected_length": [7, 0],
        "local_attention_window": [0, 4],
        "num_global_tokens": 2,
    },
]

HEADS = {
    "AutoModel": "LinformerModel",
    "AutoModelForMaskedLM": "LinformerForMaskedLM",
    "AutoModelForSequenceClassification": "LinformerForSequenceClassification",
    "AutoModelForTokenClassification": "LinformerForTokenClassification",
    "AutoModelForQuestionAnswering": "LinformerForQuestionAnswering",
    "AutoModelForMultipleChoice": "LinformerForMultipleChoice",
}


def variant_name(overrides):
    return "-".join(value if isinstance(value, str) else f"{name}={value}" for name, value in overrides.items())


def one_layer(overrides):
    """The same with one layer, a list's last one."""
    lists = {name: value[-1] for name, value in overrides.items() if isinstance(value, list)}
    return {**overrides, **lists, "num_hidden_layers": 1}


every_variant = pytest.mark.parametrize("overrides", VARIANTS + WINDOWED, ids=variant_name)
every_windowed = pytest.mark.parametrize("overrides", WINDOWED, ids=variant_name)


def tiny_config(**overrides):
    return linformer_hf.LinformerConfig(**{**TINY, **overrides})


def fill_with_noise(model, seed=0):
    """Random weights that make every part matter: a fresh model is so flat that most mistakes would not show."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "norm" in name.lower():
            noise = 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            noise = 0.1 * noise
        else:
            noise = noise / parameter.shape[-1] ** 0.5
        parameter.data.copy_(noise)
    return model


def build(head="LinformerModel", seed=0, noise=True, **overrides):
    """A tiny model in evaluation mode; `build()` with the same arguments gives the same weights."""
    torch.manual_seed(seed)
    model = getattr(linformer_hf, head)(tiny_config(**overrides))
    return (fill_with_noise(model, seed) if noise else model).eval()


def random_ids(batch, seq_len, seed=0, vocab_size=TINY["vocab_size"]):
    return torch.randint(3, vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


def mask_of(layout, batch, seq_len, seed=0):
    """A (batch, seq_len) mask whose rows have from 1 to seq_len real tokens, as "right", "left" or "holes"."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(batch, seq_len, dtype=torch.long)
    for row, length in enumerate(torch.linspace(1, seq_len, batch).long().tolist()):
        chosen = {
            "right": torch.arange(length),
            "left": torch.arange(seq_len - length, seq_len),
            "holes": torch.randperm(seq_len, generator=generator)[:length],
        }[layout]
        mask[row, chosen] = 1
    return mask


def padded(batch, seq_len, layout):
    """Random tokens and a mask whose rows have from 1 to all of them."""
    return random_ids(batch, seq_len), mask_of(layout, batch, seq_len)


def difference(actual, expected):
    """The largest absolute difference; NaN anywhere counts as infinite, so that no comparison passes by accident."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not actual.numel():
        return 0.0
    gap = (actual.detach().double() - expected.detach().double()).abs().max().item()
    return gap if gap == gap else float("inf")


class Operations(TorchDispatchMode):
    """Records what PyTorch computes, in backward passes too.

    Attributes:
        kernels: Names of the operations that write to memory, which views do not.
        made: Shapes of the tensors in new memory.
        largest: The most numbers for which an operation took new memory, and that operation.
    """

    def __init__(self):
        super().__init__()
        self.kernels, self.made, self.largest = [], [], (0, None)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {memory(tensor) for tensor in tensors_of((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        new = [tensor for tensor in tensors_of(result) if memory(tensor) not in given]
        if new or function._schema.is_mutable:
            self.kernels.append(str(function))
        for tensor in new:
            self.made.append(tuple(tensor.shape))
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.largest = max(self.largest, (size, str(function)), key=lambda record: record[0])
        return result


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def memory(tensor):
    return tensor.untyped_storage()._cdata


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
