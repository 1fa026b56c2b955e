"""The inside of a band on a CPU: all tiles of queries in one call of PyTorch's fused attention.

Away from the ends of a sequence, every tile of queries sees the same number of keys, shifted by the
tile. Overlapping views of k and v (no copy) make a batch of these tiles, with one mask for all.
"""

import torch

from ..formats.attention_spec import AttnSpec
from .visits import Extent, band_visible

TILE_Q = 64
# Below this many tiles the two ends, which are not done here, are most of the work.
MIN_TILES = 4
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_inside(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttnSpec,
    extent: Extent,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[int, int]:
    """Write the rows of `out` and `lse` whose tiles see whole windows; return their range.

    q [B, Hq, Sq, D], k and v [B, Hkv, Sk, D]; out [B * Hkv, G, Sq, D] and lse [B * Hkv, G, Sq] in
    float32. The range is empty where this cannot be used: on other devices, for open bands,
    softcap or sinks, in other dtypes than float32, and for values wider than keys.
    """
    first, last = _inside(q, v, spec, extent)
    if first == last:
        return 0, 0
    batch, heads_kv = k.shape[:2]
    group = q.shape[1] // heads_kv
    left, right = spec.band.scalars()
    tiles, keys = last - first, TILE_Q + left + right
    start = first * TILE_Q
    key_start = start + extent.sk - extent.sq - left
    visible = band_visible(
        spec.band,
        torch.arange(TILE_Q)[:, None],
        torch.arange(keys) - left,
        Extent(0, 0),
    )
    # -inf added to a score hides it; the fused kernel takes no other mask without a copy
    mask = torch.zeros((), dtype=q.dtype).masked_fill(~visible, -torch.inf)
    rows = slice(start, last * TILE_Q)
    for b in range(batch):
        for h in range(heads_kv):
            q_tiles = q[b, h * group : (h + 1) * group, rows]
            q_tiles = q_tiles.unfold(1, TILE_Q, TILE_Q).permute(1, 0, 3, 2)
            k_tiles, v_tiles = (_windows(x[b, h], key_start, tiles, keys, group) for x in (k, v))
            tile_out, tile_lse = _FUSED(
                q_tiles, k_tiles, v_tiles, 0.0, False, attn_mask=mask, scale=spec.scale
            )
            plane = b * heads_kv + h
            out[plane, :, rows] = tile_out.transpose(0, 1).flatten(1, 2)
            lse[plane, :, rows] = tile_lse.transpose(0, 1).flatten(1, 2)
    return rows.start, rows.stop


def _inside(q: torch.Tensor, v: torch.Tensor, spec: AttnSpec, extent: Extent) -> tuple[int, int]:
    """First and one past the last tile of queries whose window lies inside of the keys."""
    band = spec.band
    usable = (
        q.device.type == "cpu"
        # for 16-bit types the fused kernel's exp is off by 1e-4, and so would be lse
        and q.dtype == torch.float32
        and None not in (band.left, band.right)
        and spec.softcap == 0.0
        and spec.sinks is None
        and q.shape[-1] == v.shape[-1]
        and q.numel() > 0
    )
    if not usable:
        return 0, 0
    left, right = band.scalars()
    shift = extent.sk - extent.sq
    first = max(0, -((shift - left) // TILE_Q))
    last = min(extent.sq, extent.sk - right - shift) // TILE_Q
    return (first, last) if last - first >= MIN_TILES else (0, 0)


def _windows(x: torch.Tensor, start: int, tiles: int, width: int, group: int) -> torch.Tensor:
    """Overlapping views [tiles, group, width, D] of x [S, D], a tile of queries apart."""
    token, dim = x.stride()
    return x[start:].as_strided(
        (tiles, group, width, x.shape[1]),
        (TILE_Q * token, 0, token, dim),
        x.storage_offset() + start * token,
    )
