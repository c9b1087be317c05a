import copy
import dataclasses
import json

import pytest
import torch
from conftest import HEADS, LEARNED, SHARINGS, TYPES, tiny_config
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

import linformer_hf
from linformer_hf import LinformerConfig


DEFAULTS = {
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "classifier_dropout": None,
    "tie_word_embeddings": True,
    "projected_length": 256,
    "projection_type": "linear",
    "projection_sharing": "layerwise",
    "projection_initializer": "mean_pooling",
    "freeze_projections": False,
    "projection_seed": 0,
    "local_attention_window": 0,
    "num_global_tokens": 0,
    "dual_layer_norm": False,
    "norm_first": False,
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_default(name):
    assert getattr(LinformerConfig(), name) == DEFAULTS[name]


# What is refused, and the words that its message must have: the field, the value, and what is allowed.
REFUSED = [
    ({"projected_length": 62}, ["projected_length", "62", "61"]),
    ({"projected_length": 0}, ["projected_length", "0", "1", "local_attention_window"]),
    ({"projected_length": -3}, ["projected_length", "-3", "1"]),
    ({"projected_length": [7, 62], "projection_sharing": "headwise"}, ["projected_length", "62", "61"]),
    ({"projected_length": [0, 7], "projection_sharing": "headwise"}, ["projected_length", "0", "1"]),
    (
        {"projected_length": [7], "projection_sharing": "headwise"},
        ["projected_length", "[7]", "num_hidden_layers", "2"],
    ),
    ({"projected_length": [], "projection_sharing": "headwise"}, ["projected_length", "[]", "2"]),
    ({"projected_length": [7, 7, 7]}, ["projected_length", "[7, 7, 7]", "2"]),
    ({"projected_length": [7, 5]}, ["projected_length", "[7, 5]", "layerwise"]),
    ({"projected_length": "7"}, ["projected_length", "7", "int"]),
    ({"projected_length": 7.0}, ["projected_length", "7.0", "int"]),
    ({"projected_length": True}, ["projected_length", "True", "int"]),
    ({"projected_length": [7, 5.0], "projection_sharing": "headwise"}, ["projected_length", "5.0", "int"]),
    (
        {"projected_length": [0, 7], "local_attention_window": [0, 5], "projection_sharing": "headwise"},
        ["projected_length", "[0, 7]", "1", "local_attention_window"],
    ),
    ({"projected_length": -1, "local_attention_window": 5}, ["projected_length", "-1", "0"]),
    ({"projected_length": 62, "local_attention_window": 5}, ["projected_length", "62", "61"]),
    ({"local_attention_window": -1}, ["local_attention_window", "-1", "0"]),
    ({"local_attention_window": [5, -2]}, ["local_attention_window", "[5, -2]", "0"]),
    ({"local_attention_window": [5]}, ["local_attention_window", "[5]", "num_hidden_layers", "2"]),
    ({"local_attention_window": []}, ["local_attention_window", "[]", "num_hidden_layers", "2"]),
    ({"local_attention_window": [5, 5, 5]}, ["local_attention_window", "[5, 5, 5]", "num_hidden_layers", "2"]),
    ({"local_attention_window": 5.0}, ["local_attention_window", "5.0", "int"]),
    ({"local_attention_window": True}, ["local_attention_window", "True", "int"]),
    ({"local_attention_window": [5, "5"]}, ["local_attention_window", "5", "int"]),
    ({"num_global_tokens": 2}, ["num_global_tokens", "2", "local_attention_window", "0"]),
    (
        {"num_global_tokens": 2, "local_attention_window": [0, 0]},
        ["num_global_tokens", "2", "local_attention_window", "[0, 0]"],
    ),
    ({"num_global_tokens": -1, "local_attention_window": 5}, ["num_global_tokens", "-1", "0"]),
    ({"num_global_tokens": 62, "local_attention_window": 5}, ["num_global_tokens", "62", "61"]),
    ({"num_global_tokens": 1.0, "local_attention_window": 5}, ["num_global_tokens", "1.0", "int"]),
    ({"dual_layer_norm": True}, ["dual_layer_norm", "True", "local_attention_window", "0"]),
    ({"dual_layer_norm": 1, "local_attention_window": 5}, ["dual_layer_norm", "1", "bool"]),
    ({"hidden_size": 31}, ["hidden_size", "31", "num_attention_heads", "3"]),
    ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
    ({"layer_norm_eps": -1.0}, ["layer_norm_eps", "-1.0"]),
    ({"projection_seed": 2**40}, ["projection_seed", str(2**40)]),
    ({"hidden_act": "sine"}, ["hidden_act", "sine", "gelu"]),
    ({"hidden_dropout_prob": 1.5}, ["hidden_dropout_prob", "1.5", "from 0 to 1"]),
    ({"pad_token_id": 10_000}, ["pad_token_id", "10000", "vocab_size"]),
    ({"projection_type": "fourier"}, ["projection_type", "fourier", *TYPES]),
    ({"projection_sharing": "all"}, ["projection_sharing", "all", *SHARINGS]),
    ({"projection_initializer": "zeros"}, ["projection_initializer", "zeros", "mean_pooling", "normal"]),
    ({"is_decoder": True}, ["is_decoder", "True"]),
    ({"add_cross_attention": True}, ["add_cross_attention", "True"]),
    ({"hidden_size": "30"}, ["hidden_size", "30", "int"]),
    ({"norm_first": 1}, ["norm_first", "1", "bool"]),
    ({"freeze_projections": "yes"}, ["freeze_projections", "yes", "bool"]),
    ({"projection_seed": 0.5}, ["projection_seed", "0.5", "int"]),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_wrong_value_is_refused_and_named(overrides, words):
    with pytest.raises(StrictDataclassError) as error:
        tiny_config(**overrides)
    message = str(error.value)
    assert not [word for word in words if word not in message], message


@pytest.mark.parametrize("field", ["is_decoder", "add_cross_attention"])
def test_causal_use_is_refused_with_the_reason(field):
    with pytest.raises(StrictDataclassError, match=r"(?i)position|bidirectional"):
        tiny_config(**{field: True})
    tiny_config(**{field: False})


ACCEPTED = [
    {"projected_length": 61},
    {"projected_length": 1},
    {"projected_length": [7, 7]},
    {"projected_length": [7, 61], "projection_sharing": "headwise"},
    {"projected_length": [1, 60], "projection_sharing": "none", "projection_type": "convolution"},
    {"projection_initializer": "normal"},
    {"max_position_embeddings": 1, "projected_length": 1},
    {"local_attention_window": 1},
    {"local_attention_window": 1000, "num_global_tokens": 61},
    {"local_attention_window": [0, 5], "num_global_tokens": 1, "dual_layer_norm": True},
    {"local_attention_window": 5, "projected_length": 0},
    {"local_attention_window": [5, 0], "projected_length": [0, 7], "projection_sharing": "key_value"},
]


@pytest.mark.parametrize("overrides", ACCEPTED, ids=str)
def test_accepted_value_survives_saving(overrides, tmp_path):
    config = tiny_config(**overrides, tie_word_embeddings=False, num_labels=5, problem_type="regression")
    config.save_pretrained(tmp_path)
    for loaded in (
        LinformerConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        LinformerConfig.from_dict(config.to_dict()),
        copy.deepcopy(config),
    ):
        assert type(loaded) is LinformerConfig
        assert {**loaded.to_dict(), "_name_or_path": "", "auto_map": None} == {
            **config.to_dict(),
            "_name_or_path": "",
            "auto_map": None,
        }
        assert loaded.num_labels == 5
        assert loaded.tie_word_embeddings is False


def test_config_json_holds_every_field_of_ours(tmp_path):
    LinformerConfig().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    # classifier_dropout is None; it may be left out
    assert not [name for name in DEFAULTS if name not in saved and DEFAULTS[name] is not None]
    assert saved["model_type"] == "linformer"


def test_choices_are_checked_at_assignment_too():
    config = tiny_config()
    with pytest.raises(StrictDataclassError, match="fourier"):
        config.projection_type = "fourier"
    assert config.projection_type == "linear"


def test_a_rule_broken_after_construction_is_found_when_saving(tmp_path):
    config = tiny_config()
    config.projected_length = 62
    with pytest.raises(StrictDataclassError, match="62"):
        config.save_pretrained(tmp_path)


def test_no_field_has_the_name_of_a_generation_parameter():
    # a field named max_length would silently get generation's default of 20
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = {field.name for field in dataclasses.fields(LinformerConfig)} - inherited
    shared_by_purpose = {"pad_token_id", "bos_token_id", "eos_token_id", "use_cache"}
    assert own & set(vars(GenerationConfig())) <= shared_by_purpose
    assert "projected_length" in own


def test_attentions_are_not_gathered_in_evaluation():
    assert "attentions" in LinformerConfig.keys_to_ignore_at_inference


def test_canonical_names_are_fields():
    # device maps, parallel plans, PEFT and quantizers look these up
    names = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}
    assert names <= {field.name for field in dataclasses.fields(LinformerConfig)}


@pytest.mark.parametrize("sharing", SHARINGS)
def test_plans_name_modules_that_exist(sharing):
    with torch.device("meta"):
        model = linformer_hf.LinformerForMaskedLM(tiny_config(projection_sharing=sharing))
    names = [name.replace(".0.", ".*.").replace(".1.", ".*.") for name, _ in model.linformer.named_modules()]
    assert LinformerConfig.base_model_tp_plan
    assert not [pattern for pattern in LinformerConfig.base_model_tp_plan if pattern not in names]
    classes = {type(module).__name__ for module in model.modules()}
    assert model._no_split_modules
    assert set(model._no_split_modules) <= classes
    for pattern in getattr(LinformerConfig, "base_model_pp_plan", None) or {}:
        assert pattern in names or pattern in ("embeddings", "encoder.layer")


def test_the_numbers_of_each_layer():
    config = tiny_config(local_attention_window=[0, 5], projected_length=[7, 0], projection_sharing="headwise")
    assert (config.local_attention_windows, config.projected_lengths) == ([0, 5], [7, 0])
    config = tiny_config(local_attention_window=5)
    assert (config.local_attention_windows, config.projected_lengths) == ([5, 5], [7, 7])


def test_norms_over_all_heads_are_not_cut_in_parts():
    # a tensor-parallel plan gives each process some heads
    assert tiny_config(dual_layer_norm=True, local_attention_window=5).base_model_tp_plan is None
    assert tiny_config(local_attention_window=5).base_model_tp_plan


@pytest.mark.parametrize("auto", ["AutoConfig", *HEADS])
def test_auto_class_knows_the_family(auto):
    import transformers

    if auto == "AutoConfig":
        assert type(AutoConfig.for_model("linformer", projected_length=3)) is LinformerConfig
    else:
        model = getattr(transformers, auto).from_config(tiny_config())
        assert type(model) is getattr(linformer_hf, HEADS[auto])


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_freezing_reaches_every_projection_and_nothing_else(kind, sharing):
    model = linformer_hf.LinformerForMaskedLM(
        tiny_config(projection_type=kind, projection_sharing=sharing, freeze_projections=True)
    )
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "projection" in name}
    assert frozen


def test_unknown_keys_of_a_newer_version_are_kept():
    config = LinformerConfig.from_dict({**tiny_config().to_dict(), "key_of_a_later_version": 3})
    assert config.key_of_a_later_version == 3


def test_the_docstring_names_every_field():
    missing = [name for name in DEFAULTS if name not in LinformerConfig.__doc__]
    # the base class explains its own
    ours = ("projec", "freeze", "norm_first", "max_position", "local_", "num_global", "dual_")
    assert not [name for name in missing if name.startswith(ours)]
