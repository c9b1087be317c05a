"""Linformer (https://arxiv.org/abs/2006.04768) as a Hugging Face Transformers model family.

Importing the package registers the family: `AutoModel.from_pretrained` and its kin then know `"linformer"`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_linformer import LinformerConfig
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

AutoConfig.register("linformer", LinformerConfig, exist_ok=True)
AutoModel.register(LinformerConfig, LinformerModel, exist_ok=True)
AutoModelForMaskedLM.register(LinformerConfig, LinformerForMaskedLM, exist_ok=True)
AutoModelForMultipleChoice.register(LinformerConfig, LinformerForMultipleChoice, exist_ok=True)
AutoModelForQuestionAnswering.register(LinformerConfig, LinformerForQuestionAnswering, exist_ok=True)
AutoModelForSequenceClassification.register(LinformerConfig, LinformerForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(LinformerConfig, LinformerForTokenClassification, exist_ok=True)

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
