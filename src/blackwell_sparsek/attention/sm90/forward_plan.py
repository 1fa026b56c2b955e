"""The launch of the Hopper forward, described without a framework (see `launch.description`)."""

from typing import TYPE_CHECKING, Any

from ...core.compat import hopper_options
from ...device.gates import KeyGates
from ...launch.description import KernelLaunch
from ...launch.descriptors import Descriptor, packed_descriptor, tensor_descriptor
from ...masks.band import EVERYTHING
from ..operands import kernel_operands
from .config import AttnFwdSm90Config
from .forward import _attn_fwd_sm90_kernel
from .forward_producer import Workspace
from .schedule import ForwardSchedule, forward_schedule, forward_work_tiles

if TYPE_CHECKING:
    from ...calls.attention import AttentionCall


def schedule_of_call(
    call: "AttentionCall", order: Any, config: AttnFwdSm90Config, sms: int
) -> ForwardSchedule | None:
    """How programs share the work of a call; None if there is no work.

    `order` is that of `Workspace`, and None for packed sequences.
    """
    q, spec = call.q, call.spec
    packed = spec.cu_seqlens_q is not None
    batch = spec.cu_seqlens_q.numel() - 1 if spec.cu_seqlens_q is not None else q.shape[0]
    q_len, tokens = (spec.max_q, q.shape[0]) if packed else (q.shape[2], None)
    work_tiles = forward_work_tiles(config, batch, q.shape[1], q_len, tokens)
    assert order is None or not packed
    if order is not None and spec.block_mask is not None:
        work_tiles = order.numel() * (spec.block_mask.block_size[0] // config.tile_m)
    if work_tiles == 0:
        return None
    even = spec.block_mask is None and spec.band == EVERYTHING and not packed
    return forward_schedule(config, sms, work_tiles, call.k.shape[-2], even)


def plan_attn_fwd_sm90(
    call: "AttentionCall",
    out: Any,
    lse: Any,
    workspace: Workspace,
    raster_group: int,
    schedule: ForwardSchedule,
    config: AttnFwdSm90Config,
    gates: KeyGates | None = None,
) -> KernelLaunch:
    """The launch that fills `out` and `lse`; parameters as in `launch.launch_attn_fwd_sm90`.

    Without a split tail, `workspace.parts` is not read and can be any fp32 tensor, such as `lse`.
    """
    operands = kernel_operands(call)
    args = (
        descriptor_of(out, config.out_block()),
        lse,
        descriptor_of(call.q, config.q_block()),
        descriptor_of(call.k, config.k_block()),
        descriptor_of(call.v, config.v_block()),
        operands.sinks,
        operands.cu_seqlens,
        workspace,
        operands.block_lists,
        *operands.mask_steps,
        lse.stride(-2),
        *operands.lengths,
        *operands.band,
        operands.batch * operands.heads.q,
        raster_group,
        schedule.dynamic,
        schedule.tail_share,
        *operands.heads,
        operands.score,
        operands.slopes,
        operands.bias,
        gates,
        config,
    )
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": config.MAX_REGISTERS}
    options |= {"launch_pdl": config.PDL, **hopper_options()}
    return KernelLaunch(_attn_fwd_sm90_kernel, schedule.programs, args, options)


def descriptor_of(x: Any, block: tuple[int, int, int, int]) -> Descriptor:
    """The TMA descriptor of [B, H, S, D], or of packed [T, H, D]."""
    if x.dim() == 3:
        return packed_descriptor(x, block)
    return tensor_descriptor(x, block, tma_strides(x))


def tma_strides(x: Any) -> tuple[int, ...]:
    """Strides for a descriptor; for dimensions of size 1, replaced by ones that TMA accepts."""
    shape, strides = x.shape, x.stride()
    if 1 not in shape:
        return strides
    step = 16 // x.dtype.itemsize
    row = -(-shape[-1] // step) * step
    outer = zip(shape[:-1], strides, strict=False)
    return (*(stride if size > 1 else row for size, stride in outer), 1)
