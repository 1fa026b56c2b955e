"""Implementation `sm90` of `bsk::bsr_sddmm`: its plan, its descriptors, its launch."""

from typing import Any, NamedTuple

import torch

from ...calls.matmul import SddmmCall, lies_transposed
from ...core.arch import arch_of
from ...core.compat import hopper_options
from ...launch.descriptors import Descriptor, tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of
from ...launch.workspace import scratch, self_resetting_counters
from ..rows import SampledViews, sampled_product
from ..triton.pack import packed_pattern
from ..triton.shares import add_shares
from .sddmm import _sddmm_sm90_kernel
from .sddmm_config import SddmmSm90Config
from .sddmm_plan import TileSizes, sddmm_plan
from .spmm_launch import MAX_REGISTERS
from .tuning import sddmm_sm90_config, sddmm_sm90_shares


class SampledBlocks(NamedTuple):
    """Work tiles of a pattern, and where the blocks of its entries are.

    `source` [entries, grouped rows] holds stored blocks, or -1; None where entry i is block i.
    """

    tiles: torch.Tensor
    indices: torch.Tensor
    source: torch.Tensor | None


def sddmm(call: SddmmCall) -> torch.Tensor:
    """Sum over the batch of a @ b at the blocks of the pattern."""
    out = call.empty_out()
    if call.a.numel() == 0 or call.b.numel() == 0 or out.numel() == 0:
        return out.zero_()
    parts, problem = sampled_product(call)
    first = parts[0]
    orientation = (bool(lies_transposed(first.a)), bool(lies_transposed(first.b)))
    config = sddmm_sm90_config(problem, *orientation)
    blocks = _blocks(call, config)
    steps = first.a.shape[0] * cdiv(first.a.shape[2], config.TILE_K)
    work_tiles = blocks.tiles.shape[0] * config.row_tiles
    shares = sddmm_sm90_shares(problem, config, work_tiles, steps)
    if len(parts) == 1 and shares == 1:
        launch_sddmm_sm90(out, first, blocks, 1, config)
        return out
    # partial sums are in float32
    config = sddmm_sm90_config(problem, *orientation, partial=True)
    sums = scratch((len(parts) * shares, *out.shape), torch.float32, out.device)
    for i, views in enumerate(parts):
        part = sums[i * shares : (i + 1) * shares]
        launch_sddmm_sm90(part.flatten(0, 1), views, blocks, shares, config)
    add_shares(out, sums)
    return out


def _blocks(call: SddmmCall, config: SddmmSm90Config) -> SampledBlocks:
    """The work tiles of a call; low block rows are grouped."""
    indptr, indices, source = call.pattern.indptr, call.pattern.indices, None
    cols_b = cdiv(call.shape[1], config.BLOCK_W)
    if config.grouped_rows > 1:
        indptr, indices, source = packed_pattern(indptr, indices, cols_b, config.grouped_rows)
    sizes = TileSizes(config.tile_pieces, config.block_pieces, config.tile_rows)
    return SampledBlocks(sddmm_plan(indptr, indices, cols_b, sizes), indices, source)


def _descriptor(x: torch.Tensor, block: list[int], transposed: bool) -> Descriptor:
    """TMA descriptor of matrices [B, rows, columns], as they lie in memory."""
    seen = x.mT if transposed else x
    # a dimension of size 1 may have any stride, even one that TMA refuses
    *outer, _ = (
        stride if size > 1 else 16 for size, stride in zip(seen.shape, seen.stride(), strict=True)
    )
    return tensor_descriptor(seen, block, (*outer, 1))


def launch_sddmm_sm90(
    out: torch.Tensor,
    views: SampledViews,
    blocks: SampledBlocks,
    shares: int,
    config: SddmmSm90Config,
) -> None:
    """Write the blocks of sum over batch of a @ b, each of `shares` shares of it, to `out`.

    Parameters
    ----------
    out : [shares * nnzb, bh, bw], contiguous
    views : a [B, M, K] and b [B, K, N], laid out as the configuration says
    """
    batches, _, k = views.a.shape
    k_steps = cdiv(k, config.TILE_K)
    tiles = blocks.tiles.shape[0]
    total = tiles * config.row_tiles * shares
    if total == 0:
        return
    counter = self_resetting_counters(1, out.device)
    with on_device_of(out):
        args = (
            _descriptor(views.a, config.a_block(), config.A_TRANSPOSED),
            _descriptor(views.b, config.b_block(), config.B_TRANSPOSED),
            tensor_descriptor(out.view(-1, out.shape[2]), config.out_block()),
            blocks.tiles,
            blocks.indices,
            blocks.source,
            counter,
            tiles,
            k_steps,
            batches * k_steps,
            shares,
            out.shape[0] // shares,
            config,
        )
        programs = min(arch_of(out.device).num_sms, total)
        options: dict[str, Any] = {
            "num_warps": 4,
            "maxnreg": MAX_REGISTERS,
            **hopper_options(),
        }
        launch(_sddmm_sm90_kernel, programs, args, **options)
