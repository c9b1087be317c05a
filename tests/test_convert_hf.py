import json
import logging
import random

import pytest
import torch
import transformers
from conftest import TOLERANCE, difference
from hubserver import card_errors
from huggingface_hub import ModelCard
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, BertConfig

import linformer_hf
from linformer_hf.convert_hf import FAMILIES, Head, convert_encoder, load_source, main


SIZES = {
    "vocab_size": 50,
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 61,
    "hidden_act": "gelu",
    "id2label": {0: "red", 1: "green", 2: "blue", 3: "grey", 4: "none"},
    "label2id": {"red": 0, "green": 1, "blue": 2, "grey": 3, "none": 4},
}
OWN_SIZES = {
    "roberta": {"max_position_embeddings": 63, "type_vocab_size": 1},
    "xlm-roberta": {"max_position_embeddings": 63, "type_vocab_size": 1},
    "camembert": {"max_position_embeddings": 65, "pad_token_id": 3},  # the offset is the padding token's id + 1
    "distilbert": {"hidden_dim": 40, "activation": "gelu"},
    "electra": {"embedding_size": 30},
}
CONVERTIBLE = [
    (model_type, rest)
    for model_type, family in FAMILIES.items()
    for rest, head in family.heads.items()
    if isinstance(head, Head)
]
REFUSED = [
    (model_type, rest)
    for model_type, family in FAMILIES.items()
    for rest, head in family.heads.items()
    if isinstance(head, str)
]


def source_config(model_type, **overrides):
    options = {**SIZES, **OWN_SIZES.get(model_type, {}), **overrides}
    if model_type == "distilbert":
        options = {name: value for name, value in options.items() if name not in ("intermediate_size", "hidden_act")}
    return AutoConfig.for_model(model_type, **options)


def source_model(model_type, rest, **overrides):
    if rest == "ForQuestionAnswering":
        overrides = {"id2label": {0: "start", 1: "end"}, "label2id": {"start": 0, "end": 1}, **overrides}
    config = source_config(model_type, **overrides)
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[model_type].stem + rest)(config).eval()
    for parameter in model.parameters():  # biases start at zero and would hide a wrong one
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def outputs_of(model, **inputs):
    with torch.no_grad():
        outputs = model(**inputs)
    names = ("last_hidden_state", "prediction_logits", "logits", "start_logits", "end_logits")
    return [outputs[name] for name in names if name in outputs]


def padded_batch(lengths, width, side, pad_token_id, type_vocab_size):
    """Rows of so many random tokens, and the same as one batch."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in lengths:
        row = {"input_ids": torch.randint(5, 50, (1, length), generator=generator)}
        if type_vocab_size > 1:
            row["token_type_ids"] = torch.randint(0, type_vocab_size, (1, length), generator=generator)
        rows.append({**row, "attention_mask": torch.ones(1, length, dtype=torch.long)})

    def pad(name, tensor):
        gap = width - tensor.shape[1]
        value = pad_token_id if name == "input_ids" else 0
        return torch.nn.functional.pad(tensor, (0, gap) if side == "right" else (gap, 0), value=value)

    return rows, {name: torch.cat([pad(name, row[name]) for row in rows]) for name in rows[0]}


def assert_equal_outputs(source, converted, lengths, width):
    """The source sees each row alone; the Linformer sees them as a batch, padded on either side."""
    type_vocab_size = getattr(source.config, "type_vocab_size", 2)  # DistilBERT ignores the token types that it gets
    choices = type(source).__name__.endswith("MultipleChoice")
    for side in ("right", "left"):
        rows, batch = padded_batch(lengths, width, side, source.config.pad_token_id, type_vocab_size)
        if choices:
            rows = [{name: tensor[:, None] for name, tensor in row.items()} for row in rows]
        mask = batch["attention_mask"].bool()
        actual = outputs_of(converted, **({n: t[None] for n, t in batch.items()} if choices else batch))
        if choices:
            actual = [actual[0].T]
        expected = [outputs_of(source, **row) for row in rows]
        assert actual
        assert len(actual) == len(expected[0]) or type(source).__name__.endswith("PreTraining")
        for index, tensor in enumerate(actual):
            for row, one in enumerate(expected):
                of_tokens = tensor.shape[:2] == mask.shape
                of_row = tensor[row][mask[row]] if of_tokens else tensor[row]
                assert difference(of_row, one[index][0]) <= TOLERANCE["whole_model"], (side, row)


@pytest.mark.parametrize(("model_type", "rest"), CONVERTIBLE)
def test_equals_the_source(model_type, rest):
    source = source_model(model_type, rest)
    expected_class = FAMILIES[model_type].heads[rest].target
    # ELECTRA's discriminator loses its head
    expected = source.base_model if expected_class is linformer_hf.LinformerModel else source
    windowed = convert_encoder(source, local_attention_window=8, projected_length=5)
    pooled = convert_encoder(source, local_attention_window=0, projected_length=23)
    for converted in (windowed, pooled):
        assert type(converted) is expected_class
        assert converted.config.max_position_embeddings == 61
    assert_equal_outputs(expected, windowed, (16, 11, 1), 16)
    assert_equal_outputs(expected, pooled, (23, 11, 1), 23)
    whole = convert_encoder(source)  # 64 tokens on both sides: all that there is
    assert_equal_outputs(expected, whole, (61, 40), 61)


@pytest.mark.parametrize(("model_type", "rest"), REFUSED)
def test_heads_that_compute_something_else_are_refused(model_type, rest):
    with pytest.raises(ValueError, match=rf"{rest}; its head has (ReLU|gelu) where .* `model\.base_model`"):
        convert_encoder(source_model(model_type, rest))
    convert_encoder(source_model(model_type, rest).base_model)


def test_every_family_has_the_heads_of_the_field():
    heads = set(linformer_hf.__all__) - {"LinformerConfig", "LinformerPreTrainedModel", "LinformerModel"}
    for family in FAMILIES.values():
        assert {"Model"} | {name.removeprefix("Linformer") for name in heads} <= set(family.heads)


def test_beyond_the_window_it_is_an_approximation():
    source = source_model("bert", "Model")
    input_ids = torch.randint(5, 50, (1, 60))
    (expected,) = outputs_of(source, input_ids=input_ids)
    (actual,) = outputs_of(convert_encoder(source, local_attention_window=8, projected_length=5), input_ids=input_ids)
    assert TOLERANCE["whole_model"] < difference(actual, expected)


DEFAULTS = {"projected_length": 64, "local_attention_window": 64, "num_global_tokens": 1}


@pytest.mark.parametrize(
    ("longest", "options", "expected"),
    [
        (300, {}, DEFAULTS),
        (300, {"num_global_tokens": 0}, {**DEFAULTS, "num_global_tokens": 0}),
        (300, {"local_attention_window": [0, 32]}, {**DEFAULTS, "local_attention_window": [0, 32]}),
        (300, {"projection_type": "linear"}, {**DEFAULTS, "projection_type": "linear"}),
        (40, {}, {"projected_length": 40, "local_attention_window": 40, "num_global_tokens": 1}),
        (300, {"local_attention_window": 0}, {"projected_length": 256, "num_global_tokens": 0}),
        (300, {"local_attention_window": [0, 0]}, {"projected_length": 256, "num_global_tokens": 0}),
        (40, {"local_attention_window": 0}, {"projected_length": 40, "num_global_tokens": 0}),
        (40, {"max_position_embeddings": 300}, {**DEFAULTS, "max_position_embeddings": 300}),
    ],
)
def test_defaults(longest, options, expected):
    config = convert_encoder(source_model("bert", "Model", max_position_embeddings=longest), **options).config
    expected = {"max_position_embeddings": longest, "projection_type": "mean_pooling", **expected}
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_source_is_copied_and_not_changed(model_type):
    source = source_model(model_type, "ForMaskedLM").train()
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    converted = convert_encoder(source, max_position_embeddings=100)
    assert converted.training
    storages = {tensor.data_ptr() for tensor in source.state_dict().values()}
    assert not storages & {tensor.data_ptr() for tensor in converted.state_dict().values()}
    for parameter in converted.parameters():
        torch.nn.init.zeros_(parameter)
    assert all(torch.equal(before[name], tensor) for name, tensor in source.state_dict().items())
    assert source.config.max_position_embeddings in (61, 63, 65)


def test_what_is_new_and_what_is_left_out_is_said(caplog):
    caplog.set_level(logging.INFO, "linformer_hf.convert_hf")
    convert_encoder(source_model("bert", "Model"))
    assert "left out: pooler.dense.weight, pooler.dense.bias" in caplog.messages
    assert "new: none" in caplog.messages
    caplog.clear()
    options = {"projection_type": "linear", "projection_sharing": "headwise", "dual_layer_norm": True}
    converted = convert_encoder(source_model("roberta", "ForMaskedLM"), **options)
    (new,) = (message.removeprefix("new: ").split(", ") for message in caplog.messages if message.startswith("new: "))
    owned = "attention.self.{}".format
    parts = [owned(f"{role}_projection.weight") for role in ("key", "value")]
    parts += [owned(f"{kind}_norm.{name}") for kind in ("local", "projected") for name in ("bias", "weight")]
    assert sorted(new) == sorted(f"linformer.encoder.layer.{layer}.{part}" for layer in (0, 1) for part in parts)
    assert set(new) < set(converted.state_dict())
    assert "left out: lm_head.bias" in caplog.messages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_kept_exactly(dtype):
    source = source_model("distilbert", "ForMaskedLM").to(dtype)
    converted = convert_encoder(source, projection_type="linear")
    assert {tensor.dtype for tensor in converted.state_dict().values()} == {dtype}
    assert torch.equal(converted.lm_head.dense.weight, source.vocab_transform.weight)


def test_labels_and_problem_type_are_kept():
    source = source_model("bert", "ForSequenceClassification", problem_type="multi_label_classification")
    converted = convert_encoder(source)
    for name in ("num_labels", "id2label", "label2id", "problem_type"):
        assert getattr(converted.config, name) == getattr(source.config, name)
    inputs = {"input_ids": torch.randint(5, 50, (2, 9)), "labels": torch.rand(2, 5)}
    assert difference(converted(**inputs).loss, source(**inputs).loss) <= TOLERANCE["whole_model"]


def test_configuration_is_kept():
    source = source_model("distilbert", "Model", dropout=0.3, attention_dropout=0.2, initializer_range=0.07)
    config = convert_encoder(source).config
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.3, 0.2)
    assert convert_encoder(source, hidden_dropout_prob=0.0).config.hidden_dropout_prob == 0.0
    assert (config.initializer_range, config.layer_norm_eps, config.type_vocab_size) == (0.07, 1e-12, 2)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, None, None)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_words(model_type, tied, tmp_path):
    source = source_model(model_type, "ForMaskedLM", tie_word_embeddings=tied)
    converted = convert_encoder(source)
    assert (converted.lm_head.decoder.weight is converted.get_input_embeddings().weight) == tied
    converted.save_pretrained(tmp_path)
    again = linformer_hf.LinformerForMaskedLM.from_pretrained(tmp_path)
    assert (again.lm_head.decoder.weight is again.get_input_embeddings().weight) == tied
    assert_equal_outputs(source, again, (40, 1), 40)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_longer_positions_repeat(model_type):
    source = source_model(model_type, "Model")
    longer = convert_encoder(source, max_position_embeddings=150, local_attention_window=32)
    table = source.embeddings.position_embeddings.weight
    offset = source.config.pad_token_id + 1 if FAMILIES[model_type].position_offset else 0
    for position in (0, 60, 61, 121, 122, 149):
        expected = table[offset + position % 61]
        assert torch.equal(longer.embeddings.position_embeddings.weight[position], expected)
    assert_equal_outputs(source, longer, (61, 40), 64)
    (hidden_states,) = outputs_of(longer, input_ids=torch.randint(5, 50, (1, 150)))
    assert hidden_states.isfinite().all()


class BertWithMore(transformers.BertForMaskedLM):
    def __init__(self, config):
        super().__init__(config)
        self.extra = torch.nn.Linear(3, 3)


def test_refusals_of_sources():
    with pytest.raises(ValueError, match=r"no place for: extra\.weight, extra\.bias"):
        convert_encoder(BertWithMore(source_config("bert")))
    with pytest.raises(ValueError, match=r"is a BertLMHeadModel; those of BertModel, .* can be converted"):
        convert_encoder(transformers.BertLMHeadModel(source_config("bert")))
    with pytest.raises(ValueError, match="`model` is a 'Linear'"):
        convert_encoder(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="is a decoder"):
        convert_encoder(source_model("bert", "Model", is_decoder=True))
    with pytest.raises(ValueError, match="has 'relative_key' positions"):
        convert_encoder(source_model("bert", "Model", position_embedding_type="relative_key"))
    with pytest.raises(ValueError, match=r"`embedding_size` of 12 and a `hidden_size` of 30.* behind their LayerNorm"):
        convert_encoder(source_model("electra", "Model", embedding_size=12))
    for model_type in ("roberta", "electra"):
        with pytest.raises(ValueError, match=r"ForMaskedLM, whose head has gelu .* would have 'relu'"):
            convert_encoder(source_model(model_type, "ForMaskedLM", hidden_act="relu"))


def test_other_activations():
    sources = [
        source_model("bert", "ForMaskedLM", hidden_act="relu"),
        source_model("electra", "Model", hidden_act="silu"),
    ]
    for source in [*sources, source_model("distilbert", "ForMaskedLM", activation="relu")]:
        assert_equal_outputs(source, convert_encoder(source), (40, 7), 40)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deberta-v2", "relative positions"),
        ("mpnet", "relative positions"),
        ("modernbert", "rotary positions"),
        ("albert", "behind their LayerNorm"),
        ("longformer", "its layers are not known to be BERT's"),
    ],
)
def test_other_families_are_refused_with_the_reason(model_type, reason, tmp_path):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"is a '{model_type}'; .*{reason}.*One of bert, "):
        load_source(str(tmp_path))  # before any weight is read


def test_refusals_of_options():
    source = source_model("bert", "Model")
    with pytest.raises(ValueError, match=r"dtype, wnidow cannot be chosen here"):
        convert_encoder(source, wnidow=3, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"\(50, 30\) in the source, but in the target \(60, 30\)"):
        convert_encoder(source, vocab_size=60)
    with pytest.raises(ValueError, match=r"lacks tensors that a Linformer needs: encoder\.LayerNorm\.bias"):
        convert_encoder(source, norm_first=True)
    with pytest.raises(StrictDataclassError, match="`projected_length` is 62"):
        convert_encoder(source, projected_length=62)
    untied = source_model("bert", "ForMaskedLM", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"word_embeddings\.weight would be lost.* `tie_word_embeddings=False`"):
        convert_encoder(untied, tie_word_embeddings=True)


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *(chr(ord("a") + index % 26) * (1 + index // 26) for index in range(45)),
]


def save_source(folder, model_type="bert", rest="ForSequenceClassification", **overrides):
    source = source_model(model_type, rest, **overrides)
    source.save_pretrained(folder)
    vocab = {word: index for index, word in enumerate(WORDS)}
    tokenizers = {"bert": transformers.BertTokenizer, "distilbert": transformers.DistilBertTokenizer}
    tokenizer = tokenizers.get(model_type, transformers.ElectraTokenizer)(vocab=vocab, model_max_length=61)
    tokenizer.save_pretrained(folder)
    return source


@pytest.mark.parametrize(
    ("model_type", "rest"),
    [("bert", "ForSequenceClassification"), ("distilbert", "ForMaskedLM"), ("electra", "ForQuestionAnswering")],
)
def test_command_line(model_type, rest, tmp_path, caplog):
    source = save_source(tmp_path / "source", model_type, rest)
    options = "--max_position_embeddings 100 --projected_length 5 --local_attention_window 16"
    main([str(tmp_path / "source"), str(tmp_path / "new"), *options.split()])
    assert "new: none" in caplog.messages
    assert not list(tmp_path.glob(".tmp*"))

    auto_class = getattr(transformers, "AutoModel" + rest)
    converted = auto_class.from_pretrained(tmp_path / "new")
    assert type(converted).__name__ == "Linformer" + rest
    assert converted.config.id2label == source.config.id2label
    fields = ("max_position_embeddings", "projected_length", "local_attention_window", "num_global_tokens")
    assert [getattr(converted.config, name) for name in fields] == [100, 5, 16, 1]
    assert_equal_outputs(source, converted, (32, 7), 32)

    theirs, ours = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("source", "new"))
    assert (theirs.model_max_length, ours.model_max_length) == (61, 100)
    assert ours("a b zz c", "d")["input_ids"] == theirs("a b zz c", "d")["input_ids"]
    assert len(ours(" ".join("abc" * 50), truncation=True)["input_ids"]) == 100
    code = {path.name for path in (tmp_path / "new").glob("*.py")}
    assert code == {f"{name}_linformer.py" for name in ("configuration", "modeling", "projections")}


def test_command_line_heals_and_reports(tmp_path, caplog):
    source = save_source(tmp_path / "source", rest="ForMaskedLM")
    (tmp_path / "text.txt").write_text(" ".join(random.Random(0).choices(WORDS[5:], k=600)))
    options = f"--projected_length 5 --local_attention_window 0 --calibration_file {tmp_path / 'text.txt'}"
    main([str(tmp_path / "source"), str(tmp_path / "new"), *options.split(), "--calibration_steps", "2"])
    (report,) = (message for message in caplog.messages if message.split()[:2] == ["before", "after"])
    assert "source_top1" in report
    assert "relative error of layer 1" in report
    card = ModelCard.load(tmp_path / "new" / "README.md")
    assert card_errors(card.content) == []
    measured = {result.metric_name: result.metric_value for result in card.data.eval_results}
    for line in report.splitlines()[1:]:
        name, _, after = line.rsplit(maxsplit=2)
        assert f"{measured[name.strip()]:.4f}" == after
    healed = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "new").state_dict()
    converted = convert_encoder(source, projected_length=5, local_attention_window=0).state_dict()
    assert any(not torch.equal(healed[name], tensor) for name, tensor in converted.items())


def test_command_line_loads_what_the_configuration_names(tmp_path):
    save_source(tmp_path / "labelled")
    save_source(tmp_path / "discriminator", "electra", "ForPreTraining")
    save_source(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSomethingElse"]}))
    names = [type(load_source(str(tmp_path / name))).__name__ for name in ("labelled", "discriminator", "other")]
    assert names == ["BertForSequenceClassification", "ElectraForPreTraining", "BertModel"]
    assert type(load_source(str(tmp_path / "labelled"), task="feature-extraction")).__name__ == "BertModel"
    assert load_source(str(tmp_path / "labelled"), dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"has no cls\.predictions.* choose another --task \(feature-extraction"):
        load_source(str(tmp_path / "labelled"), task="fill-mask")


def test_command_line_takes_one_value_or_one_for_each_layer(tmp_path):
    save_source(tmp_path / "source")
    options = "--task feature-extraction --projection_type linear --projection_sharing key_value --num_global_tokens 2"
    lists = "--projected_length 0 7 --local_attention_window 16 8"
    main([str(tmp_path / "source"), str(tmp_path / "new"), *options.split(), *lists.split()])
    converted = AutoModel.from_pretrained(tmp_path / "new")
    assert type(converted) is linformer_hf.LinformerModel
    assert (converted.config.projected_length, converted.config.local_attention_window) == ([0, 7], [16, 8])
    assert converted.encoder.layer[1].attention.self.key_projection.weight.shape == (7, 61)


def test_an_output_is_replaced_if_asked_for(tmp_path):
    source, output = tmp_path / "source", tmp_path / "new"
    model = save_source(source)
    output.mkdir()
    main([str(source), str(output)])  # an empty folder is no obstacle
    (output / "model.safetensors").write_text("old")
    main([str(source), str(output), "--overwrite_output_dir"])
    assert_equal_outputs(model, AutoModelForSequenceClassification.from_pretrained(output), (40, 7), 40)
    with pytest.raises(ValueError, match="is 60, but the source has 61 positions"):
        main([str(source), str(tmp_path / "none"), "--max_position_embeddings", "60"])
    assert not (tmp_path / "none").exists()


def test_foreign_tensors_in_a_checkpoint_are_refused(tmp_path):
    source = save_source(tmp_path)
    adapter = {"bert.encoder.layer.0.attention.self.distance_embedding.weight": torch.zeros(3, 3)}
    source.save_pretrained(tmp_path, state_dict={**source.state_dict(), **adapter})
    with pytest.raises(ValueError, match=r"has bert\.encoder\.layer\.0\.attention\.self\.distance_embedding\.weight"):
        load_source(str(tmp_path))


def test_a_real_name_of_a_class_is_not_enough():
    class BertModel(transformers.BertForNextSentencePrediction):
        pass

    with pytest.raises(ValueError, match=r"no place for: cls\.seq_relationship"):
        convert_encoder(BertModel(BertConfig(**SIZES)))
