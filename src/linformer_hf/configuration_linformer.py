# Copyright 2026 The linformer_hf authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Configuration of the Linformer family (https://arxiv.org/abs/2006.04768)."""

from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN


SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)

# What a saved folder's `config.json` says about the code beside it, one entry per Auto class.
AUTO_MAP = {
    "AutoConfig": "configuration_linformer.LinformerConfig",
    "AutoModel": "modeling_linformer.LinformerModel",
    "AutoModelForMaskedLM": "modeling_linformer.LinformerForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_linformer.LinformerForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_linformer.LinformerForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_linformer.LinformerForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_linformer.LinformerForMultipleChoice",
}


@strict
class LinformerConfig(PreTrainedConfig):
    r"""Configuration of a Linformer encoder.

    The fields that RoBERTa has too mean the same here, but for `max_position_embeddings`. The defaults are
    RoBERTa-base with the best row of the paper's Table 2 (n = 512, k = 256, one projection for all layers).

    Args:
        vocab_size (`int`, defaults to 50265): Number of tokens in the vocabulary.
        hidden_size (`int`, defaults to 768): Width of the layers, c in the paper's notation. A multiple of
            `num_attention_heads`.
        num_hidden_layers (`int`, defaults to 12): Number of layers.
        num_attention_heads (`int`, defaults to 12): Number of heads of each layer, h.
        intermediate_size (`int`, defaults to 3072): Width of the feed-forward layers.
        hidden_act (`str`, defaults to `"gelu"`): Activation of the feed-forward layers and of the masked-LM head.
        hidden_dropout_prob (`float`, defaults to 0.1): Dropout of embeddings, attention outputs and feed-forward
            outputs.
        attention_probs_dropout_prob (`float`, defaults to 0.1): Dropout of the attention probabilities.
        max_position_embeddings (`int`, defaults to 512): The longest input in tokens, n. Unlike RoBERTa's it holds no
            offset of 2.
        type_vocab_size (`int`, defaults to 1): Number of token types.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the initial weights.
        layer_norm_eps (`float`, defaults to 1e-5): Epsilon of the layer normalizations.
        pad_token_id (`int`, defaults to 1), bos_token_id (`int`, defaults to 0), eos_token_id (`int`, defaults to 2):
            The special tokens.
        classifier_dropout (`float`, *optional*): Dropout of the classification heads; `hidden_dropout_prob` if not
            set.
        tie_word_embeddings (`bool`, defaults to `True`): Whether the masked-LM head uses the word embeddings.
        projected_length (`int` or `list[int]`, defaults to 256): Number of positions k that keys and values are
            projected to, from 1 to `max_position_embeddings`, or 0 (none) in layers with a local window; a list holds
            one value per layer.
        projection_type (`str`, defaults to `"linear"`): `"linear"` learns a k×n matrix, `"random"` keeps a fixed
            Johnson-Lindenstrauss matrix, `"convolution"` learns a depthwise convolution, `"mean_pooling"` and
            `"max_pooling"` pool windows and have no weights.
        projection_sharing (`str`, defaults to `"layerwise"`): Section 4 of the paper. `"none"`: key and value
            projections for each head; `"headwise"`: for each layer; `"key_value"`: one projection per layer for keys
            and values; `"layerwise"`: one projection for the whole model. Makes no difference for pooling.
        projection_initializer (`str`, defaults to `"mean_pooling"`): Start of the learned projections: mean pooling
            over n/k tokens plus noise of standard deviation 0.002, or `"normal"`, N(0, `initializer_range`²).
        freeze_projections (`bool`, defaults to `False`): Whether the projections are left out of training.
        projection_seed (`int`, defaults to 0): Seed of the `"random"` projections.
        local_attention_window (`int` or `list[int]`, defaults to 0): Size w of the blocks of exact local attention:
            in the same softmax as the projected positions, a token sees its own block of w tokens and both neighbours.
            Inputs of up to 2w tokens get full attention. A list holds one value per layer; 0 is the paper's Linformer.
        num_global_tokens (`int`, defaults to 0): Number g of tokens, from the first, that in layers with a local
            window all tokens see and that see all tokens.
        dual_layer_norm (`bool`, defaults to `False`): Whether in layers with a local window projected and exact keys
            and values get a layer normalization each (https://arxiv.org/abs/2107.02192, section 3.3).
        norm_first (`bool`, defaults to `False`): Whether layer normalization comes before attention and feed-forward
            (pre-LayerNorm), with a final one after the last layer.
        sparse_prediction (`bool`, defaults to `True`): Whether the masked-LM head computes the labelled tokens alone
            where the model is in training mode and gets labels: same loss and gradients, and no logits in the output.
            Without labels, in evaluation and in compiled models it computes the logits of all tokens.

    Raises:
        huggingface_hub.errors.StrictDataclassError: If a field or a combination of fields is not possible; the message
            names the field, its value and what is allowed.

    Example:
        ```python
        >>> from linformer_hf import LinformerConfig, LinformerModel

        >>> config = LinformerConfig(max_position_embeddings=4096, projected_length=128)
        >>> model = LinformerModel(config)
        ```
    """

    model_type = "linformer"
    keys_to_ignore_at_inference: ClassVar = ["hidden_states", "attentions"]
    base_model_tp_plan: ClassVar[dict[str, Any] | None] = {
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }
    # Saving a configuration or a model copies its code into the folder.
    _auto_class: ClassVar = "AutoConfig"

    vocab_size: int = 50265
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 1
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    classifier_dropout: float | int | None = None
    tie_word_embeddings: bool = True
    is_decoder: bool = False
    add_cross_attention: bool = False
    projected_length: int | list[int] = 256
    projection_type: Literal["linear", "random", "mean_pooling", "max_pooling", "convolution"] = "linear"
    projection_sharing: Literal["none", "headwise", "key_value", "layerwise"] = "layerwise"
    projection_initializer: Literal["mean_pooling", "normal"] = "mean_pooling"
    freeze_projections: bool = False
    projection_seed: int = 0
    local_attention_window: int | list[int] = 0
    num_global_tokens: int = 0
    dual_layer_norm: bool = False
    norm_first: bool = False
    sparse_prediction: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # each head's projection would have to lie with its head, and normalization needs all heads
        if self.projection_sharing == "none" or self.dual_layer_norm:
            self.base_model_tp_plan = None  # type: ignore[misc]

    @property
    def projected_lengths(self) -> list[int]:
        """The projected length of each layer."""
        return self._of_each_layer(self.projected_length)

    @property
    def local_attention_windows(self) -> list[int]:
        """The local window of each layer."""
        return self._of_each_layer(self.local_attention_window)

    def _of_each_layer(self, value: int | list[int]) -> list[int]:
        return [value] * self.num_hidden_layers if isinstance(value, int) else list(value)

    def validate_architecture(self) -> None:
        """Refuses fields that do not go together.

        Raises:
            ValueError: With the field, its value and what is allowed.
        """
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be at least 1")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            if not 0 <= (getattr(self, name) or 0) <= 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be from 0 to 1")
        for name in ("layer_norm_eps", "initializer_range"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be at least 0")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` is {self.hidden_act!r}, but must be one of {', '.join(ACT2FN)}")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"`pad_token_id` is {self.pad_token_id}, but must be below `vocab_size`, which is {self.vocab_size}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size}, but must be a multiple of `num_attention_heads`, which is "
                f"{self.num_attention_heads}"
            )
        for name in ("is_decoder", "add_cross_attention"):
            if getattr(self, name):
                raise ValueError(
                    f"`{name}` is True, but must be False: each of Linformer's projected positions mixes all tokens, "
                    "later ones too, so it cannot be causal. It can be the encoder of an `EncoderDecoderModel`"
                )
        self._validate_projections()

    def _validate_projections(self) -> None:
        n, k, windows = self.max_position_embeddings, self.projected_length, self.local_attention_window
        for name in ("projected_length", "local_attention_window"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != self.num_hidden_layers:
                raise ValueError(
                    f"`{name}` is {value}, a list of {len(value)}, but must be one int or a list of "
                    f"`num_hidden_layers` = {self.num_hidden_layers} ints"
                )
        if min(self.local_attention_windows) < 0:
            raise ValueError(f"`local_attention_window` is {windows}, but must be at least 0")
        for length, window in zip(self.projected_lengths, self.local_attention_windows, strict=True):
            if not (0 if window else 1) <= length <= n:
                raise ValueError(
                    f"`projected_length` is {k}, but must be from 1 (0 in layers with a `local_attention_window`) to "
                    f"`max_position_embeddings`, which is {n}: change `projected_length`, raise "
                    "`max_position_embeddings` or set a window"
                )
        if not 0 <= self.num_global_tokens <= n:
            raise ValueError(
                f"`num_global_tokens` is {self.num_global_tokens}, but must be from 0 to `max_position_embeddings`, "
                f"which is {n}"
            )
        for name in ("num_global_tokens", "dual_layer_norm"):
            if getattr(self, name) and not any(self.local_attention_windows):
                raise ValueError(
                    f"`{name}` is {getattr(self, name)}, but acts only in layers with a local window: set "
                    f"`local_attention_window`, which is {windows}"
                )
        if self.projection_sharing == "layerwise" and len(set(self.projected_lengths)) > 1:
            raise ValueError(
                f"`projected_length` is {k}, but `projection_sharing='layerwise'` uses one projection in all layers: "
                "give one int, or share 'key_value', 'headwise' or 'none'"
            )
        if not 0 <= self.projection_seed < 2**32:
            raise ValueError(f"`projection_seed` is {self.projection_seed}, but must be from 0 to 2**32 - 1")


__all__ = ["LinformerConfig"]
