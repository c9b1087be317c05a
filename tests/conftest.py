"""Tiny configurations, random inputs and the one table of tolerances."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may need a network

import pytest
import torch

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

HEADS = {
    "AutoModel": "LinformerModel",
    "AutoModelForMaskedLM": "LinformerForMaskedLM",
    "AutoModelForSequenceClassification": "LinformerForSequenceClassification",
    "AutoModelForTokenClassification": "LinformerForTokenClassification",
    "AutoModelForQuestionAnswering": "LinformerForQuestionAnswering",
    "AutoModelForMultipleChoice": "LinformerForMultipleChoice",
}


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


def difference(actual, expected):
    """The largest absolute difference; NaN anywhere counts as infinite, so that no comparison passes by accident."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not actual.numel():
        return 0.0
    gap = (actual.detach().double() - expected.detach().double()).abs().max().item()
    return gap if gap == gap else float("inf")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
