"""Launches of the portable backward kernels that are built without a GPU.

The tiles are those that `tuning.attention_bwd` picks on each GPU; a test of the tuning compares
them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...core.compile_cases import CompileCase, compile_cases
from ...device.records import CuSeqlens, Heads, MaskLists, Strides
from ..operands import AttnBwdStrides, gradient_factors
from .backward import KeyGradients, RowTerms, _attn_dkdv_kernel, _attn_dq_kernel
from .tuning import AttnBwdConfig

HEADS, KV_HEADS, TOKENS = 32, 8, 4096
KERNELS = {"dq": _attn_dq_kernel, "dkdv": _attn_dkdv_kernel}


class Call(NamedTuple):
    """What sets a launch apart. `everything`: packed sequences and a softcap."""

    dtype: torch.dtype
    head_dim: int
    block_size: tuple[int, int] | None = None
    everything: bool = False
    precision: str = "ieee"

    def name(self, kernel: str, sm: int) -> str:
        """Name of the case."""
        parts = [str(self.dtype).split(".")[-1], f"d{self.head_dim}"]
        parts += [f"blocks{self.block_size[0]}x{self.block_size[1]}"] if self.block_size else []
        parts += ["everything"] if self.everything else []
        parts += [self.precision] if self.dtype == torch.float32 else []
        return f"attn_{kernel}/{'-'.join(parts)}-sm_{sm}"


HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32

# tile_m, tile_n, num_warps, num_stages of each kernel by architecture
Tile = tuple[int, int, int, int]
BUILDS: Mapping[Call, Mapping[int, tuple[Tile, Tile]]] = {
    Call(BRAIN, 64): {
        80: ((128, 64, 8, 2), (32, 128, 8, 2)),
        89: ((128, 64, 8, 2), (32, 128, 8, 2)),
        90: ((128, 64, 4, 3), (64, 64, 4, 3)),
        100: ((128, 64, 8, 2), (64, 128, 8, 1)),
        120: ((128, 64, 8, 2), (32, 128, 8, 2)),
    },
    Call(BRAIN, 128): {
        80: ((128, 64, 8, 2), (64, 64, 8, 2)),
        89: ((128, 32, 8, 2), (64, 64, 8, 2)),
        90: ((128, 64, 8, 3), (64, 64, 4, 2)),
        100: ((128, 64, 8, 2), (64, 128, 8, 1)),
        120: ((128, 32, 8, 2), (64, 64, 8, 2)),
    },
    Call(BRAIN, 128, (128, 128)): {
        80: ((128, 64, 8, 2), (64, 64, 8, 2)),
        89: ((128, 32, 8, 2), (64, 64, 8, 2)),
        90: ((128, 64, 8, 3), (64, 64, 4, 2)),
        100: ((128, 64, 8, 2), (64, 128, 8, 1)),
        120: ((128, 32, 8, 2), (64, 64, 8, 2)),
    },
    Call(HALF, 256): {
        80: ((64, 32, 8, 2), (32, 32, 8, 2)),
        89: ((32, 32, 8, 2), (32, 32, 8, 2)),
        90: ((64, 32, 8, 2), (32, 64, 8, 2)),
        100: ((64, 32, 8, 2), (64, 64, 8, 1)),
        120: ((32, 32, 8, 2), (32, 32, 8, 2)),
    },
    Call(BRAIN, 128, (64, 64)): {
        80: ((64, 64, 4, 2), (64, 64, 8, 2)),
        90: ((64, 64, 4, 3), (64, 64, 4, 2)),
    },
    Call(BRAIN, 64, (128, 16)): {
        80: ((128, 64, 8, 2), (64, 16, 4, 2)),
        90: ((128, 64, 8, 3), (64, 16, 4, 3)),
    },
    Call(BRAIN, 128, (16, 16)): {
        80: ((16, 64, 2, 2), (64, 16, 4, 2)),
        90: ((16, 64, 2, 3), (64, 16, 4, 2)),
    },
    Call(HALF, 80, everything=True): {
        80: ((128, 64, 8, 2), (64, 64, 8, 2)),
        90: ((128, 64, 8, 3), (64, 64, 4, 2)),
    },
    Call(FLOAT, 128, precision="tf32"): {
        80: ((32, 32, 8, 2), (32, 32, 8, 2)),
        90: ((32, 32, 8, 2), (32, 32, 8, 2)),
    },
    Call(FLOAT, 128): {
        80: ((32, 32, 8, 1), (32, 32, 8, 1)),
        90: ((32, 32, 8, 1), (32, 32, 8, 1)),
    },
}


def _arguments(call: Call, kernel: str) -> dict[str, Any]:
    def strides(heads: int) -> Strides:
        row = heads * call.head_dim
        return Strides(0 if call.everything else TOKENS * row, call.head_dim, row)

    query, key = strides(HEADS), strides(KV_HEADS)
    owner = 0 if kernel == "dq" else 1
    lists, block = None, None
    if call.block_size is not None:
        # the lists carry the side of a block that the kernel's own tile lies in
        lists = MaskLists(*(torch.int32,) * 5, call.block_size[owner])
        block = call.block_size[1 - owner]
    if kernel == "dq":
        own = {"dq_ptr": call.dtype, "BLOCK_KV": block}
        layout = AttnBwdStrides(query, key, key, query, dq=query)
    else:
        own = {"gradients": KeyGradients(call.dtype, call.dtype), "BLOCK_Q": block}
        layout = AttnBwdStrides(query, key, key, query, dk=key, dv=key)
    return {
        **own,
        **{f"{name}_ptr": call.dtype for name in ("q", "k", "v", "dout")},
        "row_terms": RowTerms(torch.float32, torch.float32),
        "cu_seqlens": CuSeqlens(*((torch.int32 if call.everything else None),) * 2),
        "block_lists": lists,
        "strides": layout,
        "lse_head_stride": TOKENS,
        "q_len": TOKENS,
        "kv_len": TOKENS,
        "left": 2**30,
        "right": 0,
        "mask_batch_step": 0,
        "mask_head_step": 0,
        "heads": Heads(HEADS, HEADS // KV_HEADS),
        "score": gradient_factors(0.1, 30.0 if call.everything else 0.0, call.dtype),
        "HEAD_DIM": call.head_dim,
        "HEAD_DIM_V": call.head_dim,
    }


def _accepted_spills(call: Call, kernel: str, sm: int) -> int:
    if kernel == "dkdv" and sm == 90 and call.dtype != torch.float32:
        # the loop with mask code; measured, tiles that do not spill are slower (see the tuning)
        return 2048
    # padding, softcap and packed sequences at once are rare; fp32 runs on the CUDA cores
    if call.everything or (call.precision == "ieee" and call.dtype == torch.float32):
        return 192
    # a few registers around the loop with mask code
    return 96 if kernel == "dkdv" else 0


def compile_case(call: Call, kernel: str, sm: int, tile: Tile) -> CompileCase:
    """One launch of kernel `dq` or `dkdv`."""
    config = AttnBwdConfig(*tile, call.precision)
    own_rows = config.tile_m if kernel == "dq" else config.tile_n
    # Hopper's own products, wherever rows fill a warp group
    wide = sm == 90 and own_rows >= 64 and call.dtype != torch.float32
    return CompileCase(
        call.name(kernel, sm),
        KERNELS[kernel],
        {
            **_arguments(call, kernel),
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "PRECISION": config.precision,
        },
        archs=(sm,),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_spill_bytes=_accepted_spills(call, kernel, sm),
        expect={"wgmma.mma_async": 1} if wide else {},
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for call, tiles in BUILDS.items():
        for sm, pair in tiles.items():
            for kernel, tile in zip(KERNELS, pair, strict=True):
                yield compile_case(call, kernel, sm, tile)
