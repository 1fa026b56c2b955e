"""Launching the Hopper product: descriptors, grid, and the second pass for rows that were cut."""

from typing import Any

import torch

from ...core.arch import arch_of
from ...core.launch import cdiv, launch, on_device_of, scratch
from ..sm90 import tensor_descriptor
from .config_sm90 import SpmmSm90Config
from .config_union_sm90 import SLIM_N, UnionSm90Config
from .plan import SpmmPlan
from .spmm_finish import addends_of, empty_partial, launch_spmm_reduce
from .spmm_sm90 import _spmm_sm90_kernel
from .spmm_union_sm90 import _spmm_union_sm90_kernel
from .union import UnionRows


def _descriptor(x: torch.Tensor, block: list[int], transposed: bool) -> Any:
    """TMA descriptor of a matrix, of its transpose where that is what lies row by row."""
    return tensor_descriptor(x.mT if transposed else x, block)


def launch_spmm_sm90(
    out: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    perm: torch.Tensor | None,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    plan: SpmmPlan,
    config: SpmmSm90Config,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    out : [M, N], x : [K, N]; rows contiguous, or columns where the configuration says transposed
    values : [nnzb, height, width] contiguous, as stored
    indices, perm : as in `launch_spmm`
    bias : [M] contiguous, residual : [M, N], any strides; or None
    """
    tensors = (out, values, x, bias, residual)
    _launch(_spmm_sm90_kernel, *tensors, (), (indices, perm), (), plan, config)


def launch_spmm_union_sm90(
    out: torch.Tensor,
    values: torch.Tensor,
    union: UnionRows,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    plan: SpmmPlan,
    config: UnionSm90Config,
) -> None:
    """The same product of blocks of 64 rows; `plan` lists the groups of `union`, not rows."""
    slim = _descriptor(x, config.x_block(SLIM_N), config.X_TRANSPOSED)
    tensors = (out, values, x, bias, residual)
    walk, sizes = (union.entries, union.own, union.ranks), (union.entries.shape[0],)
    _launch(_spmm_union_sm90_kernel, *tensors, (slim,), walk, sizes, plan, config)


def _launch(
    kernel: Any,
    out: torch.Tensor,
    values: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    more_descriptors: tuple[Any, ...],
    walk: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, ...],
    plan: SpmmPlan,
    config: SpmmSm90Config | UnionSm90Config,
) -> None:
    """Launch a kernel that finds its blocks by `walk`, and the second pass."""
    m, n = out.shape
    # the kernels do not know a batch; the second pass does
    out_b = out.unsqueeze(0)
    partial = empty_partial(out_b, plan, config.BLOCK_H)
    pieces_per_panel = plan.n_items * config.row_tiles
    total = pieces_per_panel * cdiv(n, config.tile_n)
    counter = scratch((1,), torch.int32, out.device, zero=True)
    a_matrix = values.view(-1, values.shape[2])
    with on_device_of(out):
        args = (
            _descriptor(out, config.out_block(), config.OUT_TRANSPOSED),
            partial,
            _descriptor(a_matrix, config.a_block(), False),
            _descriptor(x, config.x_block(), config.X_TRANSPOSED),
            *more_descriptors,
            bias,
            residual,
            None if residual is None else residual.stride(),
            plan.items,
            *walk,
            counter,
            m,
            n,
            *sizes,
            pieces_per_panel,
            total,
            config,
        )
        programs = min(arch_of(out.device).num_sms, total)
        launch(kernel, programs, args, num_warps=4, maxnreg=config.MAX_REGISTERS)
        if partial is not None:
            residual_b = None if residual is None else residual.unsqueeze(0)
            addends = addends_of(bias, residual_b)
            launch_spmm_reduce(out_b, partial, addends, config.ACTIVATION, plan)
