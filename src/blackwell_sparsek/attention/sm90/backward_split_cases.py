"""Launches of the split Hopper backward that are built without a GPU."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...core.compile_cases import CompileCase, compile_cases
from ...device.records import MaskLists
from ...launch.descriptors import descriptor_type
from ..operands import gradient_factors
from .backward_split import _attn_bwd_dkdv_sm90_kernel, _attn_bwd_dq_sm90_kernel
from .config import make_dkdv_config, make_dq_config


class Call(NamedTuple):
    """What sets a launch apart."""

    tile_d: int
    tile_dv: int
    block_size: tuple[int, int]
    softcap: bool = False
    dtype: torch.dtype = torch.bfloat16
    keys_spill_bytes: int = 0
    queries_spill_bytes: int = 0

    @property
    def name(self) -> str:
        """End of the names of its cases."""
        parts = [str(self.dtype).split(".")[-1], f"d{self.tile_d}-{self.tile_dv}"]
        parts += [f"blocks{self.block_size[0]}x{self.block_size[1]}"]
        parts += ["softcap"] if self.softcap else []
        return "-".join(parts)


# What spills is in the code for masked tiles, and where 24 registers are not enough to find work.
CALLS = (
    Call(128, 128, (64, 64), keys_spill_bytes=896, queries_spill_bytes=512),
    Call(
        128, 128, (128, 64), softcap=True, dtype=torch.float16,
        keys_spill_bytes=1408, queries_spill_bytes=544,
    ),
    Call(64, 64, (64, 64), keys_spill_bytes=384, queries_spill_bytes=512),
    Call(128, 64, (64, 64), keys_spill_bytes=384, queries_spill_bytes=512),
    Call(64, 128, (256, 64), keys_spill_bytes=384, queries_spill_bytes=512),
)  # fmt: skip


def keys_case(call: Call) -> CompileCase:
    """A launch of the dk/dv kernel."""
    config = make_dkdv_config(call.tile_d, call.tile_dv, call.block_size)
    k_type = descriptor_type(config.k_block(), call.dtype)
    v_type = descriptor_type(config.v_block(), call.dtype)
    row_type = descriptor_type(config.row_block(), torch.float32)
    return CompileCase(
        name=f"attn_bwd_keys_sm90/{call.name}",
        kernel=_attn_bwd_dkdv_sm90_kernel,
        args={
            "dk_desc": k_type,
            "dv_desc": v_type,
            "dout_desc": descriptor_type(config.dout_block(), call.dtype),
            "q_desc": descriptor_type(config.q_block(), call.dtype),
            "k_desc": k_type,
            "v_desc": v_type,
            "lse_desc": row_type,
            "delta_desc": row_type,
            **_common(call, call.block_size[1]),
            "CFG": config,
        },
        archs=(90,),
        num_warps=4,
        options={"maxnreg": config.MAX_REGISTERS},
        expect={"wgmma.mma_async": 1},
        max_spill_bytes=call.keys_spill_bytes,
    )


def queries_case(call: Call) -> CompileCase:
    """A launch of the dq kernel."""
    config = make_dq_config(call.tile_d, call.tile_dv, call.block_size[1])
    q_type = descriptor_type(config.q_block(), call.dtype)
    return CompileCase(
        name=f"attn_bwd_queries_sm90/{call.name}",
        kernel=_attn_bwd_dq_sm90_kernel,
        args={
            "dq_desc": q_type,
            "dout_desc": descriptor_type(config.dout_block(), call.dtype),
            "q_desc": q_type,
            "k_desc": descriptor_type(config.k_block(), call.dtype),
            "v_desc": descriptor_type(config.v_block(), call.dtype),
            "lse_ptr": torch.float32,
            "delta_ptr": torch.float32,
            "dynamic": 1,
            **_common(call, call.block_size[0]),
            "CFG": config,
        },
        archs=(90,),
        num_warps=4,
        options={"maxnreg": config.MAX_REGISTERS},
        expect={"wgmma.mma_async": 1},
        max_spill_bytes=call.queries_spill_bytes,
    )


def _common(call: Call, side: int) -> dict[str, object]:
    return {
        "counter_ptr": torch.int32,
        "order_ptr": torch.int32,
        "block_lists": MaskLists(*(torch.int32,) * 5, side),
        "mask_batch_step": 0,
        "mask_head_step": 0,
        "q_len": 4096,
        "kv_len": 4096,
        "left": 2**30,
        "right": 0,
        "num_batch_heads": 32,
        "q_heads": 32,
        "group_size": 4,
        "score": gradient_factors(0.1, 30.0 if call.softcap else 0.0, call.dtype),
    }


@compile_cases
def _cases() -> Iterator[CompileCase]:
    for call in CALLS:
        yield keys_case(call)
        yield queries_case(call)
