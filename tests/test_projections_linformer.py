import math

import pytest
import reference
import torch
from conftest import (
    LEARNED,
    POOLINGS,
    SHARINGS,
    STORED,
    TOLERANCE,
    TYPES,
    build,
    difference,
    mask_of,
    random_ids,
    tiny_config,
)

import linformer_hf
from linformer_hf import LinformerModel


LAYOUTS = ("right", "left", "holes")


def run_self_attention(model, states, attention_mask, layer=0):
    """What the model's self-attention makes of any input: (b, n, c) in, (b, n, c) out."""
    captured = []
    attention = model.encoder.layer[layer].attention.self

    def replace(module, args, kwargs):
        if args:
            return (states, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": states}

    def capture(module, args, output):
        captured.append(output[0] if isinstance(output, tuple) else output)

    hooks = [
        attention.register_forward_pre_hook(replace, with_kwargs=True),
        attention.register_forward_hook(capture),
    ]
    model(inputs_embeds=torch.zeros_like(states), attention_mask=attention_mask)
    for hook in hooks:
        hook.remove()
    (output,) = captured
    return output.flatten(2)


def random_states(batch, seq_len, seed=3):
    return torch.randn(batch, seq_len, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def real_only(states, attention_mask):
    return states if attention_mask is None else states * attention_mask[..., None]


# ---- against the reference: outputs and gradients


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("layout", "seq_len"), [(None, 61), ("right", 61), ("left", 40), ("holes", 59)])
def test_outputs_and_gradients_are_the_reference_s(kind, sharing, layout, seq_len):
    model = build(projection_type=kind, projection_sharing=sharing).double()
    mask = None if layout is None else mask_of(layout, 3, seq_len)
    batch = 1 if layout is None else 3
    states = random_states(batch, seq_len).requires_grad_()
    direction = real_only(random_states(batch, seq_len, seed=4), mask)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    used = {name for name, _ in model.named_parameters() if "layer.0.attention.self" in name or "shared_proj" in name}
    for name in used:
        weights[name].requires_grad_()

    expected = reference.self_attention(weights, model.config, 0, states, mask)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), [states, *(weights[n] for n in used)])
    actual = run_self_attention(model, states, mask)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad((actual * direction).sum(), [states, *(parameters[n] for n in used)])

    assert difference(real_only(actual, mask), expected) < TOLERANCE["float64"]
    for name, gradient, right in zip(["input", *used], gradients, expected_gradients, strict=True):
        assert difference(gradient, right) < TOLERANCE["float64"], name
    assert min(right.abs().max() for right in expected_gradients[:1]) > 1e-3  # the comparison is not of zeros


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", TYPES)
def test_float32_and_bfloat16_are_near_the_reference(kind, sharing):
    model = build(projection_type=kind, projection_sharing=sharing)
    mask = mask_of("holes", 4, 53)
    states = random_states(4, 53).float()
    expected = reference.self_attention(
        reference.in_double(model.state_dict()), model.config, 0, states.double(), mask
    )
    assert difference(real_only(run_self_attention(model, states, mask), mask), expected) < TOLERANCE["float32"]

    model, states = model.bfloat16(), states.bfloat16()
    expected = reference.self_attention(
        reference.in_double(model.state_dict()), model.config, 0, states.double(), mask
    )
    error = real_only(run_self_attention(model, states, mask).double(), mask) - expected
    assert error.norm() / expected.norm() < TOLERANCE["bfloat16_relative_rms"]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("k", [1, 2, 8, 30, 31, 60, 61])
def test_any_k_goes_with_any_n(kind, k):
    model = build(projection_type=kind, projected_length=k, num_hidden_layers=1).double()
    for layout, seq_len in (("right", 61), ("holes", 37)):
        mask, states = mask_of(layout, 4, seq_len), random_states(4, seq_len)
        expected = reference.self_attention(reference.in_double(model.state_dict()), model.config, 0, states, mask)
        actual = real_only(run_self_attention(model, states, mask), mask)
        assert difference(actual, expected) < TOLERANCE["float64"]


@pytest.mark.parametrize("sharing", ["none", "headwise", "key_value"])
@pytest.mark.parametrize("kind", TYPES)
def test_k_may_differ_between_layers(kind, sharing):
    model = build(projection_type=kind, projection_sharing=sharing, projected_length=[5, 17]).double()
    ids, mask = random_ids(3, 61), mask_of("holes", 3, 61)
    expected = reference.linformer(reference.in_double(model.state_dict()), model.config, ids, mask)[-1]
    assert difference(real_only(model(ids, mask)[0], mask), expected) < TOLERANCE["float64"]


# ---- names, shapes and owners


def expected_projections(kind, sharing, layers=2, heads=3):
    if kind in POOLINGS:
        return {}
    names = {
        "layerwise": ["encoder.shared_projection"],
        "key_value": [f"encoder.layer.{i}.attention.self.key_projection" for i in range(layers)],
    }.get(
        sharing,
        [f"encoder.layer.{i}.attention.self.{r}_projection" for i in range(layers) for r in ("key", "value")],
    )
    shape = (30, 1, math.ceil(61 / 7)) if kind == "convolution" else (heads, 7, 61) if sharing == "none" else (7, 61)
    return {f"{name}.weight": shape for name in names}


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", TYPES)
def test_names_and_shapes_in_the_state_dict(kind, sharing):
    model = build(projection_type=kind, projection_sharing=sharing)
    ours = {name: tuple(value.shape) for name, value in model.state_dict().items() if "projection" in name}
    assert ours == expected_projections(kind, sharing)
    learned = {name for name, _ in model.named_parameters() if "projection" in name}
    assert learned == (set(ours) if kind in LEARNED else set())
    assert len({value.data_ptr() for value in model.state_dict().values()}) == len(model.state_dict())


@pytest.mark.parametrize(
    ("sharing", "matrices"), [("none", 288), ("headwise", 24), ("key_value", 12), ("layerwise", 1)]
)
def test_the_paper_s_count_of_matrices(sharing, matrices):
    with torch.device("meta"):
        config = linformer_hf.LinformerConfig(projection_sharing=sharing)
        model = LinformerModel(config)
    numbers = sum(value.numel() for name, value in model.named_parameters() if "projection" in name)
    assert numbers == matrices * config.projected_length * config.max_position_embeddings


@pytest.mark.parametrize("kind", STORED)
def test_projections_are_private_to_their_model_and_follow_it(kind):
    first, second = build(projection_type=kind), build(projection_type=kind)
    name = "encoder.shared_projection.weight"
    assert first.state_dict()[name].data_ptr() != second.state_dict()[name].data_ptr()
    assert first.double().state_dict()[name].dtype is torch.float64
    assert first.to("meta").state_dict()[name].is_meta
    assert second.state_dict()[name].dtype is torch.float32


# ---- how they start


def fresh(**overrides):
    return build(noise=False, **overrides)


def random_weights(config_overrides, layers=2):
    model = fresh(
        projection_type="random",
        max_position_embeddings=500,
        projected_length=50,
        num_hidden_layers=layers,
        **config_overrides,
    )
    return {name: value for name, value in model.state_dict().items() if "projection" in name}


@pytest.mark.parametrize("sharing", SHARINGS)
def test_random_is_normal_with_variance_one_over_k(sharing):
    values = torch.cat(
        [
            w.flatten()
            for seed in range(4)
            for w in random_weights({"projection_sharing": sharing, "projection_seed": seed}).values()
        ]
    ).double()
    root = math.sqrt(len(values))
    assert abs(values.mean() * math.sqrt(50)) < 5 / root
    assert abs(values.std() * math.sqrt(50) - 1) < 5 / root
    assert abs((values**4).mean() * 50**2 - 3) < 5 * math.sqrt(96) / root  # a normal distribution's fourth moment
    assert values.unique().numel() > 0.99 * len(values)


@pytest.mark.parametrize("sharing", ["none", "headwise", "key_value"])
def test_random_differs_by_layer_role_head_and_seed(sharing):
    matrices = [
        matrix.flatten()
        for seed in (0, 1, 2)
        for weight in random_weights({"projection_sharing": sharing, "projection_seed": seed}, layers=3).values()
        for matrix in weight.view(-1, 50, 500)
    ]
    correlation = torch.corrcoef(torch.stack(matrices)).fill_diagonal_(0)
    assert len(matrices) == {"none": 54, "headwise": 18, "key_value": 9}[sharing]
    assert correlation.abs().max() < 6 / math.sqrt(50 * 500)


def test_random_depends_on_its_seed_only():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = random_weights({"projection_sharing": "headwise", "projection_seed": 5})
    torch.manual_seed(2)
    torch.randn(3)
    second = random_weights({"projection_sharing": "headwise", "projection_seed": 5})
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(first) == 4
    torch.set_rng_state(before)


@pytest.mark.parametrize("sharing", ["none", "layerwise"])
def test_random_keeps_lengths_as_johnson_and_lindenstrauss_promise(sharing):
    (weight, *_) = random_weights({"projection_sharing": sharing}).values()
    vectors = torch.randn(500, 200, generator=torch.Generator().manual_seed(1))
    for matrix in weight.view(-1, 50, 500):
        ratios = (matrix @ vectors).norm(dim=0) / vectors.norm(dim=0)
        assert abs(ratios.square().mean() - 1) < 0.1  # with std 1/k it would be 1/50
        assert ratios.std() < 0.15


@pytest.mark.parametrize("sharing", SHARINGS)
def test_linear_starts_as_mean_pooling_with_a_little_noise(sharing):
    model = fresh(projection_sharing=sharing, max_position_embeddings=503, projected_length=50)
    noises = []
    for name, value in model.named_parameters():
        if "projection" not in name:
            continue
        for matrix in value.detach().view(-1, 50, 503):
            pooling = torch.zeros(50, 503)
            pooling[torch.arange(503) * 50 // 503, torch.arange(503)] = 1
            noises.append((matrix - pooling / pooling.sum(1, keepdim=True)).flatten())
    noise = torch.cat(noises)
    assert abs(noise.std() - 0.002) < 0.0001
    assert abs(noise.mean()) < 0.0001
    if len(noises) > 1:
        assert torch.corrcoef(torch.stack(noises)).fill_diagonal_(0).abs().max() < 0.05


@pytest.mark.parametrize("sharing", SHARINGS)
def test_linear_can_start_as_fairseq_s(sharing):
    model = fresh(projection_sharing=sharing, projection_initializer="normal", projected_length=50)
    values = torch.cat([v.flatten() for n, v in model.named_parameters() if "projection" in n])
    assert abs(values.std() - 0.02) < 0.001
    assert abs(values.mean()) < 0.002


@pytest.mark.parametrize("kind", TYPES)
def test_a_fresh_model_attends_differently_and_answers_differently_by_position(kind):
    model = fresh(projection_type=kind)
    model.set_attn_implementation("eager")
    output = model(random_ids(2, 61), output_attentions=True)
    rows = output.attentions[0]
    assert (rows - rows.mean(2, keepdim=True)).abs().amax(dim=(2, 3)).min() > 1e-5
    states = torch.nn.functional.normalize(output.last_hidden_state[0], dim=-1)
    assert (states @ states.T).fill_diagonal_(0).max() < 0.95


# ---- padding, and what may be looked at


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", TYPES)
def test_padded_rows_are_never_read(kind, sharing):
    model = build(projection_type=kind, projection_sharing=sharing)
    mask = mask_of("holes", 3, 61)
    states = random_states(3, 61).float()
    clean = run_self_attention(model, states, mask)
    for poison in (float("nan"), float("inf"), -1e30, 1e4):
        poisoned = states.masked_fill(mask[..., None] == 0, poison)
        output = run_self_attention(model, poisoned, mask)
        assert torch.equal(output[mask.bool()], clean[mask.bool()]), poison


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", ["linear", "random"])
def test_a_sentence_uses_the_first_columns_only(kind, sharing):
    model = build(projection_type=kind, projection_sharing=sharing)
    states, mask = random_states(1, 61).float(), torch.zeros(1, 61, dtype=torch.long)
    mask[0, 11:31] = 1
    before = run_self_attention(model, states, mask)[:, 11:31]
    weight = next(value for name, value in model.state_dict().items() if "projection" in name)
    weight[..., 20:] = 1e9
    assert torch.equal(run_self_attention(model, states, mask)[:, 11:31], before)
    weight[..., 19] *= -3
    assert difference(run_self_attention(model, states, mask)[:, 11:31], before) > 1e-3


@pytest.mark.parametrize("kind", POOLINGS)
@pytest.mark.parametrize("r", [1, 6, 7, 8, 13, 30, 61])
def test_windows_of_a_pooling_fit_the_sentence(kind, r):
    # All keys alike: a slot's probability is then the share of tokens that it stands for.
    model = build(projection_type=kind, num_hidden_layers=1)
    model.set_attn_implementation("eager")
    mask = torch.zeros(1, 61, dtype=torch.long)
    mask[0, torch.randperm(61)[:r]] = 1
    with torch.no_grad():
        model.encoder.layer[0].attention.self.key.weight.zero_()
        (probabilities,) = model(random_ids(1, 61), mask, output_attentions=True).attentions
    slots = min(7, r)
    shares = torch.bincount(torch.arange(r) * slots // r, minlength=7) / r
    assert probabilities.shape == (1, 3, 61, 7)
    assert difference(probabilities[:, :, mask[0].bool()], shares.expand(1, 3, r, 7)) < TOLERANCE["float32"]
    assert not probabilities[..., slots:][:, :, mask[0].bool()].any()


@pytest.mark.parametrize("r", [1, 8, 9, 10, 50, 61])
def test_slots_of_a_convolution_that_a_sentence_does_not_have_get_no_probability(r):
    model = build(projection_type="convolution", num_hidden_layers=1)  # stride 9
    model.set_attn_implementation("eager")
    mask = (torch.arange(61) < r).long()[None]
    with torch.no_grad():
        (probabilities,) = model(random_ids(1, 61), mask, output_attentions=True).attentions
    slots = math.ceil(r / 9)
    assert not probabilities[:, :, :r, slots:].any()
    assert (probabilities[:, :, :r, :slots] > 0).all()


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sentences_without_a_token_stay_finite(kind, sharing, dtype):
    model = build(projection_type=kind, projection_sharing=sharing).to(dtype).train()
    mask = mask_of("holes", 4, 61)
    mask[1] = 0
    output = model(random_ids(4, 61), mask).last_hidden_state
    assert torch.isfinite(output).all()
    output.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    alone = model(random_ids(1, 5), torch.zeros(1, 5, dtype=torch.long)).last_hidden_state
    alone.float().square().mean().backward()
    assert torch.isfinite(alone).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_frozen_projections_do_not_move_and_the_rest_does(kind, sharing):
    model = build(
        "LinformerForMaskedLM", projection_type=kind, projection_sharing=sharing, freeze_projections=True
    ).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(random_ids(2, 61), labels=random_ids(2, 61, seed=1)).loss.backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert not [name for name in moved if "projection" in name]
    assert "linformer.encoder.layer.0.attention.self.value.weight" in moved


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", STORED)
def test_weights_are_used_in_their_own_module_s_forward_only(kind, sharing, tmp_path):
    # As FSDP, ZeRO-3 and offloading need it: outside their module's forward all weights are on the meta device.
    from accelerate import disk_offload

    model = build("LinformerForMaskedLM", projection_type=kind, projection_sharing=sharing)
    ids, mask = random_ids(2, 61), mask_of("holes", 2, 61)
    with torch.no_grad():
        before = model(ids, mask).logits
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"), offload_buffers=True)
        assert all(parameter.is_meta for name, parameter in model.named_parameters() if "projection" in name)
        assert torch.equal(model(ids, mask).logits, before)


@pytest.mark.parametrize("kind", POOLINGS)
def test_wide_windows_do_not_overflow_in_half_precision(kind):
    # 4096 tokens of about 20 sum to more than float16 holds
    model = build(projection_type=kind, max_position_embeddings=8192, projected_length=2, num_hidden_layers=1).half()
    states = 20 + torch.randn(1, 8192, 30).half()
    alone = run_self_attention(model, states, None)
    mask = torch.ones(2, 8192, dtype=torch.long)
    mask[1, 100:] = 0
    padded = run_self_attention(model, states.expand(2, -1, -1), mask)
    assert alone.isfinite().all()
    assert padded[0].isfinite().all()
    error = (padded[0] - alone[0]).double()
    assert error.norm() / alone.double().norm() < TOLERANCE["bfloat16_relative_rms"]


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("kind", TYPES)
def test_rows_do_not_touch_each_other(kind, sharing):
    model = build(projection_type=kind, projection_sharing=sharing)
    words, mask = torch.randn(2, 61, 30), mask_of("holes", 2, 61)
    spoilt = words.clone()
    spoilt[1] = float("nan")
    for attention_mask in (None, mask.flip(0)):
        clean = model(inputs_embeds=words, attention_mask=attention_mask)[0][0]
        assert torch.equal(model(inputs_embeds=spoilt, attention_mask=attention_mask)[0][0], clean)


def test_choices_of_the_configuration_are_the_table_s():
    from linformer_hf.projections_linformer import PROJECTIONS

    assert set(PROJECTIONS) == set(TYPES)
    for kind in TYPES:
        tiny_config(projection_type=kind)
