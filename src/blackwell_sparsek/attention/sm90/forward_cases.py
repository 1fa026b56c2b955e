"""Launches of the Hopper forward that are built without a GPU: the main choices of `tuning`."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...core.compile_cases import CompileCase, compile_cases
from ...device.records import CuSeqlens, MaskLists
from ...launch.descriptors import descriptor_type
from ..operands import score_factors
from .config import make_forward_config
from .forward import _attn_fwd_sm90_kernel


class Call(NamedTuple):
    """What sets a launch apart."""

    consumers: int
    tile_d: int
    tile_dv: int
    block_size: tuple[int, int] | None = None
    sinks: bool = False
    softcap: bool = False
    packed: bool = False
    dtype: torch.dtype = torch.bfloat16
    max_spill_bytes: int = 0
    banded: bool = False
    long: bool = False

    @property
    def name(self) -> str:
        """Name of the case."""
        parts = [str(self.dtype).split(".")[-1], f"d{self.tile_d}-{self.tile_dv}"]
        parts += [f"consumers{self.consumers}"]
        parts += [f"blocks{self.block_size[0]}x{self.block_size[1]}"] if self.block_size else []
        parts += ["sinks"] if self.sinks else []
        parts += ["softcap"] if self.softcap else []
        parts += ["packed"] if self.packed else []
        parts += ["banded"] if self.banded else []
        parts += ["long"] if self.long else []
        return f"attn_fwd_sm90/{'-'.join(parts)}"


# Spills of masks are in the code for partial blocks, whose bits take 64 registers of a consumer,
# others before and after the loop over pieces of work, or where a scout looks up rows.
CALLS = (
    Call(2, 128, 128),
    Call(2, 128, 128, dtype=torch.float16),
    Call(1, 128, 128),
    Call(3, 64, 64),
    Call(3, 64, 64, long=True),
    Call(2, 64, 64),
    Call(1, 64, 64),
    Call(2, 128, 64),
    Call(2, 128, 128, long=True),
    Call(2, 128, 128, banded=True),
    Call(2, 128, 128, banded=True, dtype=torch.float16),
    Call(2, 64, 128, banded=True),
    Call(3, 64, 64, banded=True),
    Call(2, 64, 64, banded=True),
    Call(1, 64, 64, banded=True),
    Call(1, 64, 64, sinks=True, softcap=True, banded=True),
    Call(2, 128, 128, sinks=True, softcap=True, long=True),
    Call(2, 128, 128, sinks=True, softcap=True, banded=True, max_spill_bytes=32),
    Call(3, 64, 64, sinks=True),
    Call(2, 128, 128, (128, 128), max_spill_bytes=640),
    Call(2, 128, 128, (128, 16), max_spill_bytes=1792),
    Call(1, 128, 128, (64, 64), max_spill_bytes=192),
    Call(1, 128, 128, (64, 128), max_spill_bytes=192),
    Call(1, 128, 128, (64, 16), max_spill_bytes=256),
    Call(2, 64, 64, (256, 256), max_spill_bytes=192),
    Call(1, 64, 64, (64, 64), max_spill_bytes=192),
    Call(2, 128, 128, (128, 128), sinks=True, softcap=True, max_spill_bytes=1024),
    Call(2, 128, 128, packed=True),
    Call(1, 128, 128, packed=True),
    Call(3, 64, 64, packed=True),
    Call(2, 64, 64, packed=True),
    Call(1, 64, 64, packed=True),
    Call(2, 128, 128, sinks=True, softcap=True, packed=True),
    Call(2, 128, 128, (128, 128), packed=True, max_spill_bytes=640),
    Call(1, 64, 64, (64, 16), packed=True, max_spill_bytes=256),
)


def attn_fwd_sm90_case(call: Call) -> CompileCase:
    """A launch of the kernel; a mask comes with its order of rows."""
    block_q, block_kv = call.block_size or (None, None)
    options = {"packed": call.packed, "banded": call.banded, "long": call.long}
    config = make_forward_config(call.consumers, call.tile_d, call.tile_dv, block_kv, **options)
    # packed descriptors have one dimension more
    lead = (1,) if call.packed else ()
    return CompileCase(
        name=call.name,
        kernel=_attn_fwd_sm90_kernel,
        args={
            "out_desc": descriptor_type((*lead, *config.out_block()), call.dtype),
            "lse_ptr": torch.float32,
            "q_desc": descriptor_type((*lead, *config.q_block()), call.dtype),
            "k_desc": descriptor_type((*lead, *config.k_block()), call.dtype),
            "v_desc": descriptor_type((*lead, *config.v_block()), call.dtype),
            "cu_seqlens": CuSeqlens(*(torch.int32 if call.packed else None,) * 2),
            "lse_head_stride": 4096,
            "sinks_ptr": torch.float32 if call.sinks else None,
            "workspace": (
                torch.int32,
                None if block_q is None or call.packed else torch.int32,
                torch.float32 if config.SHARED_TAIL else None,
            ),
            "block_lists": None if block_q is None else MaskLists(*(torch.int32,) * 5, block_q),
            "mask_batch_step": 0,
            "mask_head_step": 0,
            "q_len": 4096,
            "kv_len": 4096,
            "left": 2**30,
            "right": 0,
            "num_planes": 32,
            "section": 32,
            "dynamic": 1,
            "share": 17,
            "q_heads": 32,
            "group_size": 4,
            "score": score_factors(0.1, 30.0 if call.softcap else 0.0),
            "CFG": config,
        },
        archs=(90,),
        num_warps=4,
        options={"maxnreg": config.MAX_REGISTERS, "launch_pdl": config.OVERLAP},
        expect={"wgmma.mma_async": 1},
        max_spill_bytes=call.max_spill_bytes,
    )


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for call in CALLS:
        yield attn_fwd_sm90_case(call)
