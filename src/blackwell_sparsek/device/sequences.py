"""From a plane to its batch, heads and tokens: dense batches and packed sequences alike.

Dense tensors are [B, H, S, D]; packed ones [T, H, D] are the same with batch stride 0 and a first
token per sequence. Offsets are int64: element counts and strides may pass 2^31.
"""

import triton
import triton.language as tl


@triton.jit
def batch_and_heads(plane, q_heads, group_size):
    """Batch, query head and the KV head that it reads."""
    q_head = plane % q_heads
    return plane // q_heads, q_head, q_head // group_size


@triton.jit
def token_span(cu_seqlens_ptr, batch, dense_length):
    """First token and length of a sequence; without `cu_seqlens` all have `dense_length`."""
    if cu_seqlens_ptr is not None:
        start = tl.load(cu_seqlens_ptr + batch)
        length = tl.load(cu_seqlens_ptr + batch + 1) - start
    else:
        start = 0
        length = dense_length
    return start, length


@triton.jit
def plane_offset(batch, head, start, strides):
    """Offset of token `start` of a plane; `strides` begins with batch, head, token."""
    return (
        tl.cast(batch, tl.int64) * strides[0]
        + tl.cast(head, tl.int64) * strides[1]
        + tl.cast(start, tl.int64) * strides[2]
    )


@triton.jit
def lse_offset(batch, head, start, num_heads, head_stride, cu_seqlens_ptr):
    """Offset of token `start` of a plane in a contiguous lse, [B, H, S] or packed [H, T]."""
    plane = tl.cast(head, tl.int64)
    if cu_seqlens_ptr is None:
        plane += tl.cast(batch, tl.int64) * num_heads
    return plane * head_stride + start
