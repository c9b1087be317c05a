import copy
import itertools
import math
import re
import subprocess
import sys

import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import (
    HEADS,
    NO_SLOTS,
    POOLINGS,
    SHARINGS,
    TINY,
    TOLERANCE,
    TYPES,
    VARIANTS,
    WINDOW,
    WINDOWED,
    Operations,
    build,
    difference,
    every_variant,
    every_windowed,
    fill_with_noise,
    mask_of,
    one_layer,
    padded,
    random_ids,
    tiny_config,
    variant_name,
)
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    EncoderDecoderModel,
    RobertaConfig,
    RobertaForMaskedLM,
)
from transformers.loss.loss_utils import fixed_cross_entropy

import linformer_hf
from linformer_hf import LinformerForMaskedLM, LinformerModel, modeling_linformer
from linformer_hf.convert_hf import convert_encoder


LAYOUTS = ("right", "left", "holes")
CLASSES = tuple(HEADS.values())
KINDS = [{"projection_type": kind} for kind in TYPES] + WINDOWED


every_kind = pytest.mark.parametrize("overrides", KINDS, ids=variant_name)
every_type = pytest.mark.parametrize("kind", TYPES)
every_class = pytest.mark.parametrize("head", CLASSES)


def example(head, seq_len=23, seed=0, batch=4, **model_overrides):
    """A batch with labels for one of our classes; all rows but the last are padded."""
    ids, mask = random_ids(batch, seq_len, seed), mask_of("right", batch, seq_len, seed).flip(0)
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if head == "LinformerForMaskedLM":
        chosen = (torch.rand(ids.shape, generator=generator) < 0.4) & mask.bool()
        chosen[:, 0] = True
        inputs["labels"] = ids.masked_fill(~chosen, -100)
    elif head == "LinformerForSequenceClassification":
        inputs["labels"] = torch.randint(0, 3, (batch,), generator=generator)
    elif head == "LinformerForTokenClassification":
        inputs["labels"] = torch.randint(0, 3, ids.shape, generator=generator).masked_fill(mask == 0, -100)
    elif head == "LinformerForQuestionAnswering":
        inputs["start_positions"] = torch.randint(0, seq_len, (batch,), generator=generator)
        inputs["end_positions"] = torch.randint(0, seq_len, (batch,), generator=generator)
    elif head == "LinformerForMultipleChoice":
        inputs = {name: value[:, None].repeat(1, 3, 1) for name, value in inputs.items()}
        inputs["input_ids"] = random_ids(batch * 3, seq_len, seed).view(batch, 3, seq_len)
        inputs["labels"] = torch.randint(0, 3, (batch,), generator=generator)
    return inputs


def scalar(output):
    return output.loss if "loss" in output and output.loss is not None else output[0].float().square().mean()


# ---- against the reference, RoBERTa and full attention


@every_variant
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_hidden_states_are_the_reference_s(overrides, layout):
    model = build(**overrides).double()
    ids, mask = random_ids(4, 61), mask_of(layout, 4, 61)
    types = torch.arange(61).expand(4, 61) % 2
    output = model(ids, mask, types, output_hidden_states=True)
    right = reference.linformer(reference.in_double(model.state_dict()), model.config, ids, mask, types)
    assert len(output.hidden_states) == len(right) == 3
    for ours, expected in zip(output.hidden_states, right, strict=True):
        assert difference(ours * mask[..., None], expected) < TOLERANCE["float64"]
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)


def assert_outputs_and_gradients_are_the_reference_s(overrides, ids, mask):
    model = build(**overrides).double()
    direction = torch.randn(*ids.shape, 30, dtype=torch.float64) * mask[..., None]
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        weights[name].requires_grad_()
    expected = reference.linformer(weights, model.config, ids, mask)[-1]
    gradients = torch.autograd.grad(
        (expected * direction).sum(), [weights[name] for name in names], materialize_grads=True
    )
    states = model(ids, mask)[0] * mask[..., None]
    assert difference(states, expected) < TOLERANCE["float64"]
    (states * direction).sum().backward()
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert difference(parameter.grad, gradient) < TOLERANCE["float64"], name


@every_variant
def test_gradients_of_the_whole_model_are_the_reference_s(overrides):
    assert_outputs_and_gradients_are_the_reference_s(overrides, *padded(3, 37, "holes"))


def roberta_like(model):
    """Transformers' RoBERTa with the weights of one of our masked LMs."""
    config = model.config
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    names += ("type_vocab_size", "layer_norm_eps", "hidden_act")
    shared = {name: getattr(config, name) for name in names}
    roberta = RobertaForMaskedLM(RobertaConfig(**shared, max_position_embeddings=config.max_position_embeddings + 2))
    weights = {}
    for name, value in model.state_dict().items():
        if "projection" in name:
            continue
        if "position_embeddings" in name:
            value = torch.cat([torch.zeros(2, value.shape[1]), value])
        weights[name.replace("linformer.", "roberta.")] = value
    weights["lm_head.bias"] = weights["lm_head.decoder.bias"]
    missing, unexpected = roberta.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("position_ids" in name or "token_type_ids" in name for name in missing)
    return roberta.eval()


@pytest.mark.parametrize("sharing", SHARINGS)
def test_identity_projections_are_roberta(sharing):
    model = build("LinformerForMaskedLM", projected_length=61, projection_sharing=sharing)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "projection" in name:
                value.copy_(torch.eye(61).expand_as(value))
    ids = random_ids(2, 61)
    assert difference(model(ids).logits, roberta_like(model)(ids).logits) < TOLERANCE["whole_model"]


@pytest.mark.parametrize("kind", POOLINGS)
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("k", [23, 61])
def test_pooling_of_up_to_k_tokens_is_roberta(kind, layout, k):
    model = build("LinformerForMaskedLM", projection_type=kind, projected_length=k)
    roberta = roberta_like(model)
    if layout is None:
        ids = random_ids(3, k)
        assert difference(model(ids).logits, roberta(ids).logits) < TOLERANCE["whole_model"]
        return
    # 61 slots, of which up to k are real
    ids, mask = random_ids(5, 61), mask_of(layout, 5, 61)
    mask = mask * (mask.cumsum(1) <= k)
    logits = model(ids, mask).logits
    for row in range(5):
        real = mask[row].bool()
        alone = roberta(ids[row : row + 1, real]).logits[0]
        assert difference(logits[row, real], alone) < TOLERANCE["whole_model"]


def test_beyond_k_tokens_pooling_is_not_roberta():
    model = build("LinformerForMaskedLM", projection_type="mean_pooling")
    ids = random_ids(1, 8)
    assert difference(model(ids).logits, roberta_like(model)(ids).logits) > 1e-2


# ---- padding, lengths, state


@every_variant
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_changes_nothing(overrides, layout):
    model = build(**overrides)
    ids, mask = random_ids(6, 61), mask_of(layout, 6, 61, seed=5)
    states = model(ids, mask).last_hidden_state
    for row in range(6):
        real = mask[row].bool()
        alone = model(ids[row : row + 1, real]).last_hidden_state[0]
        assert difference(states[row, real], alone) < TOLERANCE["float32"]
        one = model(ids[row : row + 1], mask[row : row + 1]).last_hidden_state[0, real]
        assert difference(one, alone) < TOLERANCE["float32"]


@every_variant
def test_padding_changes_no_gradient(overrides):
    model, mask = build(**overrides).double(), mask_of("holes", 3, 61)
    words, direction = torch.randn(2, 3, 61, 30, dtype=torch.float64).requires_grad_()
    states = model(inputs_embeds=words, attention_mask=mask)[0]
    (together,) = torch.autograd.grad((states * direction)[mask.bool()].sum(), words)
    for row in range(3):
        real = mask[row].bool()
        states = model(inputs_embeds=words[row : row + 1, real])[0]
        (alone,) = torch.autograd.grad((states * direction[row : row + 1, real]).sum(), words)
        assert difference(together[row], alone[row]) < TOLERANCE["float64"]


@every_kind
def test_any_mask_any_length(overrides):
    # random masks, from nearly empty to nearly full, with random amounts of padding around
    model = build(**overrides)
    generator = torch.Generator().manual_seed(11)
    for _ in range(40):
        seq_len = int(torch.randint(1, 62, (), generator=generator))
        density = torch.rand((), generator=generator)
        mask = (torch.rand(3, seq_len, generator=generator) < density).long()
        ids = random_ids(3, seq_len, seed=seq_len)
        states = model(ids, mask).last_hidden_state
        assert torch.isfinite(states).all()
        for row in range(3):
            real = mask[row].bool()
            if real.any():
                alone = model(ids[row : row + 1, real]).last_hidden_state[0]
                assert difference(states[row, real], alone) < TOLERANCE["float32"], (seq_len, mask[row])


@every_kind
def test_order_of_the_rows_changes_nothing(overrides):
    model, order = build(**overrides), [3, 0, 2, 1]
    ids, mask = random_ids(4, 50), mask_of("holes", 4, 50)
    states = model(ids, mask)[0]
    assert difference(model(ids[order], mask[order])[0], states[order]) < TOLERANCE["float32"]


@every_type
def test_order_of_the_tokens_matters(kind):
    model = build(projection_type=kind)
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.zero_()
    ids = random_ids(1, 61)
    swapped = ids[:, [1, 0, *range(2, 60), 60]]
    swapped[:, [1, 30]] = swapped[:, [30, 1]]
    assert difference(model(ids)[0][:, 40], model(swapped)[0][:, 40]) > 1e-4


@every_variant
def test_every_length_works(overrides):
    model = build(**overrides)
    ids = random_ids(61, 61)
    mask = torch.ones(61, 61).tril().long()
    states = model(ids, mask).last_hidden_state
    for length in range(1, 62):
        alone = model(ids[length - 1 : length, :length]).last_hidden_state[0]
        assert difference(alone, states[length - 1, :length]) < TOLERANCE["float32"], length


@pytest.mark.parametrize("way", ["ids", "embeds", "mask"])
@every_kind
def test_one_token_too_many_is_refused(way, overrides):
    model = build(**overrides)
    inputs = {"inputs_embeds": torch.zeros(1, 62, 30)} if way == "embeds" else {"input_ids": random_ids(1, 62)}
    if way == "mask":
        inputs["attention_mask"] = torch.ones(1, 62, dtype=torch.long)
    with pytest.raises(ValueError, match=r"(?s)62.*61.*truncat"):
        model(**inputs)


@every_variant
def test_forward_is_stateless_and_changes_nothing(overrides):
    model = build("LinformerForMaskedLM", **overrides)
    words = model.get_input_embeddings()(random_ids(2, 61)).detach()
    inputs = {
        "inputs_embeds": words.clone(),
        "attention_mask": mask_of("holes", 2, 61).float(),
        "token_type_ids": torch.ones(2, 61, dtype=torch.long),
        "position_ids": torch.arange(61)[None].repeat(2, 1),
        "labels": random_ids(2, 61),
    }
    before = {name: value.clone() for name, value in {**inputs, **model.state_dict()}.items()}
    settings = model.config.to_dict()
    first = model(**inputs)
    for length in (1, 3, 60):
        model(random_ids(3, length), mask_of("left", 3, length))
    model(words.new_zeros(1, 4).long() + 3)
    second = model(**inputs)
    model(**{**inputs, "attention_mask": None})
    assert torch.equal(first.logits, second.logits)
    assert model.config.to_dict() == settings
    after = {**inputs, **model.state_dict()}
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_inputs_may_be_views_that_cannot_be_written_to():
    model = build()
    words = torch.randn(1, 1, 30).expand(3, 61, 30)
    mask = mask_of("left", 2, 61)[1:].expand(3, 61)
    expected = model(inputs_embeds=words.clone(), attention_mask=mask.clone())[0]
    assert torch.equal(model(inputs_embeds=words, attention_mask=mask)[0], expected)
    turned = torch.randn(61, 3, 30).transpose(0, 1)
    assert torch.equal(model(inputs_embeds=turned)[0], model(inputs_embeds=turned.contiguous())[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float16])
@every_kind
def test_masks_of_any_dtype_mean_the_same(dtype, overrides):
    # 700 tokens: counting in uint8 or bfloat16 would go wrong at 256
    model = build(**overrides, max_position_embeddings=701)
    ids = random_ids(2, 700)
    mask = torch.ones(2, 700, dtype=torch.long)
    mask[0, 5:14] = 0
    mask[1, 650:] = 0
    assert torch.equal(model(ids, mask.to(dtype))[0], model(ids, mask)[0])


@every_class
def test_a_mask_of_ones_is_no_mask(head):
    model, inputs = build(head, num_labels=3), example(head)
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    with_mask = model(**inputs)
    del inputs["attention_mask"]
    for ours, expected in zip(with_mask.to_tuple(), model(**inputs).to_tuple(), strict=True):
        assert difference(ours, expected) < TOLERANCE["float32"]


def test_positions_count_real_tokens_and_may_be_chosen():
    model = build().double()
    weights = reference.in_double(model.state_dict())
    ids, mask = random_ids(3, 40), mask_of("holes", 3, 40)
    for positions in (torch.arange(40)[None].repeat(3, 1).flip(1), torch.arange(20, 60)[None]):
        expected = reference.linformer(weights, model.config, ids, mask, position_ids=positions)[-1]
        actual = model(ids, mask, position_ids=positions)[0] * mask[..., None]
        assert difference(actual, expected) < TOLERANCE["float64"]
        assert difference(actual, model(ids, mask)[0] * mask[..., None]) > 1e-2


def test_embeddings_may_be_given_in_place_of_ids():
    model, ids, mask = build(), random_ids(2, 61), mask_of("left", 2, 61)
    words = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=words, attention_mask=mask)[0], model(ids, mask)[0])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@every_variant
def test_nothing_of_padded_embeddings_leaks(overrides, poison):
    model = build(**overrides)
    words, mask = torch.randn(3, 61, 30), mask_of("holes", 3, 61)
    mask[1] = 0
    clean = model(inputs_embeds=words, attention_mask=mask)[0]
    poisoned = words.masked_fill(mask[..., None] == 0, poison).requires_grad_()
    states = model(inputs_embeds=poisoned, attention_mask=mask)[0]
    assert torch.isfinite(states).all()
    assert torch.equal(states[mask.bool()], clean[mask.bool()])
    states[mask.bool()].square().sum().backward()
    assert torch.isfinite(poisoned.grad).all()
    assert not poisoned.grad[mask == 0].any()
    assert [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()] == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("head", "overrides"),
    [*itertools.product(CLASSES, KINDS[: len(TYPES)]), *itertools.product(CLASSES[1:2], WINDOWED)],
)
def test_half_precision_trains(dtype, head, overrides):
    model = build(head, num_labels=3, **overrides, noise=False).to(dtype).train()
    inputs = example(head)
    inputs["attention_mask"][1] = 0
    loss = scalar(model(**inputs))
    loss.backward()
    assert torch.isfinite(loss)
    assert [name for name, p in model.named_parameters() if not p.grad.isfinite().all()] == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@every_variant
def test_autocast_trains(overrides, implementation, dtype):
    model = build("LinformerForMaskedLM", **overrides).train()
    model.set_attn_implementation(implementation)
    inputs = example("LinformerForMaskedLM")
    inputs["attention_mask"][1] = 0
    with torch.autocast("cpu", dtype=dtype):
        loss = model(**inputs).loss
    loss.backward()
    plain = model(**inputs).loss
    assert abs(loss - plain) / plain < TOLERANCE["bfloat16_relative_rms"]
    assert [name for name, p in model.named_parameters() if not p.grad.isfinite().all()] == []


# ---- wrong input


def wrong_masks():
    scores = torch.zeros(2, 9).masked_fill(torch.ones(2, 9).triu(1).bool(), torch.finfo(torch.float32).min)
    return {
        "3D": torch.ones(2, 9, 9),
        "4D": torch.ones(2, 1, 1, 9),
        "1D": torch.ones(9),
        "too long": torch.ones(2, 10),
        "too short": torch.ones(2, 8),
        "other batch": torch.ones(1, 9),
        "added to scores": scores,
        "minus infinity": torch.zeros(2, 9).masked_fill(scores < 0, float("-inf")),
        "half": torch.full((2, 9), 0.5),
        "nan": torch.full((2, 9), float("nan")),
        "half in bfloat16": torch.full((2, 9), 0.5, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("name", wrong_masks())
@pytest.mark.parametrize("head", CLASSES[:5])
def test_wrong_mask_is_refused(name, head):
    model = build(head)
    with pytest.raises(ValueError, match=r"(?s)attention_mask.*1.*0") as error:
        model(random_ids(2, 9), wrong_masks()[name])
    if name[0] in "134to":
        assert "2, 9" in str(error.value)


@every_class
@pytest.mark.parametrize("given", ["both", "neither"])
def test_both_or_neither_input_is_refused(head, given):
    model, inputs = build(head), {}
    if given == "both":
        ids = example(head)["input_ids"]
        inputs = {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids)}
    with pytest.raises(ValueError, match=r"(?s)input_ids.*inputs_embeds"):
        model(**inputs)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
@pytest.mark.parametrize("head", CLASSES[:5])
def test_packed_sequences_are_refused(name, head):
    with pytest.raises(ValueError, match=rf"(?s){name}.*attention_mask"):
        build(head)(random_ids(1, 9), **{name: torch.tensor([0, 4, 9])})


# ---- attention backends, outputs


def test_attention_goes_through_the_interface():
    seen = []

    def probe(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
        seen.append((query.shape, key.shape, value.shape, attention_mask, dropout, scaling, module.is_causal, kwargs))
        return F.scaled_dot_product_attention(query, key, value, attention_mask).transpose(1, 2), None

    AttentionInterface.register("probe", probe)
    ids, mask = random_ids(2, 61), mask_of("holes", 2, 61)
    for overrides in VARIANTS:
        model = build(**overrides)
        expected = model(ids, mask)[0]
        model.set_attn_implementation("probe")
        positions = torch.arange(61).expand(2, 61)
        assert difference(model(ids, mask)[0], expected) < TOLERANCE["float32"]
        model(ids, mask, position_ids=positions)
        for query, key, value, slots, dropout, scaling, is_causal, kwargs in seen:
            assert query == (2, 3, 61, 10)
            assert key == value == (2, 3, 7, 10)
            assert (slots is None) == (model.config.projection_type in ("linear", "random"))
            assert (dropout, scaling, is_causal) == (0.0, pytest.approx(10**-0.5), False)
            assert "position_ids" not in kwargs
        assert len(seen) == 4
        seen.clear()
    for overrides in WINDOWED:
        model = build(**overrides)
        expected = model(ids, mask)[0]
        model.set_attn_implementation("probe")
        assert difference(model(ids, mask)[0], expected) < TOLERANCE["float32"]
        for *_, dropout, scaling, is_causal, _ in seen:
            assert (dropout, scaling, is_causal) == (0.0, pytest.approx(10**-0.5), False)
        assert len(seen) >= 2
        seen.clear()


@every_variant
@pytest.mark.parametrize("layout", [None, "holes"])
def test_eager_is_sdpa(overrides, layout):
    model = build("LinformerForMaskedLM", **overrides)
    ids, mask = random_ids(3, 61), layout and mask_of(layout, 3, 61)
    outputs, gradients = [], []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        output = model(ids, mask, labels=ids if mask is None else ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        outputs.append(output.logits if mask is None else output.logits[mask.bool()])
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert difference(*outputs) < TOLERANCE["float32"]
    assert max(difference(a, b) for a, b in zip(*gradients, strict=True)) < TOLERANCE["float32"]


class PlainProducts:
    """Counts the calls of the attention for inference on CPUs."""

    def __init__(self, monkeypatch):
        self.calls, self.forward = 0, modeling_linformer.cpu_attention_forward
        monkeypatch.setattr(modeling_linformer, "cpu_attention_forward", self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.forward(*args, **kwargs)


@every_type
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("chunk", [2048, 40])
def test_plain_products_of_inference_are_eager(chunk, layout, kind, monkeypatch):
    model, plain = build(projection_type=kind), PlainProducts(monkeypatch)
    monkeypatch.setattr(modeling_linformer, "CHUNK", chunk)
    ids, mask = padded(3, 61, layout) if layout else (random_ids(3, 61), torch.ones(3, 61, dtype=torch.long))
    with torch.no_grad():
        states = model(ids, mask)[0]
        assert plain.calls == 2
        model.set_attn_implementation("eager")
        expected = model(ids, mask)[0]
    assert plain.calls == 2
    assert difference(states[mask.bool()], expected[mask.bool()]) < TOLERANCE["float32"]


@pytest.mark.parametrize("chunk", [2048, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain_products_are_as_precise_as_their_dtype(dtype, biased, chunk, monkeypatch):
    plain, model = PlainProducts(monkeypatch), build(num_hidden_layers=1)
    monkeypatch.setattr(modeling_linformer, "CHUNK", chunk)
    query, key, value = (torch.randn(2, length, 30, dtype=dtype) for length in (61, 7, 7))
    visible = torch.rand(2, 1, 1, 7) < 0.7
    visible[..., 0] = True
    bias = modeling_linformer.mask_bias(visible, dtype) if biased else None
    attention = model.encoder.layer[0].attention.self
    with torch.no_grad():
        states, _ = attention.attend(query, key, value, bias)
        assert plain.calls == 1
        model.set_attn_implementation("eager")
        precise = (None if tensor is None else tensor.double() for tensor in (query, key, value, bias))
        expected, _ = attention.attend(*precise)
    assert plain.calls == 1
    assert states.dtype == dtype
    if dtype == torch.bfloat16:
        error = (states - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < TOLERANCE["bfloat16_relative_rms"]
    else:
        assert difference(states, expected) < TOLERANCE[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("overrides", [{}, WINDOW], ids=["plain", "window"])
def test_plain_products_are_for_inference_over_few_keys_alone(overrides, monkeypatch):
    plain, model, ids = PlainProducts(monkeypatch), build(**overrides), random_ids(2, 61)
    model(ids)
    with torch.no_grad():
        model.train()(ids)
    assert plain.calls == 0
    with torch.inference_mode():
        model.eval()(ids)
    assert plain.calls == (4 if overrides else 2)  # with a window, those of the global tokens as well
    monkeypatch.setattr(modeling_linformer, "CHUNK", 6)
    with torch.inference_mode():
        model(ids)
    assert plain.calls == (4 if overrides else 2)


def test_attention_drops_out_in_training_without_gradients():
    model, ids = build(attention_probs_dropout_prob=0.5), random_ids(2, 61)
    with torch.no_grad():
        expected = model(ids)[0]
        assert torch.equal(model(ids)[0], expected)
        first, second = (model.train()(ids)[0] for _ in range(2))
    assert difference(first, second) > 1e-2
    assert difference(first, expected) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["linear", "random"]
)  # on a CPU, PyTorch's own kernel crashes where scores get a bias
def test_flex_attention_is_eager(kind):
    model, ids, mask = build(projection_type=kind), random_ids(2, 61), mask_of("holes", 2, 61)
    model.set_attn_implementation("eager")
    expected = model(ids, mask)[0]
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        assert difference(model(ids, mask)[0][mask.bool()], expected[mask.bool()]) < TOLERANCE["float32"]


def test_flash_attention_is_refused_for_want_of_its_package_only():
    assert LinformerModel._supports_flash_attn
    with pytest.raises(ImportError, match=r"(?i)flash"):
        build().set_attn_implementation("flash_attention_2")


@pytest.mark.parametrize("kind", ["mean_pooling", "max_pooling", "convolution"])
def test_flash_attention_with_a_score_bias_is_refused(kind):
    model = build(projection_type=kind)
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"(?s)flash.*sdpa"):
        model(random_ids(2, 61), mask_of("right", 2, 61))


@every_class
def test_attentions_and_hidden_states(head):
    model, inputs = build(head, num_labels=3), example(head, seq_len=59)
    model.set_attn_implementation("eager")
    output = model(**inputs, output_attentions=True, output_hidden_states=True)
    rows = inputs["input_ids"].numel() // 59
    assert [tuple(a.shape) for a in output.attentions] == [(rows, 3, 59, 7)] * 2
    assert [tuple(h.shape) for h in output.hidden_states] == [(rows, 59, 30)] * 3
    for attention in output.attentions:
        assert difference(attention.sum(-1), torch.ones(rows, 3, 59)) < TOLERANCE["float32"]
    quiet = model(**inputs)
    assert "attentions" not in quiet
    assert "hidden_states" not in quiet
    as_tuple = model(**inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert all(torch.equal(a, b) for a, b in zip(as_tuple, quiet.to_tuple(), strict=True))


@every_type
def test_attentions_are_the_reference_s(kind):
    model, ids = build(projection_type=kind, num_hidden_layers=1).double(), random_ids(1, 61)
    model.set_attn_implementation("eager")
    output = model(ids, output_attentions=True, output_hidden_states=True)
    weights = reference.in_double(model.state_dict())
    _, (_, expected) = reference.attend(output.hidden_states[0][0], weights, model.config, 0)
    assert difference(output.attentions[0][0], expected) < TOLERANCE["float64"]


# ---- the local window


@pytest.mark.parametrize("sharing", SHARINGS)
@every_type
def test_window_with_every_type_and_sharing_is_the_reference_s(kind, sharing):
    overrides = {"projection_type": kind, "projection_sharing": sharing, "num_hidden_layers": 1, **WINDOW}
    assert_outputs_and_gradients_are_the_reference_s(overrides, *padded(3, 61, "holes"))


@every_windowed
def test_window_at_every_length_is_the_reference_s(overrides):
    model, ids = build(**one_layer(overrides)).double(), random_ids(61, 61)
    mask = torch.ones(61, 61).tril().long()
    with torch.no_grad():
        expected = reference.linformer(reference.in_double(model.state_dict()), model.config, ids, mask)[-1]
        for length in range(1, 62):  # padded to another length, with and without full blocks
            rows = slice(length - 1, length + 2)
            padded_length = min(length + 2, 61)
            states = model(ids[rows, :padded_length], mask[rows, :padded_length])[0]
            gap = (states - expected[rows, :padded_length])[mask[rows, :padded_length].bool()]
            assert gap.abs().max() < TOLERANCE["float64"], length


@pytest.mark.parametrize("window", [1, 20, 100])
@pytest.mark.parametrize("num_global_tokens", [0, 1, 8, 61])
@pytest.mark.parametrize("kind", ["linear", "mean_pooling", "convolution"])
def test_any_number_of_global_tokens_is_the_reference_s(kind, window, num_global_tokens):
    overrides = {"projection_type": kind, "num_hidden_layers": 1}
    overrides |= {"local_attention_window": window, "num_global_tokens": num_global_tokens}
    assert_outputs_and_gradients_are_the_reference_s(overrides, *padded(3, 61, "left"))


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("overrides", [*KINDS[: len(TYPES)], {"projected_length": 0}], ids=variant_name)
def test_two_windows_are_roberta(overrides, layout):
    model = build("LinformerForMaskedLM", **overrides, local_attention_window=16, num_global_tokens=1)
    roberta = roberta_like(model)
    if layout is None:
        for length in (32, 31, 16, 3):
            ids = random_ids(2, length)
            assert difference(model(ids).logits, roberta(ids).logits) < TOLERANCE["whole_model"]
        return
    ids, mask = random_ids(5, 61), mask_of(layout, 5, 61)
    mask = mask * (mask.cumsum(1) <= 32)
    logits = model(ids, mask).logits
    for row in range(5):
        real = mask[row].bool()
        alone = roberta(ids[row : row + 1, real]).logits[0]
        assert difference(logits[row, real], alone) < TOLERANCE["whole_model"]


@pytest.mark.parametrize("kind", [*TYPES])
def test_beyond_two_windows_it_is_not_roberta(kind):
    model = build("LinformerForMaskedLM", projection_type=kind, local_attention_window=16)
    ids = random_ids(1, 33)
    assert difference(model(ids).logits, roberta_like(model)(ids).logits) > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("projected_length", [0, 7])
def test_a_converted_bert_is_itself_within_two_windows(projected_length, layout):
    sizes = {name: TINY[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    bert = BertForMaskedLM(BertConfig(**sizes, intermediate_size=37, max_position_embeddings=61)).eval()
    fill_with_noise(bert)
    options = {"local_attention_window": 16, "num_global_tokens": 1, "projected_length": projected_length}
    model = convert_encoder(bert, **options)
    ids, mask = padded(5, 61, layout)
    mask = mask * (mask.cumsum(1) <= 32)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # BERT counts the padding too
    expected = bert(ids, mask, position_ids=positions).logits
    assert difference(model(ids, mask).logits[mask.bool()], expected[mask.bool()]) < TOLERANCE["whole_model"]


@pytest.mark.parametrize("layout", LAYOUTS)
@every_type
def test_where_all_tokens_are_global_it_is_roberta(kind, layout):
    window = {"local_attention_window": 3, "num_global_tokens": 61}
    model = build("LinformerForMaskedLM", projection_type=kind, **window)
    ids, mask = padded(3, 61, layout)
    logits, roberta = model(ids, mask).logits, roberta_like(model)
    for row in range(3):
        real = mask[row].bool()
        assert difference(logits[row, real], roberta(ids[row : row + 1, real]).logits[0]) < TOLERANCE["whole_model"]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("num_global_tokens", [0, 3, 9])
def test_every_token_counts_once(num_global_tokens, implementation):
    # a query that is zero sees all tokens alike: where slots do not cross the edge of a block, it gets the mean of all
    model = build(
        projection_type="mean_pooling",
        projected_length=20,
        local_attention_window=6,
        num_global_tokens=num_global_tokens,
        max_position_embeddings=60,
    ).double()
    model.set_attn_implementation(implementation)
    attention = model.encoder.layer[0].attention.self
    torch.nn.init.zeros_(attention.query.weight)
    torch.nn.init.zeros_(attention.query.bias)
    states = torch.randn(2, 60, 30, dtype=torch.float64)
    context, _ = attention(states, shared_projection=model.encoder.shared_projection)
    expected = attention.value(states).mean(1, keepdim=True).expand(-1, 60, -1)
    assert difference(context, expected) < TOLERANCE["float64"]


def columns_of_attentions(of_tokens, of_slots, config, layer):
    """The probabilities of the reference in the columns in which the model gives them, for one sentence."""
    window, num_tokens = reference.of_layer(config.local_attention_window, layer), of_tokens.shape[-1]
    columns = []
    for query in range(num_tokens):
        if query < config.num_global_tokens:  # what it sees is not given
            columns.append(of_tokens.new_zeros(of_tokens.shape[0], 3 * window + config.num_global_tokens))
            continue
        first = (query // window - 1) * window
        around = F.pad(of_tokens[:, query], (window, 3 * window))[:, first + window : first + 4 * window]
        elsewhere = [p if p // window < query // window - 1 else None for p in range(config.num_global_tokens)]
        zero = around.new_zeros(around.shape[0])
        others = [zero if p is None else of_tokens[:, query, p] for p in elsewhere]
        columns.append(torch.cat([around, *(column[:, None] for column in others)], -1))
    columns = torch.stack(columns, 1)
    return torch.cat([columns, of_slots * (columns.sum(-1, keepdim=True) > 0)], -1)


@pytest.mark.parametrize("overrides", [WINDOWED[0], WINDOWED[1], WINDOWED[3], NO_SLOTS], ids=variant_name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attentions_of_windows_are_the_reference_s(overrides, layout):
    model = build(**one_layer({**overrides, "norm_first": False})).double()
    model.set_attn_implementation("eager")
    ids, mask = padded(4, 61, layout)
    output = model(ids, mask, output_attentions=True, output_hidden_states=True)
    weights = reference.in_double(model.state_dict())
    for row in range(4):
        real = mask[row].bool()
        _, parts = reference.attend(output.hidden_states[0][row, real], weights, model.config, 0)
        expected = columns_of_attentions(*parts, model.config, 0)
        actual = output.attentions[0][row, :, real]
        missing = actual.shape[-1] - expected.shape[-1]  # slots that this row does not have
        assert difference(actual, F.pad(expected, (0, missing))) < TOLERANCE["float64"]


@every_windowed
def test_attentions_of_windows_sum_to_one(overrides):
    model = build(**overrides)
    model.set_attn_implementation("eager")
    config = model.config
    for seq_len in (61, 8):
        ids, mask = padded(3, seq_len, "holes")
        attentions = model(ids, mask, output_attentions=True).attentions
        assert len(attentions) == 2
        for layer, attention in enumerate(attentions):
            window = reference.of_layer(config.local_attention_window, layer)
            assert attention.shape[:3] == (3, 3, seq_len)
            local = 3 * window if seq_len > 2 * window else seq_len
            k = config.projected_lengths[layer]
            assert attention.shape[-1] <= (local if window else 0) + config.num_global_tokens + k
            expected = torch.ones(3, seq_len)
            if window and seq_len > 2 * window:
                expected[mask.cumsum(1) <= config.num_global_tokens] = 0.0
            for head in range(3):
                sums = attention[:, head].sum(-1)
                assert difference(sums[mask.bool()], expected[mask.bool()]) < TOLERANCE["float32"]


def test_attentions_where_the_window_sees_all_are_those_of_full_attention():
    model = build(projection_type="mean_pooling", **WINDOW).double()
    model.set_attn_implementation("eager")
    output = model(random_ids(2, 10), output_attentions=True, output_hidden_states=True)
    weights = reference.in_double(model.state_dict())
    for layer, attention in enumerate(output.attentions):
        for row in range(2):
            _, (expected, _) = reference.attend(output.hidden_states[layer][row], weights, model.config, layer)
            assert attention.shape == (2, 3, 10, 10)  # no projected positions, which would be masked
            assert difference(attention[row], expected) < TOLERANCE["float64"]


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
@pytest.mark.parametrize("seq_len", [61, 8])
@pytest.mark.parametrize("device", ["cpu", "meta"])  # on all devices, not only where flex attention would crash
@pytest.mark.parametrize("overrides", [*WINDOWED[:2], NO_SLOTS], ids=variant_name)
def test_backends_that_cannot_take_windows_are_refused(overrides, device, seq_len, implementation):
    model = build(**overrides).to(device)
    model.config._attn_implementation_internal = implementation
    with pytest.raises(ValueError, match=rf"(?s){implementation}.*local.*window.*sdpa"):
        model(inputs_embeds=torch.zeros(2, seq_len, 30, device=device))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_dropout_of_windows_is_attention_dropout(implementation):
    # each probability is dropped by itself, and what is left is scaled: on average nothing changes
    model = build(projection_type="mean_pooling", num_hidden_layers=1, attention_probs_dropout_prob=0.3, **WINDOW)
    model.set_attn_implementation(implementation)
    attention = model.encoder.layer[0].attention.self
    states = torch.randn(1, 23, 30).expand(3000, -1, -1)

    def context():
        return attention(states, shared_projection=model.encoder.shared_projection)[0]

    with torch.no_grad():
        expected = context()[0]
        assert torch.equal(context()[0], expected)
        attention.train()
        dropped = context()
    assert (dropped - expected).std(0).min() > 0.02  # in every token and channel
    error = (dropped.mean(0) - expected) / (dropped.std(0) / 3000**0.5)
    assert error.abs().max() < 5


@every_windowed
def test_windows_have_no_weights_but_norms(overrides):
    model = build(**overrides)
    windows, lengths = model.config.local_attention_windows, model.config.projected_lengths
    expected = set()
    for layer in range(2):
        roles = {"layerwise": [], "key_value": ["key"]}.get(model.config.projection_sharing, ["key", "value"])
        has_weights = lengths[layer] > 0 and overrides.get("projection_type") not in POOLINGS
        expected |= {f"{layer}.{role}_projection" for role in roles if has_weights}
        if overrides.get("dual_layer_norm") and windows[layer]:
            expected |= {f"{layer}.local_norm", *([f"{layer}.projected_norm"] if lengths[layer] else [])}
    names = {name.rpartition(".")[0].removeprefix("encoder.layer.") for name in model.state_dict()}
    names = {name.replace("attention.self.", "") for name in names if "attention.self" in name}
    plain = {f"{layer}.{name}" for layer in range(2) for name in ("query", "key", "value")}
    assert names - plain == expected
    shared = "encoder.shared_projection.weight" in model.state_dict()
    assert shared == (
        overrides.get("projection_type") == "random"
    )  # of these models, the only one that shares a matrix


def test_a_checkpoint_takes_a_window_when_it_is_loaded(tmp_path):
    build("LinformerForMaskedLM", projection_type="mean_pooling").save_pretrained(tmp_path)
    loaded, info = LinformerForMaskedLM.from_pretrained(tmp_path, **WINDOW, output_loading_info=True)
    assert not any(info.values())
    made = build("LinformerForMaskedLM", projection_type="mean_pooling", **WINDOW)
    ids = random_ids(2, 61)
    assert torch.equal(loaded(ids).logits, made(ids).logits)


# ---- heads


def test_masked_lm_head():
    model, inputs = build("LinformerForMaskedLM"), example("LinformerForMaskedLM")
    output, weights = model(**inputs, output_hidden_states=True), model.state_dict()
    states = F.gelu(reference.linear(output.hidden_states[-1], weights, "lm_head.dense"))
    states = reference.layer_norm(states, weights, "lm_head.layer_norm", model.config)
    expected = reference.linear(states, weights, "lm_head.decoder")
    assert difference(output.logits, expected) < TOLERANCE["float32"]
    assert difference(output.loss, F.cross_entropy(expected.flatten(0, 1), inputs["labels"].flatten())) < 1e-5


def cross_entropy(logits, labels, vocab_size, **options):
    """Transformers' loss of masked LMs in the precision of the logits; its own is in float32."""
    return fixed_cross_entropy(logits.view(-1, vocab_size), labels.view(-1), **options)


def losses_of_both_heads(dtype=torch.float32, use=lambda model: model, **inputs):
    """Outputs and gradients in training of the labelled tokens alone, and of the full head."""
    outputs, gradients = [], []
    for sparse_prediction in (True, False):
        model = build("LinformerForMaskedLM", sparse_prediction=sparse_prediction).to(dtype).train()
        if dtype == torch.float64:
            model.loss_function = cross_entropy
        outputs.append(use(model)(**inputs))
        outputs[-1].loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    return outputs, gradients


def masked_lm_labels(kind, ids, mask, ignore_index=-100):
    labelled = mask.bool() if kind == "all" else (ids % 3 == 0) & mask.bool()
    labelled &= torch.tensor(kind != "none")
    return ids.masked_fill(~labelled, ignore_index)


@pytest.mark.parametrize("chunk", [2048, 16])
@pytest.mark.parametrize("kind", ["some", "all"])
@pytest.mark.parametrize("layout", [None, "holes"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_items_in_batch": 71}, {"num_items_in_batch": torch.tensor(71)}, {"ignore_index": 1}],
    ids=["mean", "int", "tensor", "ignore_index"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_labelled_tokens_alone_give_the_loss_and_gradients_of_the_full_head(
    dtype, options, layout, kind, chunk, monkeypatch
):
    monkeypatch.setattr(modeling_linformer, "CHUNK", chunk)
    ids, mask = padded(3, 61, layout) if layout else (random_ids(3, 61), torch.ones(3, 61, dtype=torch.long))
    labels = masked_lm_labels(kind, ids, mask, options.get("ignore_index", -100))
    assert (labels == ids).sum() > 16
    outputs, gradients = losses_of_both_heads(dtype, input_ids=ids, attention_mask=mask, labels=labels, **options)
    assert outputs[0].logits is None
    assert outputs[1].logits.shape == (3, 61, 53)
    tolerance = TOLERANCE[str(dtype).removeprefix("torch.")]
    assert difference(*(output.loss for output in outputs)) < tolerance
    assert max(difference(gradients[0][name], gradients[1][name]) for name in gradients[0]) < tolerance


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 71}], ids=["mean", "sum"])
def test_a_batch_without_labelled_tokens_is_that_of_the_full_head(options):
    ids, mask = padded(3, 61, "holes")
    labels = masked_lm_labels("none", ids, mask)
    outputs, gradients = losses_of_both_heads(input_ids=ids, attention_mask=mask, labels=labels, **options)
    expected = torch.tensor(0.0 if options else float("nan"))
    for output, gradient in zip(outputs, gradients, strict=True):
        assert torch.equal(output.loss.isnan(), expected.isnan())
        assert output.loss.nan_to_num() == 0
        assert [name for name, value in gradient.items() if value is None] == []
        if options:
            assert [name for name, value in gradient.items() if value.any()] == []


@pytest.mark.parametrize(("sparse_prediction", "chunk"), [(True, 40), (True, 2048), (False, 40)])
def test_logits_exist_for_one_chunk_of_labelled_tokens_at_a_time(sparse_prediction, chunk, monkeypatch):
    monkeypatch.setattr(modeling_linformer, "CHUNK", chunk)
    model = build("LinformerForMaskedLM", sparse_prediction=sparse_prediction).train()
    ids, mask = padded(3, 61, "holes")
    labels = masked_lm_labels("all", ids, mask)
    with Operations() as operations:
        model(ids, mask, labels=labels).loss.backward()
    rows = max(math.prod(shape[:-1]) for shape in operations.made if shape[-1:] == (53,))
    assert rows == (min(chunk, mask.sum().item()) if sparse_prediction else 3 * 61)


def test_logits_of_all_tokens_without_labels_and_in_evaluation():
    model, inputs = build("LinformerForMaskedLM"), example("LinformerForMaskedLM")
    evaluated = model(**inputs)
    assert evaluated.logits.shape == (4, 23, 53)
    model.train()
    trained = model(**inputs)
    assert trained.logits is None
    assert difference(trained.loss, evaluated.loss) < TOLERANCE["float32"]
    del inputs["labels"]
    unlabelled = model(**inputs)
    assert unlabelled.loss is None
    assert difference(unlabelled.logits, evaluated.logits) < TOLERANCE["float32"]


def test_a_compiled_model_uses_the_full_head():
    torch._dynamo.reset()
    inputs = example("LinformerForMaskedLM", seq_len=61)

    def compiled(model):
        return torch.compile(model, fullgraph=True, backend="eager")

    outputs, gradients = losses_of_both_heads(use=compiled, **inputs)
    (eager, _), (eager_gradients, _) = losses_of_both_heads(**inputs)
    assert [output.logits.shape for output in outputs] == [(4, 61, 53)] * 2
    assert difference(outputs[0].loss, eager.loss) < TOLERANCE["float32"]
    assert max(difference(gradients[0][name], eager_gradients[name]) for name in gradients[0]) < TOLERANCE["float32"]
    torch._dynamo.reset()


def first_real(states, mask):
    return torch.stack([row[keep.bool()][0] for row, keep in zip(states, mask, strict=True)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", ["LinformerForSequenceClassification", "LinformerForMultipleChoice"])
def test_classification_head_reads_the_first_real_token(head, layout):
    model = build(head, num_labels=3)
    ids, mask = random_ids(6, 41), mask_of(layout, 6, 41)
    shape = (2, 3, 41) if "Choice" in head else (6, 41)
    output = model(ids.view(shape), mask.view(shape), output_hidden_states=True)
    weights = model.state_dict()
    inner = torch.tanh(reference.linear(first_real(output.hidden_states[-1], mask), weights, "classifier.dense"))
    expected = reference.linear(inner, weights, "classifier.out_proj")
    expected = expected.view(2, 3) if "Choice" in head else expected
    assert difference(output.logits, expected) < TOLERANCE["float32"]
    words = model.get_input_embeddings()(ids.view(shape))
    assert torch.equal(model(inputs_embeds=words, attention_mask=mask.view(shape)).logits, output.logits)


LOSSES = {
    "single_label": (3, torch.tensor([0, 2, 1, 1]), F.cross_entropy),
    "regression": (1, torch.tensor([0.5, -1.0, 2.0, 0.0]), lambda x, y: F.mse_loss(x[:, 0], y)),
    "regression of three": (3, torch.linspace(-1, 1, 12).view(4, 3), F.mse_loss),
    "multi_label": (3, (torch.arange(12) % 5 < 2).float().view(4, 3), F.binary_cross_entropy_with_logits),
}


@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize(  # numbers for several outputs mean several labels unless said otherwise
    ("name", "stated"),
    [(name, stated) for name in LOSSES for stated in (True, False) if stated or "three" not in name],
)
def test_sequence_losses(name, stated, batch):
    num_labels, labels, loss = LOSSES[name]
    problem = {"single_label": "single_label_classification", "multi_label": "multi_label_classification"}
    problem_type = problem.get(name, "regression") if stated else None
    model = build("LinformerForSequenceClassification", num_labels=num_labels, problem_type=problem_type)
    output = model(random_ids(batch, 9), labels=labels[:batch])
    assert difference(output.loss, loss(output.logits, labels[:batch])) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_sequence_losses_have_gradients_in_every_dtype(name, dtype):
    num_labels, labels, _ = LOSSES[name]
    problem_type = "regression" if "regression" in name else None
    model = build("LinformerForSequenceClassification", num_labels=num_labels, problem_type=problem_type).to(dtype)
    loss = model(random_ids(4, 9), labels=labels).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert model.classifier.dense.weight.grad.isfinite().all()


def test_token_classification_and_question_answering_losses():
    model, inputs = build(CLASSES[3], num_labels=3), example(CLASSES[3])
    output = model(**inputs, output_hidden_states=True)
    expected = reference.linear(output.hidden_states[-1], model.state_dict(), "classifier")
    assert difference(output.logits, expected) < TOLERANCE["float32"]
    assert difference(output.loss, F.cross_entropy(expected.flatten(0, 1), inputs["labels"].flatten())) < 1e-6

    model, inputs = build(CLASSES[4]), example(CLASSES[4])
    output = model(**inputs, output_hidden_states=True)
    start, end = reference.linear(output.hidden_states[-1], model.state_dict(), "qa_outputs").unbind(-1)
    assert difference(output.start_logits, start) < TOLERANCE["float32"]
    assert difference(output.end_logits, end) < TOLERANCE["float32"]
    loss = (F.cross_entropy(start, inputs["start_positions"]) + F.cross_entropy(end, inputs["end_positions"])) / 2
    assert difference(output.loss, loss) < 1e-6


def test_multiple_choice_loss():
    model, inputs = build(CLASSES[5]), example(CLASSES[5])
    output = model(**inputs)
    assert output.logits.shape == (4, 3)
    assert difference(output.loss, F.cross_entropy(output.logits, inputs["labels"])) < 1e-6


# ---- training


@every_variant
@pytest.mark.parametrize("head", ["LinformerForMaskedLM", "LinformerForSequenceClassification"])
def test_every_parameter_gets_a_gradient(head, overrides):
    model = build(head, num_labels=3, **overrides).train()
    model(**example(head, seq_len=61)).loss.backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []
    # softmax does not see a constant added to all keys, so the key bias alone has the gradient zero
    zero = [n for n, p in model.named_parameters() if p.grad.abs().max() < 1e-8 and not n.endswith("self.key.bias")]
    if "num_global_tokens" in overrides and head == "LinformerForSequenceClassification":
        # the head reads a global token, which in the last layer sees no slot
        zero = [name for name in zero if "layer.1.attention.self.projected_norm" not in name]
        zero = [name for name in zero if not re.search(r"layer\.1\..*_projection", name)]
    assert zero == []


@pytest.mark.parametrize("head", CLASSES[1:])
def test_every_head_gives_every_parameter_a_gradient(head):
    model = build(head, num_labels=3).train()
    model(**example(head)).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@every_windowed
def test_no_parameter_is_unused_where_the_window_sees_all(overrides):
    # in distributed training, a parameter without gradient in one batch stops the run
    model = build("LinformerForMaskedLM", **overrides).train()
    for seq_len in (1, 6):
        model.zero_grad()
        model(**example("LinformerForMaskedLM", seq_len=seq_len)).loss.backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@every_variant
def test_every_module_runs_through_its_own_forward(overrides):
    # what shards, moves or adapts weights hooks in there
    model, called = build(**overrides), set()
    owners = {n: m for n, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
    for name, module in owners.items():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    model(random_ids(2, 61))
    assert called == set(owners)


@pytest.mark.parametrize("reentrant", [False, True])
@every_variant
def test_gradient_checkpointing_changes_nothing(overrides, reentrant):
    inputs, results = example("LinformerForMaskedLM"), []
    for checkpointing in (False, True):
        model = build("LinformerForMaskedLM", **overrides, hidden_dropout_prob=0.2).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert model.linformer.encoder.layer[0].gradient_checkpointing
        torch.manual_seed(3)
        loss = model(**inputs).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert max(difference(a, b) for a, b in zip(*results, strict=True)) < 1e-6


class CountDropouts(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.dropout:
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            self.calls += [p] * bool(training and p)
        if function is F.scaled_dot_product_attention:
            self.calls += [kwargs["dropout_p"]] * bool(kwargs.get("dropout_p"))
        return function(*args, **kwargs)


@every_type
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_dropout_acts_once_and_only_in_training(kind, implementation):
    probabilities = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
    ours = build("LinformerForMaskedLM", projection_type=kind, **probabilities)
    theirs = roberta_like(ours)
    for module in theirs.modules():  # same probabilities as ours
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    for layer in theirs.roberta.encoder.layer:
        layer.attention.self.dropout.p = 0.3
    counts = []
    for model in (ours, theirs):
        model.set_attn_implementation(implementation)
        with CountDropouts() as evaluation:
            model.eval()(random_ids(2, 9))
        with CountDropouts() as training:
            model.train()(random_ids(2, 9))
        assert evaluation.calls == []
        counts.append(sorted(training.calls))
    assert counts[0] == counts[1] == [0.2] * 5 + [0.3] * 2


def test_classifier_dropout_is_its_own():
    for head, expected in (("LinformerForSequenceClassification", 2), ("LinformerForTokenClassification", 1)):
        with CountDropouts() as training:
            build(head, classifier_dropout=0.4).train()(random_ids(2, 9))
        assert training.calls == [0.4] * expected
        with CountDropouts() as training:
            build(head, hidden_dropout_prob=0.1).train()(random_ids(2, 9))
        assert training.calls == [0.1] * (5 + expected)


@pytest.mark.parametrize("kind", ["linear", "convolution", "mean_pooling"])
def test_it_learns(kind):
    # recall of the word at a fixed position, which needs attention across the projection
    torch.manual_seed(0)
    model = linformer_hf.LinformerForSequenceClassification(
        tiny_config(projection_type=kind, num_labels=4, max_position_embeddings=24, projected_length=8)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(100):
        ids = random_ids(32, 24, seed=step, vocab_size=7)
        loss = model(ids, labels=ids[:, 13] - 3).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ids = random_ids(200, 24, seed=999, vocab_size=7)
    accuracy = (model.eval()(ids).logits.argmax(-1) == ids[:, 13] - 3).float().mean()
    assert accuracy > 0.35  # chance is 0.25


# ---- Trainer


TASKS = {
    "masked LM": ("LinformerForMaskedLM", {}),
    "masked LM with a window": ("LinformerForMaskedLM", WINDOWED[0]),
    "single label": ("LinformerForSequenceClassification", {"num_labels": 3}),
    "regression": ("LinformerForSequenceClassification", {"num_labels": 1}),
    "regression of three": ("LinformerForSequenceClassification", {"num_labels": 3, "problem_type": "regression"}),
    "multi label": (
        "LinformerForSequenceClassification",
        {"num_labels": 3, "problem_type": "multi_label_classification"},
    ),
    "token classification": ("LinformerForTokenClassification", {"num_labels": 3}),
    "question answering": ("LinformerForQuestionAnswering", {}),
    "multiple choice": ("LinformerForMultipleChoice", {}),
}


def task_examples(task):
    batch = example(TASKS[task][0], batch=8, seq_len=13)
    if task == "regression":
        batch["labels"] = torch.linspace(-2, 5, 8)
    elif task in ("regression of three", "multi label"):
        numbers = torch.linspace(-1, 1, 24).view(3, 8).T
        batch["labels"] = (numbers > 0.3).float() if task == "multi label" else numbers.contiguous()
    return [{name: value[row] for name, value in batch.items()} for row in range(8)]


def train_one_step(task, folder, batch_size, accumulation):
    from transformers import Trainer, TrainingArguments

    head, overrides = TASKS[task]
    model = build(head, **overrides)
    before = {name: value.clone() for name, value in model.named_parameters()}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=task_examples(task))
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    # plain gradient descent with the rate 1 moves each parameter by its gradient
    return loss, {name: before[name] - value for name, value in model.named_parameters()}


@pytest.mark.parametrize("task", TASKS)
def test_accumulation_under_trainer_changes_neither_loss_nor_gradients(task, tmp_path):
    loss, gradients = train_one_step(task, tmp_path, 8, 1)
    accumulated_loss, accumulated = train_one_step(task, tmp_path, 2, 4)
    assert accumulated_loss == pytest.approx(loss, abs=2e-4)  # Trainer rounds to four digits
    scale = max(gradient.abs().max().item() for gradient in gradients.values())
    worst = max(difference(gradients[name], accumulated[name]) for name in gradients)
    assert worst < TOLERANCE["float32"] * max(scale, 1.0)
    assert scale > 1e-2
    # and both are the plain mean over the eight
    head, overrides = TASKS[task]
    rows = task_examples(task)
    plain = build(head, **overrides)(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
    assert loss == pytest.approx(plain.item(), abs=2e-4)


# ---- embeddings, ties, other uses


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [71, 41])
def test_resizing_the_vocabulary(tied, size, tmp_path):
    model = build("LinformerForMaskedLM", tie_word_embeddings=tied)
    ids = random_ids(2, 61, vocab_size=40)
    with torch.no_grad():
        before = model(ids).logits
    model.resize_token_embeddings(size)
    kept = min(size, 53)
    logits = model(ids).logits.detach()
    assert logits.shape == (2, 61, size)
    assert difference(logits[..., :kept], before[..., :kept]) < TOLERANCE["float32"]
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == size
    decoder = model.lm_head.decoder
    assert decoder.weight.shape == (size, 30)
    assert decoder.bias.shape == (size,)
    assert decoder.out_features == size
    assert (decoder.weight is model.get_input_embeddings().weight) == tied
    model(ids, labels=ids).loss.backward()
    model.save_pretrained(tmp_path)
    loaded = LinformerForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, logits)
    assert (loaded.lm_head.decoder.weight is loaded.get_input_embeddings().weight) == tied


def test_resizing_to_a_multiple():
    model = build("LinformerForSequenceClassification")
    model.resize_token_embeddings(54, pad_to_multiple_of=16)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == 64


@pytest.mark.parametrize("head", CLASSES)
def test_embeddings_can_be_replaced(head):
    model, new = build(head), torch.nn.Embedding(60, 30)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is new
    assert model.base_model.embeddings.word_embeddings is new


def test_the_size_of_fairseq_s_base_model():
    # linformer_roberta_base with ratio 4, headwise. It has two more positions (an offset) and no token types.
    for tied, theirs in ((True, 126_065_744), (False, 164_465_744)):
        config = linformer_hf.LinformerConfig(
            vocab_size=50_000, projected_length=128, projection_sharing="headwise", tie_word_embeddings=tied
        )
        with torch.device("meta"):
            model = LinformerForMaskedLM(config)
        assert model.num_parameters() == theirs - 2 * 768 + 1 * 768


def test_there_is_no_pooler():
    assert not [name for name, _ in build().named_parameters() if "pooler" in name]


@every_variant
def test_a_copy_is_its_own(overrides):
    model = build("LinformerForMaskedLM", **overrides)
    twin, ids = copy.deepcopy(model), random_ids(2, 61)
    assert torch.equal(twin(ids).logits, model(ids).logits)
    ours = {value.data_ptr() for value in model.state_dict().values()}
    assert not ours & {value.data_ptr() for value in twin.state_dict().values()}
    assert twin.lm_head.decoder.weight is twin.get_input_embeddings().weight


@pytest.mark.parametrize("overrides", [{}, WINDOWED[0]], ids=variant_name)
def test_encoder_of_an_encoder_decoder(overrides, tmp_path):
    decoder = BertLMHeadModel(
        BertConfig(
            vocab_size=53,
            hidden_size=30,
            num_hidden_layers=1,
            num_attention_heads=3,
            intermediate_size=37,
            is_decoder=True,
            add_cross_attention=True,
        )
    )
    model = EncoderDecoderModel(encoder=build(**overrides), decoder=decoder).eval()
    model.config.decoder_start_token_id, model.config.pad_token_id = 0, 1
    model.generation_config.decoder_start_token_id = 0
    ids, mask = random_ids(3, 61), mask_of("left", 3, 61)
    output = model(input_ids=ids, attention_mask=mask, labels=random_ids(3, 5))
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.encoder.parameters())
    real = mask[1].bool()
    alone = model(input_ids=ids[1:2, real], labels=random_ids(3, 5)[1:2])
    assert difference(output.logits[1], alone.logits[0]) < TOLERANCE["float32"]
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert generated.shape[0] == 3
    model.save_pretrained(tmp_path)
    again = EncoderDecoderModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(input_ids=ids, attention_mask=mask, labels=random_ids(3, 5)).logits, output.logits)


SHARING_OR_WINDOW = [{"projection_sharing": sharing} for sharing in SHARINGS] + WINDOWED[2:4]
every_sharing_or_window = pytest.mark.parametrize("overrides", SHARING_OR_WINDOW, ids=variant_name)


@every_sharing_or_window
def test_linear_layers_may_be_quantized(overrides):
    model, ids, mask = build(**overrides), random_ids(2, 61), mask_of("holes", 2, 61)
    small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    error = (small(ids, mask)[0] - model(ids, mask)[0])[mask.bool()]
    assert 0 < error.std() < 0.1


@every_sharing_or_window
def test_lora_acts_where_it_is_put(overrides):
    peft = pytest.importorskip("peft")
    ids, mask = random_ids(2, 61), mask_of("holes", 2, 61)
    for target in ("query", "key", "value"):
        model = build(CLASSES[2], num_labels=3, **overrides)
        before = model(ids, mask).logits.detach()
        tuned = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=[target], r=2)).eval()
        assert difference(tuned(ids, mask).logits, before) < TOLERANCE["float32"]
        adapters = {name: value for name, value in tuned.named_parameters() if "lora" in name}
        with torch.no_grad():
            for value in adapters.values():
                value.normal_()
        after = tuned(ids, mask, labels=torch.tensor([0, 1]))
        after.loss.backward()
        assert difference(after.logits, before) > 1e-3
        assert all(value.grad.abs().max() > 0 for value in adapters.values())
        assert difference(tuned.merge_and_unload()(ids, mask).logits, after.logits) < TOLERANCE["whole_model"]


TWO_PROCESSES = """
import sys
import torch
import torch.distributed as dist
from linformer_hf import LinformerModel

dist.init_process_group("gloo")
for folder in sys.argv[1:]:
    ids, mask, expected = torch.load(f"{folder}/expected.pt")
    model = LinformerModel.from_pretrained(folder, tp_plan="auto")
    states = model(ids, mask)[0]
    states = states.full_tensor() if hasattr(states, "full_tensor") else states
    assert (states - expected)[mask.bool()].abs().max() < 1e-5, folder
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("sharing", SHARINGS[1:])  # with a projection for each head there is no plan
def test_tensor_parallel(sharing, tmp_path):
    folders = []
    for number, overrides in enumerate([*KINDS[: len(TYPES)], WINDOWED[0], WINDOWED[1], NO_SLOTS]):
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 36}
        model = build(**{**overrides, "projection_sharing": sharing}, **sizes)
        ids, mask = random_ids(2, 61), mask_of("left", 2, 61)
        folders.append(str(tmp_path / str(number)))
        model.save_pretrained(folders[-1])
        torch.save((ids, mask, model(ids, mask)[0].detach()), f"{folders[-1]}/expected.pt")
    (tmp_path / "script.py").write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = subprocess.run(
        [*command, str(tmp_path / "script.py"), *folders], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "<pad>", "</s>", "<mask>", "<unk>", *(f"w{i}" for i in range(48))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {
        "bos": "<s>",
        "cls": "<s>",
        "eos": "</s>",
        "sep": "</s>",
        "pad": "<pad>",
        "mask": "<mask>",
        "unk": "<unk>",
    }
    names = {f"{name}_token": value for name, value in names.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=61, **names)


def test_pipelines():
    from transformers import pipeline

    tokenizer, long = word_tokenizer(), " ".join(["w7"] * 90)
    fill = pipeline("fill-mask", build("LinformerForMaskedLM"), tokenizer=tokenizer)
    assert len(fill("w1 <mask> w3")) == 5
    classify = pipeline("text-classification", build(CLASSES[2], num_labels=3), tokenizer=tokenizer)
    answers = classify(["w1 w2", long], truncation=True, batch_size=2)
    alone = [classify(text, truncation=True)[0] for text in ("w1 w2", long)]
    assert [a["label"] for a in answers] == [b["label"] for b in alone]
    assert max(abs(a["score"] - b["score"]) for a, b in zip(answers, alone, strict=True)) < TOLERANCE["float32"]
    features = pipeline("feature-extraction", build(), tokenizer=tokenizer)("w1 w2 w3")
    assert torch.tensor(features).shape == (1, 5, 30)
    tags = pipeline("token-classification", build(CLASSES[3], num_labels=3), tokenizer=tokenizer)("w1 w2 w3")
    assert len(tags) <= 3


# ---- compile, export, memory


COMPILE_LENGTHS = (61, 7, 32, 5, 20)


class CountingBackend:
    def __init__(self):
        self.frames = 0

    def __call__(self, graph, inputs):
        self.frames += 1
        return graph.forward


@pytest.mark.parametrize(
    ("overrides", "masked"),
    [*itertools.product(KINDS[: len(TYPES)], (True, False)), (WINDOWED[0], True), (WINDOWED[1], False)],
)
def test_compiling_is_eager_and_is_done_at_most_three_times(overrides, masked):
    torch._dynamo.reset()
    model, backend = build(**one_layer(overrides)), CountingBackend()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for batch, length in enumerate(COMPILE_LENGTHS, start=2):
        ids = random_ids(batch, length)
        mask = mask_of("holes", batch, length) if masked else None
        with torch.no_grad():
            # at padding, too
            assert difference(compiled(ids, mask)[0], model(ids, mask)[0]) < TOLERANCE["float32"]
    assert 1 <= backend.frames <= 3
    torch._dynamo.reset()


@pytest.mark.parametrize("sharing", ["none", "headwise", "key_value"])
def test_compiling_each_sharing(sharing):
    torch._dynamo.reset()
    model, backend = build(projection_sharing=sharing, num_hidden_layers=1).train(), CountingBackend()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in COMPILE_LENGTHS:
        ids, mask = random_ids(2, length), mask_of("right", 2, length)
        assert difference(compiled(ids, mask)[0], model(ids, mask)[0]) < TOLERANCE["float32"]
    assert 1 <= backend.frames <= 3
    torch._dynamo.reset()


@pytest.mark.slow
@every_kind
def test_compiling_with_inductor_trains_the_same(overrides):
    torch._dynamo.reset()
    inputs = example("LinformerForMaskedLM", seq_len=61)
    results = []
    for use in (lambda m: m, lambda m: torch.compile(m, fullgraph=True, dynamic=True)):
        model = build("LinformerForMaskedLM", **overrides).train()
        loss = use(model)(**inputs).loss
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert max(difference(a, b) for a, b in zip(*results, strict=True)) < TOLERANCE["float32"]
    torch._dynamo.reset()


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask).logits


@pytest.mark.parametrize("overrides", [*KINDS[: len(TYPES) + 2], NO_SLOTS], ids=variant_name)
def test_an_exported_graph_is_right_at_other_lengths(overrides):
    model = build("LinformerForMaskedLM", **one_layer(overrides))
    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    program = torch.export.export(
        Logits(model),
        (random_ids(3, 29), mask_of("right", 3, 29)),
        dynamic_shapes=(sizes, sizes),
        strict=False,
    ).module()
    for batch, length in ((3, 29), (5, 61), (2, 4), (4, 8)):
        ids, mask = random_ids(batch, length), mask_of("holes", batch, length)
        assert difference(program(ids, mask), model(ids, mask).logits) < TOLERANCE["float32"], length


def test_k_of_a_convolution_is_what_its_stride_gives():
    # k = 40 of n = 61 needs the stride 2, which makes 31 slots
    model = build(projection_type="convolution", projected_length=40, num_hidden_layers=1)
    model.set_attn_implementation("eager")
    (attention,) = model(random_ids(1, 61), output_attentions=True).attentions
    assert attention.shape[-1] == math.ceil(61 / 2)


def test_fresh_models_are_alike_for_the_same_seed_only():
    models = [build(noise=False, seed=seed, projection_sharing="headwise") for seed in (0, 0, 1)]
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(
        first["encoder.layer.0.attention.self.query.weight"], other["encoder.layer.0.attention.self.query.weight"]
    )


def test_a_fresh_masked_lm_guesses_at_random():
    model, ids = LinformerForMaskedLM(tiny_config()), random_ids(8, 61)
    assert abs(model(ids, labels=ids).loss.item() - math.log(53)) < 0.1
    fill_with_noise(model)
    assert model(ids, labels=ids).loss > 1
