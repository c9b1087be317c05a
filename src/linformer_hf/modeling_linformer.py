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
"""Linformer: Self-Attention with Linear Complexity (https://arxiv.org/abs/2006.04768) for Transformers.

The file reads from the parts to the whole: embeddings, attention, layer, encoder, model, heads. Shapes are written
with b batch, n tokens, k projected positions, h heads, d head size, c hidden size.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple, is_flash_attention_requested, merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from .configuration_linformer import AUTO_MAP, LinformerConfig
from .projections_linformer import PROJECTIONS, Padding, Projection


# Arguments of batches that hold several sequences in one row, as padding-free collators make them.
PACKED_SEQUENCE_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

# Tokens taken at once by feed-forward and attention in inference on a CPU, where what is made on the way stays in the
# cache and (b, n, intermediate_size) never exists, and by the masked-LM head in training.
CHUNK = 2048


class LinformerEmbeddings(nn.Module):
    """Sum of word, position and token type embeddings. Positions count real tokens, from 0."""

    def __init__(self, config: LinformerConfig):
        super().__init__()
        self.word_embeddings: nn.Module = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Embeds tokens (b, n) or takes their embeddings (b, n, c)."""
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        if attention_mask is not None:
            # NaN or inf in the padding would reach the gradients of the layers' weights
            inputs_embeds = torch.where(attention_mask[..., None], inputs_embeds, 0.0)
        if position_ids is None:
            if attention_mask is None:
                position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
            else:
                position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids)
        embeddings = (
            inputs_embeds + self.position_embeddings(position_ids) + self.token_type_embeddings(token_type_ids)
        )
        return self.dropout(self.LayerNorm(embeddings))


def in_cpu_inference(states: torch.Tensor) -> bool:
    """Whether what is tuned for CPUs is to be used: without gradients, and not in an exported graph."""
    return states.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_exporting()


def in_chunks(states: torch.Tensor) -> bool:
    """Whether the tokens of (..., c) are to be taken `CHUNK` at a time."""
    return in_cpu_inference(states) and not is_tracing(states) and states.shape[:-1].numel() > CHUNK


def of_real_tokens(
    layer: Callable, padding: Padding | None, *states: torch.Tensor, in_front: bool = False
) -> torch.Tensor:
    """What `layer` gives for the real tokens of (b, n, c), in their places or in front of their rows.

    The outputs of padding are 0. It costs no work, but where a graph is traced.
    """
    if padding is None:
        return layer(*states)
    if padding.rows is None:
        outputs = layer(*states)
        return padding.gather(outputs) if in_front else torch.where(padding.tokens[..., None], outputs, 0.0)
    outputs = layer(*(state.flatten(0, 1).index_select(0, padding.rows[0]) for state in states))
    return padding.spread(outputs, padding.rows[in_front])


def mask_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores: 0 where `visible`, else the lowest number of `dtype`."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


class Blocks(NamedTuple):
    """How local attention cuts n tokens in blocks, and which tokens the queries of a block see exactly.

    Attributes:
        size: Tokens of a block.
        reach: Number of neighbours that a block sees on each side.
        num_blocks: Number of blocks.
        num_global: Number of global tokens, from the first, that all blocks see.
    """

    size: int
    reach: int
    num_blocks: int
    num_global: int

    @classmethod
    def cut(cls, length: int, window: int, num_global_tokens: int) -> "Blocks":
        """Blocks of `window` tokens; one of all tokens where each would see all of them."""
        if torch.compiler.is_exporting():
            # one graph for all lengths, with a block too many, since one block alone would be a case of its own
            return cls(window, 1, (length + 2 * window - 1) // window, num_global_tokens)
        if length <= 2 * window:
            return cls(length, 0, 1, 0)
        return cls(window, 1, (length + window - 1) // window, min(num_global_tokens, length))

    def windows(self, device: torch.device) -> torch.Tensor:
        """(blocks, 2), the first token and the end of a block with its neighbours; not all of them need exist."""
        starts = torch.arange(self.num_blocks, device=device)[:, None] * self.size
        return torch.cat([starts - self.reach * self.size, starts + (1 + self.reach) * self.size], dim=1)

    def seen(self, device: torch.device) -> torch.Tensor:
        """(blocks, 2, 2), first tokens and ends of what a block sees: the global tokens, and the others."""
        others = self.windows(device).clamp(min=self.num_global)
        global_tokens = torch.zeros_like(others)
        global_tokens[:, 1] = self.num_global
        return torch.stack([global_tokens, others], dim=1)

    def bias(self, tokens: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        """What is added to the scores of the keys of `join` but the last, (1 or b, blocks, 1, keys), for (b, n, c)."""
        starts = self.windows(tokens.device)[None, :, :1]
        near = starts + torch.arange((1 + 2 * self.reach) * self.size, device=tokens.device)
        first = torch.arange(self.num_global, device=tokens.device)
        ends: Any = tokens.shape[1]
        if lengths is not None:  # blocks behind a row's last token see their own first: no softmax is over nothing
            ends = lengths[..., None].maximum(starts + self.reach * self.size + 1)
        visible = torch.cat([(near >= 0) & (near < ends), (first < starts) & (first < ends)], dim=-1)
        return mask_bias(visible, tokens.dtype)[:, :, None]

    def fold(self, states: torch.Tensor, margin: int = 0) -> torch.Tensor:
        """(b, margin + blocks + margin, size, c) of (b, n, c); what is not there is filled up."""
        if torch.compiler.is_exporting():  # symbolic lengths do not allow the view
            blocks = torch.arange(self.num_blocks + 2 * margin, device=states.device)[:, None] - margin
            columns = blocks * self.size + torch.arange(self.size, device=states.device)
            return states[:, columns.clamp(min=0, max=states.shape[1] - 1)]
        after = (self.num_blocks + margin) * self.size - states.shape[1]
        padded = nn.functional.pad(states, (0, 0, margin * self.size, after))
        return padded.view(states.shape[0], -1, self.size, states.shape[2])

    def parts(self, step: int | None, batch_size: int, padding: Padding | None) -> list[tuple[Any, Any]]:
        """Which rows and blocks to take at once, `step` of them or all; of padded rows those with real tokens."""
        if padding is not None and padding.rows is not None:
            starts = torch.arange(self.num_blocks, device=padding.lengths.device) * self.size
            # rows without tokens keep a block: attention of nothing is an error
            rows, blocks = (starts < padding.lengths.clamp(min=1)).nonzero(as_tuple=True)
            if len(rows) < batch_size * self.num_blocks:
                step = step or len(rows)
                return list(zip(rows.split(step), blocks.split(step), strict=True))
        if step is None:
            return [(slice(None), slice(None))]
        step = -(-step // batch_size)
        return [(slice(None), slice(start, start + step)) for start in range(0, self.num_blocks, step)]

    def together(self, outputs: list[torch.Tensor], parts: list[tuple[Any, Any]], batch_size: int) -> torch.Tensor:
        """(b, blocks, ...) of the outputs of all parts, and 0 for the blocks that are in none."""
        rows, columns = zip(*parts, strict=True)
        if isinstance(rows[0], slice):
            return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
        whole = outputs[0].new_zeros(batch_size, self.num_blocks, *outputs[0].shape[1:])
        return whole.index_put((torch.cat(rows), torch.cat(columns)), torch.cat(outputs))

    def sees(self, around: torch.Tensor, everywhere: list[torch.Tensor]) -> list[torch.Tensor]:
        """Views (b, blocks, keys, c) of what each block sees: of `fold` with a margin, and of what all blocks see."""
        near = [around[:, shift : shift + self.num_blocks] for shift in range(1 + 2 * self.reach)]
        return near + [states[:, None].expand(-1, self.num_blocks, -1, -1) for states in everywhere]


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of queries (b, h, n, d); gives (b, n, h, d) and probabilities (b, h, n, k)."""
    scores = torch.matmul(query * scaling, key.transpose(2, 3))
    if attention_mask is not None:
        scores = scores + attention_mask
    probabilities = nn.functional.softmax(scores, dim=-1)
    probabilities = nn.functional.dropout(probabilities, p=dropout, training=module.training)
    return torch.matmul(probabilities, value).transpose(1, 2).contiguous(), probabilities


def cpu_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As sdpa, for inference on a CPU: with few keys, plain products take two thirds of its time."""
    key, value, outputs = key.contiguous().transpose(2, 3), value.contiguous(), []
    for queries in [query] if is_tracing(query) else query.split(CHUNK // 2, dim=2):
        queries = torch.mul(queries, scaling, out=queries.new_empty(queries.shape))  # contiguous, as products need it
        scores = torch.matmul(queries, key)
        if attention_mask is not None:  # its rows are alike
            scores += attention_mask[:, :, : queries.shape[2]]
        outputs.append(torch.matmul(scores.softmax(dim=-1), value).transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def build_projection(config: LinformerConfig, layer_idx: int, role: int = 0) -> Projection:
    """Makes the projection of a layer's keys, or keys and values (role 0), or values (role 1); -1 is the model's."""
    projection = PROJECTIONS[config.projection_type](config, config.projected_lengths[layer_idx], layer_idx, role)
    projection.requires_grad_(not config.freeze_projections)
    return projection


class LinformerSelfAttention(nn.Module):
    """Attention of n queries over k projected keys and values (equation 7 of the paper).

    With a local window, tokens are cut in blocks of w, and in one softmax a query attends to the tokens of its own
    block and of both neighbours, to the first tokens of the input (global tokens), and to the projected positions as
    far as they are made of other tokens. The queries of global tokens attend to all tokens.
    """

    def __init__(self, config: LinformerConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.window = config.local_attention_windows[layer_idx]
        self.head_size = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_size**-0.5
        self.attention_dropout = config.attention_probs_dropout_prob
        self.is_causal = False  # sdpa would assume a causal model where no mask is passed
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        # Every weight has one owner: the layerwise projection is the encoder's and comes as an argument. Pooling has
        # no weights, and so keys and values share it.
        has_weights = config.projection_type not in ("mean_pooling", "max_pooling")
        self.per_head = has_weights and config.projection_sharing == "none"
        separate = has_weights and config.projection_sharing in ("none", "headwise")
        self.projects = projects = config.projected_lengths[layer_idx] > 0
        layerwise = config.projection_sharing == "layerwise"
        self.key_projection = build_projection(config, layer_idx, role=0) if projects and not layerwise else None
        self.value_projection = build_projection(config, layer_idx, role=1) if projects and separate else None
        dual = config.dual_layer_norm and self.window > 0
        self.slots_have_weights = has_weights or dual
        self.local_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if dual else nn.Identity()
        self.projected_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if dual and projects else nn.Identity()
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding: Padding | None = None,
        shared_projection: Callable | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gives (b, n, c) and, with eager attention, the probabilities.

        They are (b, h, n, k). With a local window they are (b, h, n, 3w + g + k), over the three blocks of tokens
        around each query, the global tokens and the projected positions, and 0 in the rows of global tokens, which
        attend to all n. Inputs of n <= 2w tokens get full attention: (b, h, n, n), and k zeros behind
        them where projected positions have weights, of `linear` and `convolution` or `dual_layer_norm`.
        """
        query = of_real_tokens(self.query, padding, hidden_states, in_front=self.window > 0)
        exact = []
        if self.window or self.per_head:
            layers = (self.key, self.value)
            exact = [of_real_tokens(layer, padding, hidden_states, in_front=True) for layer in layers]
        tokens = hidden_states if padding is None else padding.gather(hidden_states)
        if self.window:
            output, probabilities = self.attend_locally(tokens, query, padding, shared_projection, exact, **kwargs)
            if padding is not None:
                output = padding.scatter(output)
                if probabilities is not None:
                    probabilities = padding.scatter(probabilities.transpose(1, 2)).transpose(1, 2)
            return output, probabilities
        key, value, slot_bias = self.project(tokens, padding, shared_projection, exact)
        return self.attend(query, key, value, slot_bias, **kwargs)

    def project(
        self,
        tokens: torch.Tensor,
        padding: Padding | None,
        shared_projection: Callable | None,
        exact: list[torch.Tensor],
        seen: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values (b, k, c) of the projected tokens, and what is added to their scores, if anything.

        `tokens` (b, n, c) and `seen` are as `Projection.forward` takes them; `exact` are the tokens' own
        keys and values (b, n, c), where they are needed.
        """
        lengths = None if padding is None else padding.lengths
        owned = (self.key_projection, self.value_projection, shared_projection)
        projections = [projection for projection in owned if projection is not None]
        key_projection, value_projection = projections[0], projections[-1]
        if self.per_head:
            # W comes first, or each head would project all c channels. The bias stays behind the projection, and comes
            # from the layer, since offloading, sharding and adapters change what is in `self.key.bias`
            zeros = tokens.new_zeros(1, tokens.shape[-1])
            key_bias, value_bias = self.key(zeros), self.value(zeros)
            keys, values = exact[0] - key_bias, exact[1] - value_bias
            if padding is not None:
                keys, values = (torch.where(padding.real[..., None], states, 0.0) for states in (keys, values))
            keys, slot_bias = key_projection(keys, lengths, seen)
            values, _ = value_projection(values, lengths, seen)
            return keys + key_bias, values + value_bias, slot_bias
        # E(XW)+b = (EX)W+b, and so k rows instead of n go through W
        projected, slot_bias = key_projection(tokens, lengths, seen)
        keys = self.key(projected)
        if value_projection is not key_projection:
            projected, _ = value_projection(tokens, lengths, seen)
        return keys, self.value(projected), slot_bias

    def attend_locally(
        self,
        tokens: torch.Tensor,
        query: torch.Tensor,
        padding: Padding | None,
        shared_projection: Callable | None,
        exact: list[torch.Tensor],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `forward`, for tokens and queries (b, n, c), real ones in front. The blocks are folded in the batch."""
        batch_size, length, _ = tokens.shape
        lengths = None if padding is None else padding.lengths
        blocks = Blocks.cut(length, self.window, self.config.num_global_tokens)
        bias = blocks.bias(tokens, lengths)
        keys, values = (self.local_norm(states) for states in exact)
        # what all blocks see
        everywhere = [[states[:, : blocks.num_global]] for states in (keys, values)]
        # one block sees all tokens itself, and projected positions are there only so that weights get a gradient
        if self.projects and (blocks.reach or self.slots_have_weights):
            seen = blocks.seen(tokens.device)
            slot_bias: Any
            *slots, slot_bias = self.project(tokens, padding, shared_projection, exact, seen)
            for states, projected in zip(everywhere, slots, strict=True):
                states.append(self.projected_norm(projected))
            bias = torch.cat([bias.expand(slot_bias.shape[0], -1, -1, -1), slot_bias], dim=-1)

        queries, bias = blocks.fold(query), bias.expand(batch_size, -1, -1, -1)
        seen_keys, seen_values = (
            blocks.sees(blocks.fold(states, margin=blocks.reach), more)
            for states, more in zip((keys, values), everywhere, strict=True)
        )
        parts = blocks.parts(-(-CHUNK // 2 // blocks.size) if in_chunks(tokens) else None, batch_size, padding)
        outputs, probabilities = [], []
        for part in parts:
            folded = queries[part].shape[:-2]
            query_part = queries[part].flatten(0, -3)
            key, value = (
                torch.cat([one[part] for one in seen], dim=-2).flatten(0, -3) for seen in (seen_keys, seen_values)
            )
            output, weights = self.attend(query_part, key, value, bias[part].flatten(0, -3)[:, None], **kwargs)
            outputs.append(output.unflatten(0, folded))
            if weights is not None:
                probabilities.append(weights.unflatten(0, folded))
        output = blocks.together(outputs, parts, batch_size).flatten(1, 2)
        columns = torch.arange(length, device=tokens.device)
        output = output[:, columns] if torch.compiler.is_exporting() else output[:, :length]
        weights = None
        if probabilities:
            weights = blocks.together(probabilities, parts, batch_size).transpose(1, 2).flatten(2, 3)[:, :, :length]
        if blocks.num_global:
            row_bias = None
            if lengths is not None:
                row_bias = mask_bias(columns < lengths.clamp(min=1), tokens.dtype)[:, None, None]
            global_queries = query[:, : blocks.num_global]
            of_global_tokens, _ = self.attend(global_queries, keys, values, row_bias, **kwargs)
            first = torch.arange(blocks.num_global, device=tokens.device)
            output = output.index_copy(1, first, of_global_tokens)
            weights = None if weights is None else weights.index_fill(2, first, 0.0)
        return output, weights

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of (b, n, c) to (b, k, c) with `bias` (b, 1, 1, k) added to the scores; as `forward`."""
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        if bias is not None:
            # on CPUs, flex attention ends the process where a bias is added
            flex = attention_interface is ALL_ATTENTION_FUNCTIONS["flex_attention"]
            if is_flash_attention_requested(self.config) or (flex and (self.window or query.device.type == "cpu")):
                raise ValueError(
                    f"`attn_implementation` is {self.config._attn_implementation!r}, which cannot add a bias to the "
                    f"scores here as `projection_type={self.config.projection_type!r}` with "
                    f"`local_attention_window={self.window}` needs: use 'sdpa'"
                )
            bias = bias.to(query.dtype).expand(-1, -1, query.shape[1], -1)
        sdpa = attention_interface is ALL_ATTENTION_FUNCTIONS["sdpa"]
        if sdpa and in_cpu_inference(query) and not self.training and key.shape[1] <= CHUNK:
            attention_interface = cpu_attention_forward
        output, probabilities = attention_interface(
            self,
            *(self.split_heads(states) for states in (query, key, value)),
            bias,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return output.flatten(2), probabilities

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """A view (b, h, n, d) of (b, n, c)."""
        return states.unflatten(-1, (states.shape[-1] // self.head_size, self.head_size)).transpose(1, 2)


class LinformerOutput(nn.Module):
    """The end of both halves of a layer: dense, dropout, residual, and LayerNorm unless that came first."""

    def __init__(self, config: LinformerConfig, input_size: int):
        super().__init__()
        self.dense = nn.Linear(input_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.norm_first = config.norm_first

    def before(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the half's first module takes."""
        return self.LayerNorm(hidden_states) if self.norm_first else hidden_states

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Gives (b, n, c) of (b, n, input_size) and the half's input (b, n, c)."""
        hidden_states = self.dropout(self.dense(hidden_states)) + residual
        return hidden_states if self.norm_first else self.LayerNorm(hidden_states)


class LinformerAttention(nn.Module):
    """Self-attention with its output layer."""

    def __init__(self, config: LinformerConfig, layer_idx: int):
        super().__init__()
        self.self = LinformerSelfAttention(config, layer_idx)
        self.output = LinformerOutput(config, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, padding: Padding | None, **kwargs: Any) -> torch.Tensor:
        """Gives (b, n, c)."""
        context, _ = self.self(self.output.before(hidden_states), padding=padding, **kwargs)
        return of_real_tokens(self.output, padding, context, hidden_states)


class LinformerIntermediate(nn.Module):
    """The first half of the feed-forward."""

    def __init__(self, config: LinformerConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gives (b, n, intermediate_size)."""
        return self.activation(self.dense(hidden_states))


class LinformerLayer(GradientCheckpointingLayer):
    """Attention and feed-forward."""

    def __init__(self, config: LinformerConfig, layer_idx: int):
        super().__init__()
        self.attention = LinformerAttention(config, layer_idx)
        self.intermediate = LinformerIntermediate(config)
        self.output = LinformerOutput(config, config.intermediate_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        padding: Padding | None = None,
        shared_projection: Callable | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Gives (b, n, c)."""
        hidden_states = self.attention(hidden_states, padding, shared_projection=shared_projection, **kwargs)
        return of_real_tokens(self.feed_forward, padding, hidden_states)

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The second half of the layer, for any number of tokens (..., c)."""
        if in_chunks(hidden_states):
            chunks = hidden_states.flatten(0, -2).split(CHUNK)
            return torch.cat([self.feed_forward(chunk) for chunk in chunks]).view(hidden_states.shape)
        return self.output(self.intermediate(self.output.before(hidden_states)), hidden_states)


class LinformerEncoder(nn.Module):
    """The stack of layers; owns the projection that all of them share, if they do."""

    def __init__(self, config: LinformerConfig):
        super().__init__()
        layerwise = config.projection_sharing == "layerwise" and config.projected_lengths[-1] > 0
        self.shared_projection = build_projection(config, -1) if layerwise else None
        self.layer = nn.ModuleList(LinformerLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.LayerNorm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm_first else nn.Identity()
        )

    def forward(self, hidden_states: torch.Tensor, padding: Padding | None, **kwargs: Any) -> torch.Tensor:
        """Gives (b, n, c)."""
        # handed down as a function: offloading would move the weights of a module that is an argument
        shared_projection = None if self.shared_projection is None else self.shared_projection.__call__
        for layer in self.layer:
            hidden_states = layer(hidden_states, padding=padding, shared_projection=shared_projection, **kwargs)
        return self.LayerNorm(hidden_states)


class LinformerPreTrainedModel(PreTrainedModel):
    """What all models of the family have in common: initial weights, loading and saving."""

    config: LinformerConfig
    base_model_prefix = "linformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LinformerEmbeddings", "LinformerLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": LinformerLayer,
        "attentions": LinformerSelfAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Projection):
            module.reset_parameters()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        super()._initialize_weights(module, is_custom_code)
        if isinstance(module, Projection) and self.config.freeze_projections:
            module.requires_grad_(False)  # from_pretrained puts new parameters in their place

    @staticmethod
    def _finalize_model_loading(model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
        lengths = sorted(key for key in loading_info.mismatched_keys if re.search("position_embed|projection", key[0]))
        if lengths:  # with `ignore_mismatched_sizes` too: it is meant for labels
            name, stored, wanted = lengths[0]
            raise ValueError(
                f"`{name}` has the shape {tuple(stored)} in the checkpoint, but {tuple(wanted)} with this "
                "configuration: load it with its own configuration, `max_position_embeddings` and `projected_length` "
                "among it; for another longest input, use `lengthen` or `shorten` of `linformer_hf.lengthen`"
            )
        return PreTrainedModel._finalize_model_loading(model, load_config, loading_info)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Saves weights, configuration and code, so that the folder loads where this package is not installed.

        Args:
            save_directory: The folder.
            *args: As `PreTrainedModel.save_pretrained`.
            **kwargs: As `PreTrainedModel.save_pretrained`.
        """
        self.config.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)


def _only_one(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """The one of the two that is given."""
    if input_ids is not None and inputs_embeds is None:
        return input_ids
    if inputs_embeds is not None and input_ids is None:
        return inputs_embeds
    raise ValueError(
        f"Give either `input_ids` or `inputs_embeds`; {'neither' if input_ids is None else 'both'} was given"
    )


class LinformerModel(LinformerPreTrainedModel):
    """The encoder without a head; its output are the hidden states of all tokens."""

    _auto_class = "AutoModel"

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        config.validate_architecture()  # fields may have been set after construction
        self.gradient_checkpointing = False
        self.embeddings = LinformerEmbeddings(config)
        self.encoder = LinformerEncoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the word embeddings."""
        self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Encodes a batch of sequences.

        Args:
            input_ids: (b, n), token ids; n is at most `config.max_position_embeddings`.
            attention_mask: (b, n), 1 at real tokens and 0 at padding, which may be anywhere. Outputs at real tokens
                depend on real tokens alone; outputs at padding mean nothing.
            token_type_ids: (b, n), all 0 if not given.
            position_ids: (b, n) or (n), which position embeddings to use; real tokens are counted from 0 if not given.
            inputs_embeds: (b, n, c), in place of `input_ids`.
            **kwargs: `output_hidden_states`, `output_attentions` (probabilities (b, h, n, k), with
                `attn_implementation="eager"`), `return_dict`.

        Returns:
            `last_hidden_state` (b, n, c).

        Raises:
            ValueError: If both or neither of `input_ids` and `inputs_embeds` are given, the input is too long, the
                mask is not a 0/1 mask of shape (b, n), or several sequences are packed in one row.
        """
        for name in PACKED_SEQUENCE_ARGUMENTS:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"`{name}` was given, but a row holds one sequence here, since a projection mixes all tokens of "
                    "a row: pad the sequences and give `attention_mask`"
                )
        given = _only_one(input_ids, inputs_embeds)
        if given.dim() != (2 if inputs_embeds is None else 3) or given.shape[1] == 0:
            raise ValueError(
                f"The input has the shape {tuple(given.shape)}, but must be (batch, tokens) for `input_ids` and "
                "(batch, tokens, hidden size) for `inputs_embeds`, with at least one token"
            )
        shape = given.shape[:2]
        if shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"The input has {shape[1]} tokens, but the longest that this model takes is "
                f"`max_position_embeddings` = {self.config.max_position_embeddings}: truncate it (a tokenizer does "
                f"with `truncation=True, max_length={self.config.max_position_embeddings}`), split it, or use a "
                "longer model"
            )
        attention_mask = self._real_tokens(attention_mask, shape)
        if attention_mask is None and input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        padding = None if attention_mask is None else Padding.from_mask(attention_mask)
        hidden_states = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, attention_mask)
        return BaseModelOutput(last_hidden_state=self.encoder(hidden_states, padding, **kwargs))

    def _real_tokens(self, mask: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The mask (b, n) as bool, or `None` where all tokens are real."""
        if mask is None:
            return None
        if not isinstance(mask, torch.Tensor) or mask.shape != shape:
            raise ValueError(
                f"`attention_mask` has the shape {tuple(getattr(mask, 'shape', ()))}, but must be a tensor (batch, "
                f"tokens) = {tuple(shape)}, 1 at real tokens and 0 at padding: which token sees which cannot be chosen"
            )
        if is_tracing(mask):
            return mask.bool()
        if mask.is_floating_point() and not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                f"`attention_mask` has values from {mask.min().item()} to {mask.max().item()}, but must be 1 at real "
                "tokens and 0 at padding: give the mask that the tokenizer gives, not one to be added to scores"
            )
        mask = mask.bool()
        return None if mask.all() else mask


def _first_real_token(hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """(b, c) of (b, n, c)."""
    if attention_mask is None:
        return hidden_states[:, 0]
    first = attention_mask.bool().int().argmax(dim=1)
    return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), first]


class LinformerLMHead(nn.Module):
    """Scores of all words for each token."""

    def __init__(self, config: LinformerConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gives (b, n, vocab_size)."""
        return self.decoder(self.layer_norm(self.activation(self.dense(hidden_states))))


class LinformerForMaskedLM(LinformerPreTrainedModel):
    """Linformer with a masked language modeling head."""

    _auto_class = "AutoModelForMaskedLM"
    _tied_weights_keys = {"lm_head.decoder.weight": "linformer.embeddings.word_embeddings.weight"}

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.linformer = LinformerModel(config)
        self.lm_head = LinformerLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The layer that gives the scores of the words."""
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the layer that gives the scores of the words."""
        self.lm_head.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """As `LinformerModel`, with `logits` (b, n, vocab_size) and the mean loss of `labels` (b, n) but -100.

        In training with labels there are no logits, and the head takes the labelled tokens alone, unless
        `config.sparse_prediction` is off or the model is compiled.
        """
        outputs = self.linformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits, loss = None, None
        if labels is not None and self.training and self.config.sparse_prediction and not is_tracing(labels):
            loss = self.sparse_loss(outputs.last_hidden_state, labels, **kwargs)
        else:
            logits = self.lm_head(outputs.last_hidden_state)
            if labels is not None:
                loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def sparse_loss(self, hidden_states: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The loss of `forward`; logits exist for `CHUNK` labelled tokens at a time."""
        labels = labels.to(hidden_states.device)
        labelled = labels != kwargs.get("ignore_index", -100)
        hidden_states, labels = hidden_states[labelled], labels[labelled]
        if kwargs.get("num_items_in_batch") is None:
            kwargs["num_items_in_batch"] = labels.numel()  # the loss is a sum over the parts then, divided by this

        def part(hidden_states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.loss_function(self.lm_head(hidden_states), labels, vocab_size=self.config.vocab_size, **kwargs)

        if labels.numel() <= CHUNK:
            return part(hidden_states, labels)
        parts = zip(hidden_states.split(CHUNK), labels.split(CHUNK), strict=True)
        return torch.stack([checkpoint(part, *chunk, use_reentrant=False) for chunk in parts]).sum()


class LinformerClassificationHead(nn.Module):
    """Scores of a sequence, from its first token."""

    def __init__(self, config: LinformerConfig, num_labels: int):
        super().__init__()
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(config.hidden_size, num_labels)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Gives (b, num_labels) of (b, c)."""
        hidden_states = torch.tanh(self.dense(self.dropout(hidden_states)))
        return self.out_proj(self.dropout(hidden_states))


class LinformerForSequenceClassification(LinformerPreTrainedModel):
    """Linformer with a head for classification (one label or several) or regression of sequences."""

    _auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.linformer = LinformerModel(config)
        self.classifier = LinformerClassificationHead(config, config.num_labels)  # type: ignore[arg-type]  # set there
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """As `LinformerModel`, with `logits` (b, num_labels) and the loss of `labels`.

        `config.problem_type` says which loss; if unset, labels are numbers where `num_labels` is 1, else classes (b,)
        if they are integers, else (b, num_labels) of 0 and 1.
        """
        outputs = self.linformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(_first_real_token(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = _sequence_loss(labels, logits, self.config, self.loss_function, **kwargs)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def _sequence_loss(
    labels: torch.Tensor, logits: torch.Tensor, config: LinformerConfig, loss_function: Callable, **kwargs: Any
) -> torch.Tensor:
    """Transformers' loss, summed over accumulated batches by `num_items_in_batch` for every kind of label."""
    loss = loss_function(labels=labels, pooled_logits=logits, config=config, **kwargs)
    num_items = kwargs.get("num_items_in_batch")
    if config.problem_type == "single_label_classification" or num_items is None:
        return loss
    # Transformers' regression and multi-label losses are means over this batch, whatever `num_items_in_batch` says; as
    # that counts the labels, so does `labels.numel()`.
    return loss * labels.numel() / num_items


class LinformerForTokenClassification(LinformerPreTrainedModel):
    """Linformer with a head for the classification of tokens."""

    _auto_class = "AutoModelForTokenClassification"

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.linformer = LinformerModel(config)
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]  # set there
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """As `LinformerModel`, with `logits` (b, n, num_labels) and the mean loss of `labels` (b, n) but -100."""
        outputs = self.linformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config, **kwargs)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LinformerForQuestionAnswering(LinformerPreTrainedModel):
    """Linformer with a head for the start and the end of an answer in a text."""

    _auto_class = "AutoModelForQuestionAnswering"

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.linformer = LinformerModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """As `LinformerModel`, with `start_logits` and `end_logits` (b, n) and the mean loss of both (b,)."""
        outputs = self.linformer(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LinformerForMultipleChoice(LinformerPreTrainedModel):
    """Linformer with a head that scores several sequences against each other."""

    _auto_class = "AutoModelForMultipleChoice"

    def __init__(self, config: LinformerConfig):
        super().__init__(config)
        self.linformer = LinformerModel(config)
        self.classifier = LinformerClassificationHead(config, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        """As `LinformerModel` with inputs (b, choices, n); gives `logits` (b, choices), loss of `labels` (b,)."""
        num_choices = _only_one(input_ids, inputs_embeds).shape[1]
        inputs = [
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        ]
        outputs = self.linformer(*inputs, return_dict=True, **kwargs)
        logits = self.classifier(_first_real_token(outputs.last_hidden_state, inputs[1])).view(-1, num_choices)
        loss = None
        if labels is not None:
            loss = fixed_cross_entropy(logits, labels, num_items_in_batch=kwargs.get("num_items_in_batch"))
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


__all__ = [
    "LinformerForMaskedLM",
    "LinformerForMultipleChoice",
    "LinformerForQuestionAnswering",
    "LinformerForSequenceClassification",
    "LinformerForTokenClassification",
    "LinformerModel",
    "LinformerPreTrainedModel",
]
