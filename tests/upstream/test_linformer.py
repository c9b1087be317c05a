"""Transformers' own model tests for this family. See README.md for how to run them."""

import importlib
import os
import tempfile
import unittest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PKG = importlib.import_module("linformer_hf")

CONFIG = PKG.LinformerConfig
MODEL = PKG.LinformerModel
HEADS = {
    # transformers name table          -> class of the package
    "MODEL_MAPPING_NAMES": MODEL,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": PKG.LinformerForMaskedLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": PKG.LinformerForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": PKG.LinformerForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": PKG.LinformerForQuestionAnswering,
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES": PKG.LinformerForMultipleChoice,
}
PIPELINES = {
    "feature-extraction": MODEL,
    "fill-mask": PKG.LinformerForMaskedLM,
    "text-classification": PKG.LinformerForSequenceClassification,
    "token-classification": PKG.LinformerForTokenClassification,
    "zero-shot": PKG.LinformerForSequenceClassification,
}
PROJECTED_LENGTH = 5  # k, smaller than SEQ_LENGTH so that k != n is exercised
SEQ_LENGTH = 7
TINY_CONFIG = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 64,
    "type_vocab_size": 16,
    "initializer_range": 0.02,
    "projected_length": PROJECTED_LENGTH,
}
# one test class per entry; the name is part of the class name
VARIANTS = {
    "Layerwise": {"projection_sharing": "layerwise"},
    "KeyValue": {"projection_sharing": "key_value"},
    "Headwise": {"projection_sharing": "headwise"},
    "NoSharing": {"projection_sharing": "none"},
    "Random": {"projection_type": "random"},
    "MeanPooling": {"projection_type": "mean_pooling"},
    "MaxPooling": {"projection_type": "max_pooling"},
    "Convolution": {"projection_type": "convolution"},
    # more tokens than two windows hold, so that there are several blocks, whose padded rows an exported graph has too
    "LocalWindow": {"projection_type": "mean_pooling", "local_attention_window": 2, "num_global_tokens": 1},
    "PureLocal": {"projected_length": 0, "local_attention_window": 2, "dual_layer_norm": True},
}
FLAGS = {
    # read by ModelTesterMixin
    "test_torch_exportable": True,
    # without this the check of `_init_weights` is skipped for a config file that has no "# Copyright 2023+" line
    "test_can_init_all_missing_weights_before_2023": True,
    # set to True once `resize_position_embeddings` / `get_position_embeddings` exist (projections must be resized too)
    "test_resize_position_embeddings": False,
}

from make_tiny_models import write_tiny_models

if "TRANSFORMERS_TINY_MODEL_PATH" not in os.environ:  # read once, when tests.test_pipeline_mixin is imported
    _TINY = tempfile.TemporaryDirectory(prefix="tiny_linformer_")
    os.environ["TRANSFORMERS_TINY_MODEL_PATH"] = write_tiny_models(
        _TINY.name,
        sorted(set(PIPELINES.values()), key=lambda c: c.__name__),
        CONFIG,
        TINY_CONFIG,
        TINY_CONFIG["max_position_embeddings"],
    )

import torch

from transformers.models.auto import modeling_auto
from transformers.testing_utils import require_torch, torch_device

# The common tests find out what a head is by looking the class NAME up in these tables. Without the next loop about
# thirty of them fail for the wrong reason (no labels, inputs without the choices axis) and others, such as the problem
# types and the mismatched sizes, pass without testing anything.
for _table, _cls in HEADS.items():
    getattr(modeling_auto, _table)[CONFIG.model_type] = _cls.__name__

from tests.test_configuration_common import ConfigTester
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask
from tests.test_pipeline_mixin import PipelineTesterMixin


class LinformerModelTester:
    base_model_class = MODEL

    def __init__(self, parent, **config_overrides):
        self.parent = parent
        self.config_kwargs = {**TINY_CONFIG, **config_overrides}
        self.batch_size = 13
        self.seq_length = SEQ_LENGTH
        self.key_length = self.config_kwargs["projected_length"]  # last axis of `attentions`, read by the common tests
        if self.config_kwargs.get("projection_type") == "convolution":
            stride = -(-self.config_kwargs["max_position_embeddings"] // PROJECTED_LENGTH)
            self.key_length = -(-SEQ_LENGTH // stride)
        self.key_length += 3 * self.config_kwargs.get("local_attention_window", 0)
        self.key_length += self.config_kwargs.get("num_global_tokens", 0)
        self.is_training = True
        self.num_labels = 3
        self.num_choices = 4
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            setattr(self, name, self.config_kwargs[name])

    def get_config(self):
        return CONFIG(**self.config_kwargs)

    def prepare_config_and_inputs(self):
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = random_attention_mask([self.batch_size, self.seq_length])
        token_type_ids = ids_tensor([self.batch_size, self.seq_length], self.config_kwargs["type_vocab_size"])
        return self.get_config(), input_ids, token_type_ids, mask

    def prepare_config_and_inputs_for_common(self):
        config, input_ids, token_type_ids, mask = self.prepare_config_and_inputs()
        return config, {"input_ids": input_ids, "token_type_ids": token_type_ids, "attention_mask": mask}

    def build(self, cls, config, **kwargs):
        return cls(config, **kwargs).to(torch_device).eval()


class LinformerChecks:
    """What the model file of a family usually checks next to the common tests."""

    all_model_classes = tuple(HEADS.values())
    pipeline_model_mapping = PIPELINES
    additional_model_inputs = ["token_type_ids"]
    variant: dict = {}

    def setUp(self):
        self.model_tester = LinformerModelTester(self, **self.variant)
        self.config_tester = ConfigTester(self, config_class=CONFIG, **{**TINY_CONFIG, **self.variant})

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_retain_grad_hidden_states_attentions(self):
        if self.variant.get("local_attention_window"):
            self.skipTest("as Longformer's, these attentions are put together from blocks, behind the computation")
        super().test_retain_grad_hidden_states_attentions()

    def test_model(self):
        t = self.model_tester
        config, ids, types, mask = t.prepare_config_and_inputs()
        model = t.build(MODEL, config)
        model(ids, attention_mask=mask, token_type_ids=types)
        model(ids, token_type_ids=types)
        out = model(ids)
        self.assertEqual(out.last_hidden_state.shape, (t.batch_size, t.seq_length, t.hidden_size))

    def test_heads(self):
        t = self.model_tester
        n, s = t.batch_size, t.seq_length
        config, ids, types, mask = t.prepare_config_and_inputs()
        config.num_labels = t.num_labels
        seq_labels, tok_labels = ids_tensor([n], t.num_labels), ids_tensor([n, s], t.num_labels)
        out = t.build(PKG.LinformerForMaskedLM, config)(ids, attention_mask=mask, labels=tok_labels)
        self.assertEqual(out.logits.shape, (n, s, t.vocab_size))
        out = t.build(PKG.LinformerForSequenceClassification, config)(ids, attention_mask=mask, labels=seq_labels)
        self.assertEqual(out.logits.shape, (n, t.num_labels))
        out = t.build(PKG.LinformerForTokenClassification, config)(ids, attention_mask=mask, labels=tok_labels)
        self.assertEqual(out.logits.shape, (n, s, t.num_labels))
        out = t.build(PKG.LinformerForQuestionAnswering, config)(
            ids, attention_mask=mask, start_positions=seq_labels, end_positions=seq_labels
        )
        self.assertEqual(out.start_logits.shape, (n, s))
        self.assertEqual(out.end_logits.shape, (n, s))
        choices = ids.unsqueeze(1).expand(-1, t.num_choices, -1).contiguous()
        out = t.build(PKG.LinformerForMultipleChoice, config)(
            choices,
            attention_mask=mask.unsqueeze(1).expand_as(choices).contiguous(),
            labels=ids_tensor([n], t.num_choices),
        )
        self.assertEqual(out.logits.shape, (n, t.num_choices))

    def test_padded_rows_do_not_see_the_padding(self):
        """Right padding with a mask must not change the real positions (padding is masked BEFORE the projection)."""
        t = self.model_tester
        model = t.build(MODEL, t.get_config())
        ids = ids_tensor([1, t.seq_length], t.vocab_size - 1) + 1
        pad = torch.full((1, 4), model.config.pad_token_id or 0, dtype=ids.dtype, device=ids.device)
        mask = torch.cat([torch.ones_like(ids), torch.zeros_like(pad)], dim=1)
        with torch.no_grad():
            a = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
            b = model(torch.cat([ids, pad], dim=1), attention_mask=mask).last_hidden_state[:, : t.seq_length]
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

    def test_auto_classes_round_trip(self):
        from transformers import AutoConfig

        t = self.model_tester
        for table, cls in HEADS.items():
            auto = next(
                a
                for a in vars(modeling_auto).values()
                if isinstance(a, type)
                and getattr(getattr(a, "_model_mapping", None), "_model_mapping", None)
                is getattr(modeling_auto, table)
            )
            with self.subTest(cls.__name__), tempfile.TemporaryDirectory() as tmp:
                model = t.build(cls, t.get_config())
                model.save_pretrained(tmp)
                self.assertIsInstance(AutoConfig.from_pretrained(tmp), CONFIG)
                again = auto.from_pretrained(tmp)
                self.assertIs(type(again), cls)
                for (name, p), (_, q) in zip(model.state_dict().items(), again.state_dict().items()):
                    torch.testing.assert_close(p, q.to(p.device), msg=name)


for _name, _variant in VARIANTS.items():
    _cls_name = f"Linformer{_name}ModelTest"
    globals()[_cls_name] = require_torch(
        type(
            _cls_name,
            (LinformerChecks, ModelTesterMixin, PipelineTesterMixin, unittest.TestCase),
            {**FLAGS, "variant": _variant, "__module__": __name__},
        )
    )
del _name, _variant, _cls_name
