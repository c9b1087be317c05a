import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
)

from linformer_hf import LinformerForMaskedLM, LinformerModel
from linformer_hf.convert_hf import convert_encoder


SIZES = {
    "vocab_size": 50,
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "initializer_range": 0.3,
}
BERT = BertConfig(**SIZES, max_position_embeddings=61)
ROBERTA = RobertaConfig(**SIZES, max_position_embeddings=63, type_vocab_size=1, layer_norm_eps=1e-5)
SOURCES = [
    (BertModel, BERT),
    (BertForMaskedLM, BERT),
    (BertForPreTraining, BERT),
    (RobertaModel, ROBERTA),
    (RobertaForMaskedLM, ROBERTA),
]


def first_output(model, **inputs):
    outputs = model(**inputs)
    return outputs.last_hidden_state if "last_hidden_state" in outputs else outputs[0]


@pytest.mark.parametrize(("source_class", "config"), SOURCES)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_equals_the_source_up_to_k_tokens(source_class, config, padding):
    torch.manual_seed(0)
    source = source_class(config).eval()
    for parameter in source.parameters():  # biases start at zero and would hide a wrong one
        torch.nn.init.normal_(parameter, std=0.3)
    converted = convert_encoder(source, projected_length=23)
    assert converted.config.max_position_embeddings == 61
    input_ids = torch.randint(5, 50, (2, 23))
    mask = torch.ones_like(input_ids)
    if padding != "none":
        mask[1, slice(15, 23) if padding == "right" else slice(0, 8)] = 0
        input_ids = input_ids.masked_fill(mask == 0, config.pad_token_id)
    # BERT counts its positions with the padding, Linformer without
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if config is BERT else {}
    with torch.no_grad():
        expected = first_output(source, input_ids=input_ids, attention_mask=mask, **positions)
        actual = first_output(converted, input_ids=input_ids, attention_mask=mask)
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("source_class", "config"), SOURCES)
def test_the_source_is_copied_and_nothing_but_projections_is_new(source_class, config):
    source = source_class(config).train()
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    converted = convert_encoder(source, projected_length=7, projection_type="linear", projection_sharing="headwise")
    assert converted.training
    assert isinstance(converted, LinformerModel if source_class in (BertModel, RobertaModel) else LinformerForMaskedLM)
    storages = {tensor.data_ptr() for tensor in before.values()} | {t.data_ptr() for t in source.state_dict().values()}
    assert not storages & {tensor.data_ptr() for tensor in converted.state_dict().values()}
    torch.nn.init.zeros_(converted.get_input_embeddings().weight)
    assert all(torch.equal(before[name], tensor) for name, tensor in source.state_dict().items())


def test_dtype_is_kept():
    assert convert_encoder(BertModel(BERT).to(torch.bfloat16), projected_length=7).dtype == torch.bfloat16


def test_survives_saving(tmp_path):
    converted = convert_encoder(RobertaForMaskedLM(ROBERTA).eval(), projected_length=7)
    converted.save_pretrained(tmp_path)
    again = LinformerForMaskedLM.from_pretrained(tmp_path)
    input_ids = torch.randint(5, 50, (2, 40))
    assert torch.equal(converted(input_ids).logits, again(input_ids).logits)


def test_refusals():
    with pytest.raises(ValueError, match="'distilbert', but must be one of 'bert', 'roberta'"):
        convert_encoder(DistilBertModel(DistilBertConfig(vocab_size=50, dim=30, n_heads=3, hidden_dim=40, n_layers=1)))
    with pytest.raises(ValueError, match=r"no place for: classifier\.weight, classifier\.bias"):
        convert_encoder(BertForSequenceClassification(BERT))
    with pytest.raises(ValueError, match="`model` is a 'Linear'"):
        convert_encoder(torch.nn.Linear(3, 3))
    untied = BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=61, tie_word_embeddings=False))
    with pytest.raises(ValueError, match=r"word_embeddings\.weight would be lost"):
        convert_encoder(untied, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="is a decoder"):
        convert_encoder(BertModel(BertConfig(**SIZES, is_decoder=True)))
    with pytest.raises(ValueError, match=r"\(50, 30\) in the source, but in the target \(60, 30\)"):
        convert_encoder(BertModel(BERT), vocab_size=60, projected_length=7)
    with pytest.raises(StrictDataclassError, match="`projected_length` is 62"):
        convert_encoder(BertModel(BERT), projected_length=62)
