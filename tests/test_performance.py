"""What the model costs, in numbers that are the same on every machine: operations, tensors and products."""

import math

import pytest
import torch
from conftest import (
    NO_SLOTS,
    POOLINGS,
    SHARINGS,
    TOLERANCE,
    TYPES,
    VARIANTS,
    WINDOW,
    WINDOWED,
    Operations,
    build,
    difference,
    every_variant,
    mask_of,
    one_layer,
    padded,
    random_ids,
    variant_name,
)
from torch.utils.flop_counter import FlopCounterMode

import linformer_hf


# ---- products


def positions_of(config, k, length):
    """How many positions a layer projects `length` tokens to."""
    if config.projection_type in POOLINGS:
        return min(k, length)
    if config.projection_type == "convolution" and k:
        return math.ceil(length / math.ceil(config.max_position_embeddings / k))
    return k


def flops(config, lengths, n, training):
    """Two for each multiplication of the matrix products in all layers, for rows of so many real tokens in n columns.

    A product has two gradients, each of which costs as much as itself.
    """
    c, m, g, b = config.hidden_size, config.intermediate_size, config.num_global_tokens, len(lengths)
    separate = config.projection_sharing in ("none", "headwise")
    matrices = (2 if separate else 1) if config.projection_type in ("linear", "random") else 0
    per_head = config.projection_sharing == "none" and config.projection_type not in POOLINGS
    total = 0
    for longest_k, w in zip(config.projected_lengths, config.local_attention_windows, strict=True):
        k = positions_of(config, longest_k, n)
        tokens = sum(lengths) * (2 * c * c + 2 * c * m)  # query, output, feed-forward
        tokens += sum(lengths) * 2 * c * c if w or per_head else 0  # exact keys and values
        positions = 0 if per_head else b * k * 2 * c * c  # keys and values of what is projected
        bias = 2 * c * c if per_head and k else 0  # of one row of zeros, which needs no gradient
        projection = matrices * b * k * n * c
        if w:
            blocks = sum(math.ceil(max(length, 1) / w) for length in lengths)
            attention = 2 * c * (blocks * w * (3 * w + g + k) + b * g * n)
        else:
            attention = 2 * c * b * n * k
        learned = config.projection_type == "linear" and not config.freeze_projections
        passes = (3, 2, 3 if learned else 2) if training else (1, 1, 1)
        total += passes[0] * (tokens + positions + attention) + passes[1] * bias + passes[2] * projection
    return 2 * total


FLOPS = [{"projection_type": kind, "projection_sharing": sharing} for kind in TYPES for sharing in SHARINGS]
FLOPS += [{**overrides, **WINDOW} for overrides in FLOPS]
FLOPS += [{"freeze_projections": True}, {"norm_first": True}, *WINDOWED]


def work_of(model, inputs, training):
    with FlopCounterMode(display=False) as cost, torch.set_grad_enabled(training):
        output = model(**inputs)[0]
        if training:
            output.sum().backward()
    return cost.get_total_flops()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("n", [61, 46])
@pytest.mark.parametrize("overrides", FLOPS, ids=variant_name)
def test_all_products_are_those_of_the_formula(overrides, n, training):
    model = build(**overrides)
    if training or any(model.config.local_attention_windows):
        model.set_attn_implementation("eager")  # the products of sdpa are not counted on CPUs
    expected = flops(model.config, [n] * 3, n, training)
    assert work_of(model, {"input_ids": random_ids(3, n)}, training) == expected


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("overrides", FLOPS, ids=variant_name)
def test_padding_costs_no_products_of_tokens_and_no_blocks(overrides, training):
    model = build(**overrides)
    model.set_attn_implementation("eager")
    ids, mask = padded(4, 61, "holes")
    mask[2] = 0
    expected = flops(model.config, mask.sum(dim=1).tolist(), 61, training)
    assert work_of(model, {"input_ids": ids, "attention_mask": mask}, training) == expected


@pytest.mark.parametrize("chunk", [2048, 16])
def test_the_masked_lm_head_works_for_labelled_tokens_alone(chunk, monkeypatch):
    monkeypatch.setattr("linformer_hf.modeling_linformer.CHUNK", chunk)
    model = build("LinformerForMaskedLM").train()
    model.set_attn_implementation("eager")
    ids, mask = padded(3, 61, "holes")
    labels = ids.masked_fill((torch.rand(ids.shape) < 0.5) | (mask == 0), -100)
    labelled = (labels != -100).sum().item()
    assert labelled > 16
    passes = 3 if chunk > labelled else 4  # in chunks, the logits are computed a second time for their gradient
    head = 2 * passes * labelled * 30 * (30 + 53)
    expected = flops(model.config, mask.sum(dim=1).tolist(), 61, training=True) + head
    assert work_of(model, {"input_ids": ids, "attention_mask": mask, "labels": labels}, training=True) == expected


def test_a_window_costs_little_more_than_a_longer_projection():
    costs = []
    for overrides in (
        {"projected_length": 128},
        {"projected_length": 64, "local_attention_window": 64, "num_global_tokens": 1},
    ):
        sizes = {"num_hidden_layers": 1, "max_position_embeddings": 16384, "projection_type": "mean_pooling"}
        with torch.device("meta"):
            model = linformer_hf.LinformerModel(linformer_hf.LinformerConfig(**sizes, **overrides)).eval()
            costs.append(work_of(model, {"inputs_embeds": torch.zeros(1, 16384, 768)}, training=False))
    assert costs[1] < 1.25 * costs[0]


# ---- operations and tensors


# Of one layer in inference: operations, and tensors as large as the input (b, n, c); without and with padding.
PER_LAYER = [
    ({"projection_sharing": "none"}, (32, 18), (55, 15)),
    ({"projection_sharing": "headwise"}, (21, 12), (34, 7)),
    ({"projection_sharing": "key_value"}, (20, 12), (33, 7)),
    ({"projection_sharing": "layerwise"}, (20, 12), (33, 7)),
    ({"projection_sharing": "layerwise", "norm_first": True}, (20, 12), (33, 8)),
    ({"projection_type": "random"}, (20, 12), (33, 7)),
    ({"projection_type": "mean_pooling"}, (46, 14), (58, 9)),
    ({"projection_type": "max_pooling"}, (46, 14), (58, 9)),
    ({"projection_type": "mean_pooling", "max_position_embeddings": 56}, (20, 12), (58, 9)),
    ({"projection_type": "max_pooling", "max_position_embeddings": 56}, (20, 12), (58, 9)),
    ({"projection_type": "convolution", "max_position_embeddings": 56}, (21, 13), (51, 10)),
    ({"projection_type": "convolution", "projection_sharing": "none"}, (65, 22), (86, 19)),
    ({"projection_type": "convolution", "projection_sharing": "headwise"}, (58, 18), (69, 13)),
    ({"projection_type": "convolution", "projection_sharing": "layerwise"}, (39, 15), (51, 10)),
    ({"projection_sharing": "none", **WINDOW}, (104, 30), (159, 27)),
    ({"projection_sharing": "headwise", **WINDOW}, (95, 26), (146, 21)),
    ({"projection_sharing": "layerwise", **WINDOW}, (81, 26), (133, 21)),
    ({"projection_type": "mean_pooling", **WINDOW}, (99, 28), (151, 23)),
    ({"projection_type": "convolution", **WINDOW}, (92, 29), (144, 24)),
    ({"local_attention_window": 5}, (73, 25), (118, 19)),
    ({"local_attention_window": 5, "dual_layer_norm": True}, (77, 27), (122, 21)),
    (NO_SLOTS, (55, 26), (106, 19)),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("row", PER_LAYER, ids=lambda row: variant_name(row[0]))
def test_a_layer_takes_so_many_operations_and_large_tensors(row, masked):
    (overrides, *expected), counts = row, []
    for num_layers in (1, 2):
        model = build(num_hidden_layers=num_layers, **overrides)
        length = model.config.max_position_embeddings
        mask = mask_of("right", 2, length) if masked else None
        with torch.no_grad(), Operations() as operations:
            model(random_ids(2, length), mask)
        large = [shape for shape in operations.made if math.prod(shape) >= 2 * length * 30]
        counts.append((len(operations.kernels), len(large)))
    operations, large = (after - before for before, after in zip(*counts, strict=True))
    assert operations == expected[masked][0]
    assert large <= expected[masked][1]


@pytest.mark.parametrize(
    "overrides", [*VARIANTS, {"projection_type": "mean_pooling", "local_attention_window": 61}], ids=variant_name
)
def test_gradients_of_padded_batches_are_not_summed_one_by_one(overrides):
    model, (ids, mask) = build(**overrides), padded(4, 61, "holes")
    with Operations() as operations:
        model(ids, mask)[0].sum().backward()
    # the gradient of an indexed tensor; on CPUs it is many times slower than that of `index_select`
    assert not [name for name in operations.kernels if "index_put" in name]


def widest(config):
    """Numbers that the largest tensor may hold for each token."""
    window, heads = config.local_attention_window, config.num_attention_heads
    seen = 3 * window + config.num_global_tokens + config.projected_length
    keys_of_blocks = -(-seen // window) * config.hidden_size if window else 0
    return max(2 * config.hidden_size, config.intermediate_size, heads * seen, keys_of_blocks)


@every_variant
@pytest.mark.parametrize(("implementation", "training"), [("eager", True), ("sdpa", True), ("sdpa", False)])
@pytest.mark.parametrize("masked", [True, False])
def test_no_tensor_grows_faster_than_the_input(overrides, implementation, training, masked):
    sizes = []
    for length in (512, 1024, 2048):
        model = build(**one_layer(overrides), max_position_embeddings=length)
        model.set_attn_implementation(implementation)
        inputs = {"input_ids": random_ids(2, length)}
        if masked:
            inputs["attention_mask"] = mask_of("right", 2, length)
        with Operations() as operations:
            work_of(model, inputs, training)
        sizes.append(operations.largest)
    assert sizes[1][0] <= 2 * sizes[0][0], sizes
    assert sizes[2][0] <= 4 * sizes[0][0], sizes
    assert sizes[2][0] <= 2.05 * 2048 * widest(model.config), sizes  # the last block is filled up


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("overrides", [{}, {"norm_first": True}, *WINDOWED[:4], NO_SLOTS], ids=variant_name)
def test_long_inputs_are_taken_in_parts(overrides, masked, monkeypatch):
    model = build(max_position_embeddings=512, num_hidden_layers=1, intermediate_size=200, **overrides)
    model.set_attn_implementation("eager")
    ids, mask = padded(3, 501, "holes") if masked else (random_ids(3, 501), None)
    expected = model(ids, mask, output_attentions=True)
    monkeypatch.setattr("linformer_hf.modeling_linformer.CHUNK", 128)
    with torch.no_grad():
        in_parts = model(ids, mask, output_attentions=True)
        model.set_attn_implementation("sdpa")
        with Operations() as operations:
            states = model(ids, mask)[0]
    for actual in (states, in_parts[0]):
        assert difference(actual, expected[0]) < TOLERANCE["float32"]
    assert difference(in_parts.attentions[0], expected.attentions[0]) < TOLERANCE["float32"]
    assert operations.largest[0] <= 3 * 512 * 2 * 30, operations.largest


@pytest.mark.parametrize("kind", TYPES)
def test_scores_of_inference_exist_for_some_queries_at_a_time(kind, monkeypatch):
    monkeypatch.setattr("linformer_hf.modeling_linformer.CHUNK", 128)
    model = build(projection_type=kind, max_position_embeddings=512, projected_length=64)
    with torch.no_grad(), Operations() as operations:
        model(random_ids(2, 512))
    scores = [shape for shape in operations.made if len(shape) > 2 and shape[-1] == 64]
    assert max(math.prod(shape) for shape in scores) == 2 * 3 * 64 * 64  # (b, h, half a chunk, k)


@every_variant
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_sdpa_keeps_no_probabilities_for_the_backward_pass(overrides, masked, implementation):
    model = build(**one_layer(overrides)).train()
    model.set_attn_implementation(implementation)
    config, (ids, mask) = model.config, padded(2, 61, "holes")
    keys = 3 * config.local_attention_window + config.num_global_tokens + config.projected_length
    kept = []

    def keep(tensor):
        if tensor.shape[-1] == keys:
            kept.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids, mask if masked else None)
    probabilities = config.num_attention_heads * (mask.sum().item() if masked else ids.numel()) * keys
    assert (max(kept, default=0) >= probabilities) == (implementation == "eager")
