import argparse
import logging
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SHARINGS, TOLERANCE, build, difference, random_ids
from hubserver import card_errors
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from linformer_hf import LinformerForMaskedLM, LinformerForSequenceClassification
from linformer_hf.convert_fairseq import convert_fairseq, main, read_dictionary


FAIRSEQ = Path(__file__).parent / "fairseq"
STORED = ("headwise", "key_value", "layerwise")  # each file is named after what it shares

every_file = pytest.mark.parametrize("name", STORED)


def load(name):
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(FAIRSEQ / f"{name}.pt", weights_only=True)


def settings_of(checkpoint):
    return checkpoint["args"] or checkpoint["cfg"]["model"]


@pytest.fixture
def changed(tmp_path):
    """Saves a stored file with changes to its content, and says where."""

    def save(name, change=lambda checkpoint: None, **settings):
        checkpoint = load(name)
        for option, value in settings.items():
            setattr(settings_of(checkpoint), option, value)
        change(checkpoint)
        path = tmp_path / "changed.pt"
        torch.save(checkpoint, path)
        return path

    return save


@every_file
def test_the_authors_checkpoints_give_the_authors_numbers(name):
    model = convert_fairseq(FAIRSEQ / f"{name}.pt", FAIRSEQ / f"{name}.dict.txt")
    expected = load_file(FAIRSEQ / f"{name}.expected.safetensors")
    assert type(model) is LinformerForMaskedLM
    assert model.config.projection_sharing == name
    for length in (7, 40, 64):
        output = model(expected[f"input_ids_{length}"], output_hidden_states=True)
        for layer, states in enumerate(output.hidden_states):
            assert difference(states, expected[f"hidden_states_{length}.{layer}"]) < TOLERANCE["whole_model"], layer
        assert difference(output.hidden_states[-1], expected[f"last_hidden_state_{length}"]) < TOLERANCE["whole_model"]
        assert difference(output.logits, expected[f"logits_{length}"]) < TOLERANCE["whole_model"]


def test_the_configuration_is_the_checkpoint_s():
    config = convert_fairseq(FAIRSEQ / "headwise.pt").config
    expected = {
        "vocab_size": 65,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": 0.0,
        "max_position_embeddings": 64,
        "projected_length": 16,
        "type_vocab_size": 1,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "norm_first": False,
        "freeze_projections": False,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_what_is_converted_and_what_is_not_is_said(caplog):
    with caplog.at_level(logging.INFO, logger="linformer_hf"):
        convert_fairseq(FAIRSEQ / "layerwise.pt")
    said = caplog.text
    assert "a LinformerForMaskedLM, layerwise" in said
    tensors = load("layerwise")["model"]
    left_out = [name for name in tensors if name.endswith("version") or re.search(r"compress_\w+\.bias", name)]
    copies = [name for name in tensors if re.search(r"compress_k\.weight", name)]
    assert f"{len(tensors) - len(left_out) - len(copies)} tensors" in said
    for line, names in (("second names of the same tensors", copies), ("left out", left_out)):
        (listed,) = re.findall(rf"{line}: (.*)", said)
        assert set(listed.split(", ")) == set(names)


# ---- options


def theirs(model, **settings):
    """A checkpoint as the authors' code would have saved this Linformer; written from their names."""
    config, tensors = model.config, {"encoder.version": torch.empty(0)}
    state = {name.removeprefix("linformer."): value for name, value in model.state_dict().items()}
    encoder = "encoder.sentence_encoder"

    def put(there, here):
        for kind in ("weight", "bias"):
            if f"{here}.{kind}" in state:
                tensors[f"{there}.{kind}"] = state[f"{here}.{kind}"]

    put(f"{encoder}.embed_tokens", "embeddings.word_embeddings")
    positions = state["embeddings.position_embeddings.weight"]
    tensors[f"{encoder}.embed_positions.weight"] = torch.cat([torch.zeros_like(positions[:2]), positions])
    put(f"{encoder}.layernorm_embedding", "embeddings.LayerNorm")
    put(f"{encoder}.layer_norm", "encoder.LayerNorm")
    put(f"{encoder}.compress_layer", "encoder.shared_projection")
    for layer in range(config.num_hidden_layers):
        there, here = f"{encoder}.layers.{layer}", f"encoder.layer.{layer}"
        put(f"{there}.self_attn.q_proj", f"{here}.attention.self.query")
        put(f"{there}.self_attn.k_proj", f"{here}.attention.self.key")
        put(f"{there}.self_attn.v_proj", f"{here}.attention.self.value")
        put(f"{there}.self_attn.out_proj", f"{here}.attention.output.dense")
        put(f"{there}.self_attn_layer_norm", f"{here}.attention.output.LayerNorm")
        put(f"{there}.fc1", f"{here}.intermediate.dense")
        put(f"{there}.fc2", f"{here}.output.dense")
        put(f"{there}.final_layer_norm", f"{here}.output.LayerNorm")
        for kind, role in (("k", "key"), ("v", "value")):
            shared = "encoder.shared_projection"
            own = f"{here}.attention.self.{role}_projection"
            put(f"{there}.self_attn.compress_{kind}", shared if f"{shared}.weight" in state else own)
    put("encoder.lm_head.dense", "lm_head.dense")
    put("encoder.lm_head.layer_norm", "lm_head.layer_norm")
    put("encoder.lm_head", "lm_head.decoder")
    put("classification_heads.topics.dense", "classifier.dense")
    put("classification_heads.topics.out_proj", "classifier.out_proj")
    settings = {
        "encoder_layers": config.num_hidden_layers,
        "encoder_attention_heads": config.num_attention_heads,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_normalize_before": config.norm_first,
        "shared_kv_compressed": int(config.projection_sharing in ("key_value", "layerwise")),
        "shared_layer_kv_compressed": int(config.projection_sharing == "layerwise"),
        "activation_fn": config.hidden_act,
        "no_scale_embedding": True,
        **settings,
    }
    return {"args": argparse.Namespace(**settings), "cfg": None, "model": tensors}


def linformer(head="LinformerForMaskedLM", **overrides):
    model = build(head, type_vocab_size=1, **overrides)
    torch.nn.init.zeros_(model.linformer.embeddings.token_type_embeddings.weight)
    return model


def assert_converts_to(model, checkpoint, tmp_path, **options):
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    converted = convert_fairseq(tmp_path / "checkpoint.pt", **options)
    assert type(converted) is type(model)
    for length in (61, 8):
        ids = random_ids(2, length)
        assert torch.equal(converted(ids).logits, model(ids).logits)
    return converted


@pytest.mark.parametrize("sharing", SHARINGS[1:])
@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        ({}, {}),
        ({"norm_first": True}, {}),
        ({"tie_word_embeddings": False}, {"untie_weights_roberta": True}),
        ({"hidden_act": "relu"}, {}),
        ({"hidden_act": "gelu_new"}, {"activation_fn": "gelu_fast"}),
        ({"hidden_act": "gelu_new"}, {"activation_fn": "gelu_accurate"}),
        ({"projected_length": 30}, {"compressed": 2}),
        ({}, {"freeze_compress": 1}),
        ({"hidden_dropout_prob": 0.3}, {"dropout": 0.3, "attention_dropout": 0.2, "pooler_dropout": 0.4}),
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "default",
)
def test_options(sharing, overrides, settings, tmp_path):
    model = linformer(projection_sharing=sharing, **overrides)
    converted = assert_converts_to(model, theirs(model, **settings), tmp_path)
    assert converted.config.projection_sharing == sharing
    assert converted.config.projected_length == model.config.projected_length
    tied = converted.lm_head.decoder.weight is converted.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    frozen = {name for name, parameter in converted.named_parameters() if not parameter.requires_grad}
    projections = {name for name in converted.state_dict() if "projection" in name}
    assert frozen == (projections if settings.get("freeze_compress") else set())
    if "pooler_dropout" in settings:
        names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
        assert [getattr(converted.config, name) for name in names] == [0.3, 0.2, 0.4]


def test_a_head_that_was_untied_by_mistake_stays_so(tmp_path):
    # an old version of their code lost the tie: the option says tied, the tensors differ
    model = linformer(tie_word_embeddings=False)
    converted = assert_converts_to(model, theirs(model, untie_weights_roberta=False), tmp_path)
    assert converted.config.tie_word_embeddings is False


@pytest.mark.parametrize(("shared_kv", "sharing"), [(1, "key_value"), (0, "headwise")])
def test_layers_that_were_not_shared_by_mistake_stay_so(shared_kv, sharing, tmp_path):
    # and it lost the sharing of layers: each has its own projection, which its forward takes
    model = linformer(projection_sharing=sharing)
    checkpoint = theirs(model, shared_layer_kv_compressed=1, shared_kv_compressed=shared_kv)
    checkpoint["model"]["encoder.sentence_encoder.compress_layer.weight"] = torch.randn(7, 61)
    converted = assert_converts_to(model, checkpoint, tmp_path)
    assert converted.config.projection_sharing == sharing


def test_layers_may_share_keys_and_values_without_the_option(tmp_path):
    model = linformer(projection_sharing="layerwise")
    checkpoint = theirs(model, shared_kv_compressed=0)
    assert "encoder.sentence_encoder.layers.0.self_attn.compress_v.weight" in checkpoint["model"]
    assert assert_converts_to(model, checkpoint, tmp_path).config.projection_sharing == "layerwise"


def test_names_of_older_versions(tmp_path):
    model = linformer(projection_sharing="headwise")
    checkpoint = theirs(model)
    tensors = {}
    for name, value in checkpoint["model"].items():
        name = re.sub("^encoder", "decoder", name).replace("layernorm_embedding", "emb_layer_norm")
        if match := re.fullmatch(r"(.*)\.[qkv]_proj\.(weight|bias)", name):
            name = f"{match[1]}.in_proj_{match[2]}"
            value = torch.cat([tensors[name], value]) if name in tensors else value
        tensors[name] = value
    # q, k, v in this order, as they are stored above
    assert tensors["decoder.sentence_encoder.layers.0.self_attn.in_proj_weight"].shape == (90, 30)
    assert_converts_to(model, {**checkpoint, "model": tensors}, tmp_path)


def test_classification_heads(tmp_path):
    model = linformer("LinformerForSequenceClassification", num_labels=4, projection_sharing="layerwise")
    masked_lm = linformer(projection_sharing="layerwise")
    masked_lm.linformer.load_state_dict(model.linformer.state_dict())
    checkpoint = theirs(model)
    lm = {name: value for name, value in theirs(masked_lm)["model"].items() if ".lm_head." in name}
    other = {f"classification_heads.other.{name}": torch.zeros(9) for name in ("dense.weight", "out_proj.bias")}
    checkpoint["model"] |= lm | other
    converted = assert_converts_to(model, checkpoint, tmp_path, classification_head="topics")
    assert type(converted) is LinformerForSequenceClassification
    assert converted.config.num_labels == 4
    assert_converts_to(masked_lm, checkpoint, tmp_path, classification_head="none")
    for wrong in (None, "topic"):
        with pytest.raises(ValueError, match=rf"is {wrong!r}, but the checkpoint has other, topics: choose one"):
            convert_fairseq(tmp_path / "checkpoint.pt", classification_head=wrong)
    with pytest.raises(ValueError, match="is 'topics', but the checkpoint has no such head: leave it out"):
        convert_fairseq(FAIRSEQ / "headwise.pt", classification_head="topics")


def test_half_precision_is_kept(changed):
    def halve(checkpoint):
        checkpoint["model"] = {name: value.half() for name, value in checkpoint["model"].items()}

    assert {value.dtype for value in convert_fairseq(changed("headwise", halve)).state_dict().values()} == {
        torch.float16
    }


# ---- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"no_scale_embedding": False}, r"`no_scale_embedding` = False, but a Linformer only True"),
        ({"encoder_layers_to_keep": "0,2"}, r"`encoder_layers_to_keep` = '0,2'"),
        ({"activation_fn": "swish"}, r"the activation 'swish', but must have one of .*'gelu'"),
    ],
)
def test_options_without_a_place_are_refused(changed, settings, message):
    with pytest.raises(ValueError, match=message):
        convert_fairseq(changed("headwise", **settings))


def test_an_activation_of_classification_heads_counts_only_there(changed):
    path = changed("headwise", pooler_activation_fn="relu")
    assert type(convert_fairseq(path)) is LinformerForMaskedLM

    def add_head(checkpoint):
        checkpoint["model"]["classification_heads.a.dense.bias"] = torch.zeros(32)

    path = changed("headwise", add_head, pooler_activation_fn="relu")
    with pytest.raises(ValueError, match="`pooler_activation_fn` = 'relu', but a Linformer only 'tanh'"):
        convert_fairseq(path, classification_head="a")


PREFIX = "encoder.sentence_encoder"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({f"{PREFIX}.adapter.weight": torch.ones(2)}), rf"no place for: {PREFIX}.adapter.weight"),
        (lambda m: m.pop(f"{PREFIX}.layers.1.fc1.bias"), "lacks .*encoder.layer.1.intermediate.dense.bias"),
        (lambda m: m.pop(f"{PREFIX}.layers.1.self_attn.compress_k.weight"), "has no .*layer.1.*key_projection"),
        (lambda m: m.pop(f"{PREFIX}.layers.0.self_attn.compress_k.weight"), "has no .*layer.0.*key_projection"),
        (lambda m: m.update({f"{PREFIX}.layers.1.fc1.bias": torch.ones(3)}), r"has the shape \(3,\)"),
        (lambda m: m.update({f"{PREFIX}.embed_positions.weight": torch.ones(40, 32)}), "of 65 words and 38 positions"),
        (lambda m: m.pop(f"{PREFIX}.embed_tokens.weight"), "of 0 words and 64 positions"),
        (lambda m: m.pop(f"{PREFIX}.embed_positions.weight"), "lacks .*position_embeddings"),
        (lambda m: [m.pop(n) for n in [*m] if "compress" in n], "no Linformer, or damaged"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changed, change, message):
    path = changed("headwise", lambda checkpoint: change(checkpoint["model"]))
    with pytest.raises(ValueError, match=message):
        convert_fairseq(path)


class Malicious:
    def __reduce__(self):
        return os.mkdir, (os.environ["MALICIOUS"],)


def test_no_code_of_a_file_is_run(changed, tmp_path, monkeypatch):
    trap = tmp_path / "was run"
    monkeypatch.setenv("MALICIOUS", str(trap))
    path = changed("headwise", lambda checkpoint: checkpoint.update(extra_state=Malicious()))
    with pytest.raises(ValueError, match=r"without running code that it names: \w+\.mkdir\. Only tensors"):
        convert_fairseq(path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Malicious()))
    assert trap.exists()  # it would have worked


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint .*nothing.pt"):
        convert_fairseq(tmp_path / "nothing.pt")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    with pytest.raises(ValueError, match=r"text.pt is no checkpoint of PyTorch"):
        convert_fairseq(tmp_path / "text.pt")
    whole = (FAIRSEQ / "headwise.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut.pt is no checkpoint of PyTorch"):
        convert_fairseq(tmp_path / "cut.pt")
    for content in ([1, 2], {"model": {}}, {"args": argparse.Namespace(), "model": 3}):
        torch.save(content, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=r"other.pt is no checkpoint of fairseq: it must hold"):
            convert_fairseq(tmp_path / "other.pt")


def test_a_checkpoint_that_does_not_say_its_heads_is_refused(changed):
    path = changed("headwise", lambda checkpoint: delattr(checkpoint["args"], "encoder_attention_heads"))
    with pytest.raises(ValueError, match="does not say its encoder_attention_heads"):
        convert_fairseq(path)


# ---- the dictionary


def test_dictionaries(tmp_path):
    symbols = read_dictionary(FAIRSEQ / "headwise.dict.txt")
    assert len(symbols) == 65
    assert symbols[:5] == ["<s>", "<pad>", "</s>", "<unk>", "200"]
    assert symbols[-1] == "<mask>"
    path = tmp_path / "dict.txt"
    path.write_text("a b 3\n\u2028 2\n")
    assert read_dictionary(path)[4:] == ["a b", "\u2028", "<mask>"]
    for text, message in (("a 3\nb\n", "'b' in line 2"), ("a 3\nb 2\na 1\n", "'a' a second time in line 3")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_dictionary(path)
    path.write_text("a 3\n")
    with pytest.raises(ValueError, match=r"has 6 symbols .*, but .* has 65 word embeddings"):
        convert_fairseq(FAIRSEQ / "headwise.pt", path)
    with pytest.raises(ValueError, match="no dictionary"):
        convert_fairseq(FAIRSEQ / "headwise.pt", tmp_path / "none.txt")


# ---- the command


def save_tokenizer(folder, symbols, **special):
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"} | special
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **tokens).save_pretrained(folder)
    return str(folder)


def test_the_command_as_a_user_runs_it(tmp_path):
    dictionary, output = FAIRSEQ / "key_value.dict.txt", tmp_path / "output"
    tokenizer = save_tokenizer(tmp_path / "tokenizer", read_dictionary(dictionary))
    arguments = [FAIRSEQ / "key_value.pt", output, "--dict", dictionary, "--tokenizer", tokenizer]
    result = subprocess.run(
        [sys.executable, "-m", "linformer_hf.convert_fairseq", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "tensors become a LinformerForMaskedLM, key_value" in result.stderr
    model = AutoModelForMaskedLM.from_pretrained(output)
    expected = load_file(FAIRSEQ / "key_value.expected.safetensors")
    assert difference(model(expected["input_ids_40"]).logits, expected["logits_40"]) < TOLERANCE["whole_model"]
    saved = AutoTokenizer.from_pretrained(output)
    assert saved.model_max_length == 64
    assert saved("200 201").input_ids == [4, 5]
    assert (output / "modeling_linformer.py").exists()


def test_the_command_without_a_tokenizer_and_with_a_wrong_one(tmp_path):
    dictionary = str(FAIRSEQ / "headwise.dict.txt")
    source, output = str(FAIRSEQ / "headwise.pt"), tmp_path / "output"
    symbols = read_dictionary(dictionary)
    wrong = {
        "has 66 tokens, but the model only 65": save_tokenizer(tmp_path / "long", [*symbols, "more"]),
        "cls token has the id 1, but the model's has 0": save_tokenizer(
            tmp_path / "order", ["<pad>", "<s>", *symbols[2:]][:65]
        ),
        "mask token has the id 63, but the model's has 64": save_tokenizer(
            tmp_path / "mask", [*symbols[:-2], "<mask>", symbols[-2]]
        ),
    }
    for message, tokenizer in wrong.items():
        with pytest.raises(ValueError, match=message):
            main([source, str(output), "--dict", dictionary, "--tokenizer", tokenizer])
        assert not output.exists()
    main([source, str(output)])
    assert not list(output.glob("tokenizer*"))
    card = ModelCard.load(output / "README.md")
    assert card_errors(card.content) == []
    assert re.search(r"python -m linformer_hf.convert_fairseq \S*headwise.pt ", card.text)
    with pytest.raises(ValueError, match="in use"):
        main([source, str(output)])
