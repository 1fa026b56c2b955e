"""ALiBi and bias: the terms added to the scores of the tiles and blocks of one step."""

from typing import NamedTuple

import torch

from ...calls.attention import AttnSpec
from .softmax import LOG2_E
from .visits import Extent


class AddedScores(NamedTuple):
    """ALiBi slopes and bias of one dense problem, n = B * Hkv, in base-2 units."""

    slopes_log2: torch.Tensor | None
    """[n, G], in the dtype of computation."""
    bias: torch.Tensor | None
    """[B, Hkv, G, Sq, Sk], a view of what was given, in natural units."""
    extent: Extent
    dtype: torch.dtype

    def of_tile(self, heads: slice, queries: slice, keys: slice) -> torch.Tensor:
        """For the KV heads, queries and keys of a tile, [n, G * queries, keys]."""
        total = None
        if self.slopes_log2 is not None:
            total = self.slopes_log2[heads, :, None, None] * self._distance(queries, keys)
        if self.bias is not None:
            head = torch.arange(heads.start, heads.stop, device=self.bias.device)
            per_batch = self.bias.shape[1]
            part = self.bias[..., queries, keys][head // per_batch, head % per_batch]
            part = part.to(self.dtype) * LOG2_E
            total = part if total is None else total + part
        assert total is not None
        return total.flatten(1, 2)

    def _distance(self, queries: slice, keys: slice) -> torch.Tensor:
        """Minus the distance of each key from the position of each query."""
        assert self.slopes_log2 is not None
        device, shift = self.slopes_log2.device, self.extent.sk - self.extent.sq
        q_pos = torch.arange(queries.start + shift, queries.stop + shift, device=device)
        kv_pos = torch.arange(keys.start, keys.stop, device=device)
        return -(q_pos[:, None] - kv_pos).abs().to(self.dtype)

    def of_blocks(
        self,
        head_row: torch.Tensor,
        stacked: int,
        q_index: torch.Tensor,
        kv_pos: torch.Tensor,
    ) -> torch.Tensor:
        """For rows of query blocks, [rows, stacked * bq, keys].

        Parameters
        ----------
        head_row : int64 [rows], counting KV heads, or query heads if `stacked` is 1
        stacked : query heads of a row
        q_index : int64 [rows, bq]
        kv_pos : int64 [rows, keys]; what lies past the end of a sequence is hidden later
        """
        head_q = head_row[:, None] * stacked + torch.arange(stacked, device=head_row.device)
        q_index = q_index.clamp(max=max(self.extent.sq - 1, 0))[:, None, :, None]
        kv_pos = kv_pos.clamp(max=max(self.extent.sk - 1, 0))[:, None, None, :]
        total = None
        if self.slopes_log2 is not None:
            distance = (q_index + (self.extent.sk - self.extent.sq) - kv_pos).abs()
            slopes = self.slopes_log2.flatten()[head_q][:, :, None, None]
            total = -slopes * distance.to(self.dtype)
        if self.bias is not None:
            _, kv_heads, group, *_ = self.bias.shape
            head_q = head_q[:, :, None, None]
            kv_head = head_q // group
            place = (kv_head // kv_heads, kv_head % kv_heads, head_q % group, q_index, kv_pos)
            part = self.bias[place].to(self.dtype) * LOG2_E
            total = part if total is None else total + part
        assert total is not None
        return total.flatten(1, 2)


def added_scores(
    spec: AttnSpec, extent: Extent, batch: int, heads: tuple[int, int], dtype: torch.dtype
) -> AddedScores | None:
    """What `spec` adds to the scores of `heads` query and KV heads, None if nothing."""
    if not spec.is_biased:
        return None
    heads_q, heads_kv = heads
    group = heads_q // heads_kv
    slopes = spec.alibi_slopes
    if slopes is not None:
        if slopes.dim() == 2 and extent.sequence is not None:
            slopes = slopes[extent.sequence]
        slopes = (slopes.to(dtype) * LOG2_E).expand(batch, -1).reshape(-1, group)
    bias = spec.bias
    if bias is not None:
        bias = bias.expand(batch, heads_q, -1, -1).unflatten(1, (heads_kv, group))
    return AddedScores(slopes, bias, extent, dtype)
