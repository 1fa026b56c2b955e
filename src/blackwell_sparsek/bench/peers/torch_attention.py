"""torch's own attention: each backend of SDPA, and FlexAttention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..case import Contender, Peer
from ..problems.attention import AttentionInputs

CUDNN, FLASH, SDPA = "sdpa_cudnn", "sdpa_flash", "sdpa"
DENSE, FLEX = "sdpa_dense", "flex"


def _sdpa(inputs: AttentionInputs, backends: list[SDPBackend]) -> Contender:
    grouped = bool(inputs.problem.kv_heads)

    def call(x: AttentionInputs) -> torch.Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(
                x.q, x.k, x.v, is_causal=x.problem.causal, enable_gqa=grouped
            )

    return contender_of(inputs, call)


def contender_of(
    inputs: AttentionInputs,
    call: Callable[[AttentionInputs], torch.Tensor],
    notes: dict[str, Any] | None = None,
) -> Contender:
    """A contender whose `call` takes inputs and gives `[B, H, S, D]`."""
    replicas = tuple(partial(call, x) for x in inputs.others())
    return Contender(partial(call, inputs), inputs.check(), inputs.flops, replicas, notes)


def _dense(inputs: AttentionInputs) -> Contender:
    """What people do without a sparse kernel: the same attention with nothing left out."""
    whole = AttentionInputs(inputs.problem.dense(), inputs.q, inputs.k, inputs.v, None)
    return _sdpa(whole, _best_backends(inputs.q))


def _best_backends(q: torch.Tensor) -> list[SDPBackend]:
    order = [SDPBackend.CUDNN_ATTENTION] if q.is_cuda else []
    return [*order, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _flex(inputs: AttentionInputs) -> Contender:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    options: dict[str, Any] = {"block_mask": flex_mask(inputs)}
    options["enable_gqa"] = bool(inputs.problem.kv_heads)
    block = inputs.problem.block
    if block is not None and min(block) < 128:
        # its tiles must divide the blocks, and those that it takes by itself are 128 rows high
        options["kernel_options"] = {"BLOCK_M": min(128, block[0]), "BLOCK_N": min(64, block[1])}

    def call(x: AttentionInputs) -> torch.Tensor:
        out: torch.Tensor = compiled(x.q, x.k, x.v, **options)
        return out

    return contender_of(inputs, call)


def flex_mask(inputs: AttentionInputs) -> Any:
    """The block mask of FlexAttention for a problem; None where everything is visible."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    p = inputs.problem
    if inputs.keep is not None and p.block is not None:
        counts, order = block_lists(inputs.keep)
        nothing = torch.zeros_like(counts)
        return BlockMask.from_kv_blocks(
            nothing[None],
            order[None],
            counts[None],
            order[None],
            BLOCK_SIZE=p.block,
            seq_lengths=(p.length, p.length),
        )
    if not p.causal and p.window is None:
        return None
    window, causal = p.window, p.causal

    def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
        if window is None:
            return q >= kv
        inside = q - kv < window
        return inside & (q >= kv) if causal else inside & (kv - q < window)

    # compiled, because the plain one makes a mask of Sq x Sk elements first
    return create_block_mask(
        seen, None, None, p.length, p.length, device=inputs.q.device.type, _compile=True
    )


def block_lists(keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number and indices of the kept blocks of each row, int32, indices padded with the rest.

    Examples
    --------
    >>> import torch
    >>> counts, order = block_lists(torch.tensor([[[False, True, True]]]))
    >>> counts.tolist(), order.tolist()
    ([[2]], [[[1, 2, 0]]])
    """
    counts = keep.sum(-1, dtype=torch.int32)
    order = keep.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts, order


def on_gpu(inputs: AttentionInputs) -> str | None:
    """Why a peer that runs on GPUs alone does not take part, or None."""
    return None if inputs.q.is_cuda else "needs a CUDA GPU"


def _plain_band(inputs: AttentionInputs) -> str | None:
    return None if inputs.shown == "band" else f"has no {inputs.shown} mask"


def _plain_band_on_gpu(inputs: AttentionInputs) -> str | None:
    return on_gpu(inputs) or _plain_band(inputs)


def _flex_supports(inputs: AttentionInputs) -> str | None:
    if (reason := on_gpu(inputs)) is not None:
        return reason
    block = inputs.problem.block
    if block is not None and min(block) < 16:
        return f"has no blocks of {block[0]}x{block[1]}"
    return None


def _sdpa_peer(name: str, label: str, backend: SDPBackend) -> Peer:
    return Peer(
        name, label, partial(_sdpa, backends=[backend]), supports=_plain_band_on_gpu, rival=True
    )


sdpa_cudnn = _sdpa_peer(CUDNN, "SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION)
sdpa_flash = _sdpa_peer(FLASH, "SDPA, flash (FA2)", SDPBackend.FLASH_ATTENTION)
sdpa = Peer(
    SDPA,
    "SDPA, torch's choice",
    lambda inputs: _sdpa(inputs, _best_backends(inputs.q)[-3:]),
    supports=lambda inputs: (
        _plain_band(inputs) or ("measured by backend" if inputs.q.is_cuda else None)
    ),
    rival=True,
)
sdpa_dense = Peer(
    DENSE,
    "SDPA without the mask's sparsity",
    _dense,
    supports=lambda inputs: "is the case itself" if inputs.shown == "band" else None,
)
flex = Peer(FLEX, "FlexAttention, compiled", _flex, supports=_flex_supports, rival=True)
