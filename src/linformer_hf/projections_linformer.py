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
"""The projections of keys and values along the sequence, from n tokens to k positions.

Shapes are written with b batch, n tokens, k projected positions, h heads, d head size, c hidden size.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils.import_utils import is_tracing

from .configuration_linformer import LinformerConfig


class Padding(NamedTuple):
    """Where the real tokens of a padded batch are.

    Attributes:
        order: (b, n), the column of the j-th real token at j; behind a row's real tokens, those of its padding.
        place: (b, n), the inverse: where `order` has each column.
        real: (b, n), whether the row has a j-th real token.
        lengths: (b, 1), number of real tokens.
        rows: Two of (number of real tokens,): where these are in a flattened batch (b·n, c), and where once gathered.
            `None` in traced graphs, whose shapes must not depend on values.
    """

    order: torch.Tensor
    place: torch.Tensor
    real: torch.Tensor
    lengths: torch.Tensor
    rows: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> "Padding":
        """Takes a mask (b, n), True or nonzero at real tokens."""
        mask = mask.bool()
        lengths = mask.sum(dim=1, keepdim=True)
        columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        # real tokens first, both kinds in their order
        place = torch.where(mask, mask.cumsum(dim=1), lengths + (~mask).cumsum(dim=1)) - 1
        real, order = columns < lengths, torch.zeros_like(place).scatter(1, place, columns)
        rows = None if is_tracing(mask) else (mask.flatten().nonzero()[:, 0], real.flatten().nonzero()[:, 0])
        return cls(order, place, real, lengths, rows)

    @property
    def tokens(self) -> torch.Tensor:
        """The mask (b, n) as bool, True at real tokens."""
        return self.place < self.lengths

    def spread(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """(b, n, ...) with the states of real tokens (real tokens, ...) at these rows of b·n, and zeros elsewhere."""
        everywhere = states.new_zeros(self.real.numel(), *states.shape[1:])
        return everywhere.index_copy_(0, rows, states).unflatten(0, self.real.shape)

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """Moves the real tokens of (b, n, c) to the front of their rows, in order, and zeros behind them."""
        if self.rows is not None:
            return self.spread(states.flatten(0, 1).index_select(0, self.rows[0]), self.rows[1])
        index = self.order[..., None].expand(states.shape)
        # `where` and not a product: the padding may hold NaN or inf
        return torch.where(self.real[..., None], states.gather(1, index), 0.0)

    def scatter(self, states: torch.Tensor) -> torch.Tensor:
        """Moves the real tokens of (b, n, ...) back to where `gather` took them from."""
        if self.rows is not None:
            return self.spread(states.flatten(0, 1).index_select(0, self.rows[1]), self.rows[0])
        index = self.place.view(*self.place.shape, *[1] * (states.dim() - 2))
        return states.gather(1, index.expand(states.shape))


class Projection(nn.Module):
    """What all projections have in common: `forward` takes sequences whose real tokens come first."""

    def reset_parameters(self) -> None:
        """Fills the weights, but for values that come from a checkpoint."""

    def forward(
        self, sequence: torch.Tensor, lengths: torch.Tensor | None = None, seen: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Projects sequences.

        Args:
            sequence: (b, n, c), the real tokens in front, zeros behind them.
            lengths: (b, 1), number of real tokens; `None` if all are.
            seen: (blocks, ranges, 2), first token and end of the ranges, which do not overlap, that a block of queries
                attends to beside the projected positions; `None` if there are none.

        Returns:
            (b, k', c) with k' at most k, and what is to be added to the attention scores, or `None`. It is
            (b, 1, 1, k'), or (1 or b, blocks, 1, k') where `seen` is given.
        """
        raise NotImplementedError

    def slot_bias(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """What is added to the scores of positions that stand for so many tokens: nothing, weights say what counts."""
        return torch.zeros_like(num_tokens)

    def mask(
        self, starts: torch.Tensor, ends: torch.Tensor, seen: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """The bias (b, 1 or blocks, 1, k') of projected positions made of the tokens from `starts` to `ends` (b, k').

        Tokens that a query sees anyway do not count a second time; a position of which nothing is left is masked.
        """
        counts = (ends - starts)[:, None]
        if seen is not None:
            first, end = seen[..., None].unbind(2)  # (blocks, ranges, 1)
            overlap = ends[:, None, None].minimum(end) - starts[:, None, None].maximum(first)
            counts = counts - overlap.clamp(min=0).sum(dim=2)
        bias = self.slot_bias(counts.to(torch.promote_types(dtype, torch.float32))).to(dtype)
        return bias.masked_fill(counts <= 0, torch.finfo(dtype).min)[:, :, None]


class MatrixProjection(Projection):
    """Multiplies the sequence with a k×n matrix E: learned, or fixed and random (Johnson-Lindenstrauss).

    Shorter inputs use the first columns of E. `weight` is (k, n), or (h, k, n) with one matrix per head.

    Args:
        config: The model's configuration.
        projected_length: k.
        layer_idx: The layer that owns the projection; -1 for the model's.
        role: 0 for keys, or keys and values; 1 for values. With the layer, it sets the random matrix.
    """

    weight: torch.Tensor

    def __init__(self, config: LinformerConfig, projected_length: int, layer_idx: int, role: int):
        super().__init__()
        self.config = config
        self.seed = 2 * (config.projection_seed * 100_003 + layer_idx + 1) + role
        shape: tuple[int, ...] = (projected_length, config.max_position_embeddings)
        if config.projection_sharing == "none":
            shape = (config.num_attention_heads, *shape)
        if config.projection_type == "random":
            self.register_buffer("weight", torch.empty(shape))
            if not self.weight.is_meta:
                self.weight.copy_(self.random_matrix())
        else:
            self.weight = nn.Parameter(torch.empty(shape))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fills the weights, but for values that come from a checkpoint."""
        if self.config.projection_type == "random":
            init.copy_(self.weight, self.random_matrix())
        else:
            _initialize(self.weight, pooling_matrix(*self.weight.shape[-2:]), self.config)

    def random_matrix(self) -> torch.Tensor:
        """Entries iid N(0, 1/k), which keeps norms in expectation; the same on every device for one configuration."""
        generator = torch.Generator().manual_seed(self.seed)
        matrix = torch.randn(self.weight.shape, generator=generator, device="cpu", dtype=torch.float32)
        return matrix * self.weight.shape[-2] ** -0.5

    def forward(
        self, sequence: torch.Tensor, lengths: torch.Tensor | None = None, seen: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiplies; with a matrix for each head, their channels lie side by side, h·d = c.

        Each projected position is made of all tokens, and masked only for blocks that see all of them.
        """
        batch_size, length, channels = sequence.shape
        if torch.compiler.is_exporting():  # an exported slice would not take the longest input
            weight = self.weight[..., torch.arange(length, device=sequence.device)]
        else:
            weight = self.weight[..., :length]
        if weight.dim() == 2:
            projected = torch.bmm(weight.expand(batch_size, -1, -1), sequence)
        else:
            heads = sequence.view(batch_size, length, weight.shape[0], -1)
            projected = torch.einsum("hkn,bnhd->bkhd", weight, heads).reshape(batch_size, -1, channels)
        if seen is None:
            return projected, None
        ends = torch.full((1, 1), length, device=sequence.device) if lengths is None else lengths
        bias = self.mask(torch.zeros_like(ends), ends, seen, sequence.dtype)
        return projected, bias.expand(-1, -1, -1, projected.shape[1])


class WindowProjection(Projection):
    """Cuts the real tokens in windows and makes one projected position of each; subclasses say how.

    Args:
        config: The model's configuration.
        projected_length: k, the largest number of windows.
        layer_idx: Not used: nothing of a window depends on the layer.
        role: Not used: nor on keys or values.
    """

    def __init__(self, config: LinformerConfig, projected_length: int, layer_idx: int, role: int):
        super().__init__()
        self.projected_length = projected_length
        self.longest = config.max_position_embeddings

    def num_windows(self, length: int) -> int:
        """Number of windows of an input of `length` tokens."""
        return min(self.projected_length, length)

    def widest(self, length: int) -> int:
        """Number of tokens in the largest window of an input of `length` tokens."""
        return -(-length // self.num_windows(length))

    def window_edges(self, lengths: torch.Tensor, num_windows: int) -> torch.Tensor:
        """First tokens of the windows of rows of (b, 1) lengths, and the end of the last one: (b, num_windows + 1)."""
        edges = torch.arange(num_windows + 1, device=lengths.device)
        windows = lengths.clamp(max=self.projected_length)
        # the p-th of r tokens falls in window floor(p·k/r), so window s starts at token ceil(s·r/k)
        return (edges * lengths + windows - 1) // windows

    def reduce(self, windows: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
        """Makes (b, k, c) of windows (b, k, w, c); `inside` (b, k, w, 1) is False where there is no token."""
        raise NotImplementedError

    def forward(
        self, sequence: torch.Tensor, lengths: torch.Tensor | None = None, seen: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Reduces the windows; k' is the number of windows that the longest row has."""
        batch_size, length, channels = sequence.shape
        num_windows, widest = self.num_windows(length), self.widest(length)
        if torch.compiler.is_exporting():  # one graph for all lengths: as many and as wide as windows get, and masked
            num_windows, widest = self.num_windows(self.longest), self.widest(self.longest)
        even = lengths is None and not torch.compiler.is_exporting() and num_windows * widest == length
        if even and seen is None:
            return self.reduce(sequence.view(batch_size, num_windows, widest, channels), None), None

        if lengths is None:
            lengths = torch.full((1, 1), length, device=sequence.device)
        lengths = lengths.clamp(min=1)  # a row without tokens keeps one position: its scores stay finite
        edges = self.window_edges(lengths, num_windows).minimum(lengths)
        starts, ends = edges[:, :-1], edges[:, 1:]
        bias = self.mask(starts, ends, seen, sequence.dtype)  # also masks windows that a row does not have
        if even:
            return self.reduce(sequence.view(batch_size, num_windows, widest, channels), None), bias
        tokens = starts[..., None] + torch.arange(widest, device=sequence.device)  # (b, k', w)
        inside = tokens < ends[..., None]
        columns = tokens.clamp(max=length - 1).flatten(1)[..., None].expand(batch_size, -1, channels)
        windows = sequence.gather(1, columns).view(batch_size, num_windows, widest, channels)
        return self.reduce(windows, inside[..., None]), bias


class PoolingProjection(WindowProjection):
    """Windows without weights, which stand for all of their tokens: the scores get the logarithm of their number."""

    def slot_bias(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """The logarithm of the number of tokens."""
        return num_tokens.clamp(min=1).log()


class MeanPoolingProjection(PoolingProjection):
    """The mean of each window; with windows of one token, attention is full attention."""

    def reduce(self, windows: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
        """Makes (b, k, c) of windows (b, k, w, c)."""
        if inside is None:
            return windows.mean(dim=2)
        precise = torch.promote_types(windows.dtype, torch.float32)  # float16 ends at 65504
        total = torch.where(inside, windows, 0.0).sum(dim=2, dtype=precise)
        return (total / inside.sum(dim=2).clamp(min=1)).to(windows.dtype)


class MaxPoolingProjection(PoolingProjection):
    """The largest value of each channel in each window."""

    def reduce(self, windows: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
        """Makes (b, k, c) of windows (b, k, w, c)."""
        if inside is None:
            return windows.amax(dim=2)
        largest = torch.where(inside, windows, float("-inf")).amax(dim=2)
        return torch.where(inside.any(dim=2), largest, 0.0)


class ConvolutionProjection(WindowProjection):
    """A depthwise convolution whose kernel and stride are n_max/k, rounded up; `weight` is (c, 1, stride).

    The last window of an input may be cut short: it is filled up with zeros.
    """

    def __init__(self, config: LinformerConfig, projected_length: int, layer_idx: int, role: int):
        super().__init__(config, projected_length, layer_idx, role)
        self.config = config
        self.stride = -(-config.max_position_embeddings // projected_length)
        self.weight = nn.Parameter(torch.empty(config.hidden_size, 1, self.stride))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fills the weights, but for values that come from a checkpoint."""
        _initialize(self.weight, torch.tensor(1 / self.stride), self.config)

    def num_windows(self, length: int) -> int:
        """Number of windows of an input of `length` tokens."""
        return -(-length // self.stride)

    def widest(self, length: int) -> int:
        """Number of tokens in the largest window of an input of `length` tokens."""
        return min(self.stride, length)

    def window_edges(self, lengths: torch.Tensor, num_windows: int) -> torch.Tensor:
        """First tokens of the windows, and the end of the last one: (1, num_windows + 1)."""
        return torch.arange(num_windows + 1, device=lengths.device)[None] * self.stride

    def reduce(self, windows: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
        """Makes (b, k, c) of windows (b, k, w, c)."""
        if inside is not None:
            windows = torch.where(inside, windows, 0.0)
        return (windows * self.weight[:, 0, : windows.shape[2]].T).sum(dim=2)


PROJECTIONS: dict[str, type[MatrixProjection | WindowProjection]] = {
    "linear": MatrixProjection,
    "random": MatrixProjection,
    "mean_pooling": MeanPoolingProjection,
    "max_pooling": MaxPoolingProjection,
    "convolution": ConvolutionProjection,
}


def pooling_matrix(projected_length: int, length: int) -> torch.Tensor:
    """Mean pooling of `length` tokens to `projected_length` windows, as a matrix (k, n)."""
    tokens = torch.arange(length)
    matrix = torch.zeros(projected_length, length)
    matrix[tokens * projected_length // length, tokens] = 1.0
    return matrix / matrix.sum(dim=1, keepdim=True)


def _initialize(weight: torch.Tensor, pooling: torch.Tensor, config: LinformerConfig) -> None:
    if config.projection_initializer == "normal":
        init.normal_(weight, std=config.initializer_range)
    else:  # the noise makes projections differ that would stay alike in training
        init.copy_(weight, torch.empty_like(weight).normal_(std=0.002) + pooling.to(weight))
