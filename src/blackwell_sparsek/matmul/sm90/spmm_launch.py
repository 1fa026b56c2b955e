"""Launching the Hopper product: descriptors, grid, and the second pass for rows that were cut."""

from typing import Any

import torch

from ...core.arch import arch_of
from ...launch.descriptors import tensor_descriptor
from ...launch.launcher import cdiv, launch, on_device_of, resting_words
from ..plan import SpmmPlan
from ..triton.spmm import addends_of, empty_partial, launch_spmm_reduce
from .config import PAIR, SLAB_COLUMNS, SpmmSm90Config
from .row_pairs import PairPlan
from .spmm import _spmm_sm90_kernel

# Registers per thread the kernel is compiled for; the roles then trade them among themselves.
MAX_REGISTERS = 168
# Panels of the dense operand that run together: they share blocks through the L2 (50 MB) and stay
# in it themselves. One panel after the other read 780 MB from memory where 300 would do.
SECTION_BYTES = 16 * 2**20


def _descriptor(x: torch.Tensor, block: list[int], transposed: bool) -> Any:
    """TMA descriptor of a matrix, of its transpose where that is what lies row by row."""
    return tensor_descriptor(x.mT if transposed else x, block)


def _x_descriptor(x: torch.Tensor, config: SpmmSm90Config) -> Any:
    """TMA descriptor of X [K, N]; of its slabs of columns [N / 64, K, 64] for wide copies."""
    if not config.WIDE:
        return _descriptor(x, config.x_block(), config.X_TRANSPOSED)
    slabs = x.view(x.shape[0], -1, SLAB_COLUMNS).transpose(0, 1)
    return tensor_descriptor(slabs, config.x_block())


def launch_spmm_sm90(
    out: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    perm: torch.Tensor | None,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    plan: SpmmPlan | PairPlan,
    config: SpmmSm90Config,
) -> None:
    """Write activation(A @ x + bias) + residual to `out`.

    Parameters
    ----------
    out : [M, N], x : [K, N]; rows contiguous, or columns where the configuration says transposed
    values : [nnzb, height, width] contiguous, as stored
    indices, perm : as in `launch_spmm`; of pairs of rows `cols` and `entries`
    bias : [M] contiguous, residual : [M, N], any strides; or None
    """
    m, n = out.shape
    # the kernel does not know a batch; the second pass does
    out_b = out.unsqueeze(0)
    partial = empty_partial(out_b, plan, config.BLOCK_H)
    row_pieces, panels = plan.n_items * config.row_tiles, cdiv(n, config.tile_n)
    section = max(1, SECTION_BYTES // (x.shape[0] * config.tile_n * x.element_size()))
    counter = resting_words(1, out.device)
    a_matrix = values.view(-1, values.shape[2])
    with on_device_of(out):
        args = (
            _descriptor(a_matrix, config.a_block(), False),
            _x_descriptor(x, config),
            _descriptor(out, config.out_block(), config.OUT_TRANSPOSED),
            partial,
            bias,
            residual,
            None if residual is None else residual.stride(),
            plan.items,
            indices,
            perm,
            counter,
            m,
            n,
            row_pieces,
            panels,
            section,
            config,
        )
        cluster = PAIR if config.PAIRED else 1
        programs = min(arch_of(out.device).num_sms // cluster, row_pieces * panels)
        options = {"num_warps": 4, "maxnreg": MAX_REGISTERS}
        launch(_spmm_sm90_kernel, programs, args, cluster=cluster, **options)
        if partial is not None and isinstance(plan, SpmmPlan):
            residual_b = None if residual is None else residual.unsqueeze(0)
            addends = addends_of(bias, residual_b)
            launch_spmm_reduce(out_b, partial, addends, config.ACTIVATION, plan)
