# mypy: ignore-errors
"""Decoding steps alone: at most one packed query for each sequence, by the kernel of decoding.

That kernel splits sequences without a plan, has tiles for few queries, and takes fp8 caches and
lists of blocks. To it every row of q is a sequence. A first launch writes where the keys of each
row are and how many it has, since `cu_seqlens_q` may leave sequences without a query and rows
without a sequence: every row then finds its sequence among the offsets.

Called by `sm90.attention_ragged` where `tuning.takes_steps`.
"""

import torch
import triton
import triton.language as tl

from ..calls.decode import DecodeCall
from ..calls.ragged import RaggedCall
from ..decode.sm90 import launch_attn_decode_sm90
from ..decode.tuning import attn_decode_sm90_launch
from ..launch.launcher import cdiv, launch, on_device_of
from ..launch.workspace import scratch

# Rows of a program, and offsets that it compares with them at a time.
ROWS = tl.constexpr(32)
SCAN = tl.constexpr(128)


@triton.jit(do_not_specialize=["batch", "tokens", "num_slabs", "capacity"])
def _steps_kernel(
    lengths_ptr,
    places_ptr,
    offsets_ptr,
    seqlens_ptr,
    slabs_ptr,
    batch,
    tokens,
    num_slabs,
    capacity,
):
    """Length and place of ROWS rows: 0 and -1 without a sequence, -1 and 0 where numbers are wrong.

    A place is the number of the sequence, or its row of the cache if `slabs_ptr` names rows.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begun = tl.zeros([ROWS], tl.int32)
    for first in range(0, batch + 1, SCAN):
        nth = first + tl.arange(0, SCAN)
        offset = tl.load(offsets_ptr + nth, mask=nth <= batch, other=2**31 - 1)
        begun += tl.sum((offset[None, :] <= row[:, None]).to(tl.int32), 1)
    sequence = begun - 1
    exists = (sequence >= 0) & (sequence < batch)
    begin = tl.load(offsets_ptr + sequence, mask=exists, other=0)
    end = tl.load(offsets_ptr + sequence + 1, mask=exists, other=0)
    kv_len = tl.load(seqlens_ptr + sequence, mask=exists, other=0)
    place = sequence
    # offsets that do not ascend by 0 or 1 do not say whose query this is
    fits = exists & (begin == row) & (end == row + 1) & (kv_len >= 0) & (kv_len <= capacity)
    if slabs_ptr is not None:
        place = tl.load(slabs_ptr + sequence, mask=exists, other=0)
        fits = fits & (place >= 0) & (place < num_slabs)
    unused = sequence == batch
    tl.store(lengths_ptr + row, tl.where(fits, kv_len, tl.where(unused, 0, -1)), row < tokens)
    tl.store(places_ptr + row, tl.where(fits, place, tl.where(unused, -1, 0)), row < tokens)


def launch_steps(call: RaggedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Length and place of each row of q, int32."""
    tokens = call.q.shape[0]
    lengths, places = (scratch((tokens,), torch.int32, call.q.device) for _ in range(2))
    sizes = (call.batch, tokens, call.k.shape[0], call.capacity)
    args = (lengths, places, call.cu_seqlens_q, call.seqlens_k, call.slabs, *sizes)
    launch(_steps_kernel, cdiv(tokens, ROWS.value), args, num_warps=4)
    return lengths, places


def attend_steps(call: RaggedCall) -> None:
    """Fill `out` and `lse` of a call that `tuning.takes_steps`."""
    if call.q.shape[0] * call.q.shape[1] == 0:
        return
    config, programs = attn_decode_sm90_launch(call.problem.decoding)
    with on_device_of(call.q):
        lengths, places = launch_steps(call)
        rows = DecodeCall(
            call.q.unsqueeze(2),
            call.k,
            call.v,
            lengths,
            call.scale,
            page_table=call.page_table,
            kv_blocks=call.kv_blocks,
            kv_block_size=call.kv_block_size,
            band=call.band,
            softcap=call.softcap,
            sinks=call.sinks,
            k_scale=call.k_scale,
            v_scale=call.v_scale,
        )
        out = call.out.unsqueeze(2)
        launch_attn_decode_sm90(out, call.lse, rows, config, programs, places)
