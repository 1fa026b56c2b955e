"""Launches of the Hopper backward that are built without a GPU: the main choices of `tuning`."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...core.compile_cases import CompileCase, compile_cases
from ...device.records import MaskLists
from ...launch.descriptors import descriptor_type
from ..operands import gradient_factors
from .backward import _attn_bwd_sm90_kernel
from .backward_shared import WorkPointers
from .config import make_backward_config


class Call(NamedTuple):
    """What sets a launch apart."""

    tile_d: int
    tile_dv: int
    block_size: tuple[int, int] | None = None
    softcap: bool = False
    ordered: bool = False
    dtype: torch.dtype = torch.bfloat16
    max_spill_bytes: int = 0

    @property
    def name(self) -> str:
        """Name of the case."""
        parts = [str(self.dtype).split(".")[-1], f"d{self.tile_d}-{self.tile_dv}"]
        parts += [f"blocks{self.block_size[0]}x{self.block_size[1]}"] if self.block_size else []
        parts += ["softcap"] if self.softcap else []
        parts += ["ordered"] if self.ordered else []
        return f"attn_bwd_sm90/{'-'.join(parts)}"


# What spills is in the code for masked tiles, whose bits take 64 registers of a consumer.
CALLS = (
    Call(128, 128, max_spill_bytes=192),
    Call(128, 128, dtype=torch.float16, max_spill_bytes=192),
    Call(64, 64, max_spill_bytes=192),
    Call(128, 64),
    Call(128, 128, softcap=True, max_spill_bytes=512),
    Call(128, 128, (128, 128), max_spill_bytes=1536),
    Call(64, 64, (64, 128), max_spill_bytes=2560),
    Call(128, 128, ordered=True, max_spill_bytes=192),
    Call(64, 64, ordered=True, max_spill_bytes=192),
    Call(128, 128, (128, 128), ordered=True, max_spill_bytes=1536),
)


def attn_bwd_sm90_case(call: Call) -> CompileCase:
    """A launch of the kernel; a mask comes with its order of columns."""
    config = make_backward_config(call.tile_d, call.tile_dv, call.block_size, call.ordered)
    block_kv = call.block_size[1] if call.block_size else None
    k_type = descriptor_type(config.k_block(), call.dtype)
    v_type = descriptor_type(config.v_block(), call.dtype)
    row_type = descriptor_type(config.row_block(), torch.float32)
    return CompileCase(
        name=call.name,
        kernel=_attn_bwd_sm90_kernel,
        args={
            "dq_desc": descriptor_type(config.dq_block(), torch.float32),
            "dk_desc": k_type,
            "dv_desc": v_type,
            "dout_desc": descriptor_type(config.dout_block(), call.dtype),
            "q_desc": descriptor_type(config.q_block(), call.dtype),
            "k_desc": k_type,
            "v_desc": v_type,
            "lse_desc": row_type,
            "delta_desc": row_type,
            "work_ptrs": WorkPointers(
                torch.int32,
                None if block_kv is None else torch.int32,
                torch.int32 if call.ordered else None,
                *((torch.int32 if call.ordered and block_kv is not None else None),) * 2,
            ),
            "block_lists": None if block_kv is None else MaskLists(*(torch.int32,) * 5, block_kv),
            "mask_batch_step": 0,
            "mask_head_step": 0,
            "q_len": 4096,
            "kv_len": 4096,
            "left": 2**30,
            "right": 0,
            "num_batch_heads": 32,
            "raster_group": 32,
            "visit_heads": 1,
            "q_heads": 32,
            "group_size": 4,
            "score": gradient_factors(0.1, 30.0 if call.softcap else 0.0, call.dtype),
            "CFG": config,
        },
        archs=(90,),
        num_warps=4,
        options={"maxnreg": config.MAX_REGISTERS},
        expect={"wgmma.mma_async": 1},
        max_spill_bytes=call.max_spill_bytes,
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for call in CALLS:
        yield attn_bwd_sm90_case(call)
