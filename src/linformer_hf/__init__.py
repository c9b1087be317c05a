"""Linformer (https://arxiv.org/abs/2006.04768) as a Hugging Face Transformers model family.

Importing the package registers the family: `AutoModel.from_pretrained` and its kin then know `"linformer"`.
"""

import transformers

from .configuration_linformer import AUTO_MAP, LinformerConfig
from .modeling_linformer import (
    LinformerForMaskedLM,
    LinformerForMultipleChoice,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
    LinformerPreTrainedModel,
)


__version__ = "0.1.0"

transformers.AutoConfig.register("linformer", LinformerConfig, exist_ok=True)
for _auto_class, _reference in AUTO_MAP.items():
    if _auto_class != "AutoConfig":
        _model_class = globals()[_reference.rpartition(".")[2]]
        getattr(transformers, _auto_class).register(LinformerConfig, _model_class, exist_ok=True)

__all__ = [
    "LinformerConfig",
    "LinformerForMaskedLM",
    "LinformerForMultipleChoice",
    "LinformerForQuestionAnswering",
    "LinformerForSequenceClassification",
    "LinformerForTokenClassification",
    "LinformerModel",
    "LinformerPreTrainedModel",
]
