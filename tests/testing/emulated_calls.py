"""Calls that Hopper kernels serve, to be run by the emulator: `python -m ... NAME [SEED]`.

Run in a process in which Triton compiles, since it cannot do so where it interprets kernels.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.reference.fp8 import hadamard
from blackwell_sparsek.testing.emulator.launches import emulated_launches
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.tolerance import assert_within_budget

from ..fp8.test_attention_sm90 import rounded_weights, visible_keys

BF16, FP16, FP64, FP8 = torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn
Results = Sequence[torch.Tensor]
Dims = tuple[int, int]


class Call(NamedTuple):
    """A call, the kernel that serves it, and the same in fp64."""

    kernel: str
    run: Callable[[str, torch.dtype], Any]
    """Results of an implementation, for inputs of a dtype."""
    dtype: torch.dtype = BF16
    impl: str = "sm90"


CALLS: dict[str, Callable[[], Call]] = {}


def _call(make: Callable[[], Call]) -> Callable[[], Call]:
    CALLS[make.__name__.removeprefix("call_")] = make
    return make


def _qkv(
    queries: int, keys: int, dims: Dims = (128, 128), heads: tuple[int, int] = (2, 1)
) -> list[torch.Tensor]:
    d, dv = dims
    hq, hkv = heads
    shapes = ((1, hq, queries, d), (1, hkv, keys, d), (1, hkv, keys, dv))
    return [torch.randn(shape).to(BF16) for shape in shapes]


def _attention(
    kernel: str,
    queries: int = 200,
    keys: int = 300,
    dims: tuple[int, int] = (128, 128),
    **options: Any,
) -> Call:
    inputs = _qkv(queries, keys, dims)

    def run(impl: str, dtype: torch.dtype) -> Any:
        given = [x.to(dtype) for x in inputs]
        return bsk.attention(*given, return_lse=True, impl=impl, **options)

    return Call(kernel, run)


def _gradients(
    kernel: str,
    queries: int = 200,
    keys: int = 300,
    dims: tuple[int, int] = (128, 128),
    **options: Any,
) -> Call:
    inputs = _qkv(queries, keys, dims)
    dout = torch.randn(1, 2, queries, dims[1]).to(BF16)

    def run(impl: str, dtype: torch.dtype) -> Any:
        given = [x.to(dtype).requires_grad_() for x in inputs]
        out = bsk.attention(*given, impl=impl, **options)
        return torch.autograd.grad(out, given, dout.to(dtype))

    return Call(kernel, run)


def _random_mask(block: tuple[int, int]) -> bsk.BlockMask:
    keep = torch.rand(1, 2, 200, 300) < 0.3
    # rows that see nothing, and blocks that are whole or empty
    keep[:, :, :40] = False
    keep[:, 1, 64:, 128:256] = True
    return bsk.BlockMask.from_element_mask(keep, block)


@_call
def call_forward() -> Call:
    return _attention("_attn_fwd_sm90_kernel")


@_call
def call_forward_causal_window() -> Call:
    return _attention("_attn_fwd_sm90_kernel", causal=True, window=70)


@_call
def call_forward_softcap_sinks() -> Call:
    return _attention("_attn_fwd_sm90_kernel", softcap=20.0, sinks=torch.randn(2))


@_call
def call_forward_d64() -> Call:
    return _attention("_attn_fwd_sm90_kernel", dims=(64, 64), causal=True)


@_call
def call_forward_d256() -> Call:
    return _attention("_attn_fwd_sm90_kernel", 100, 150, (256, 256), causal=True)


@_call
def call_forward_mask_128x128() -> Call:
    return _attention("_attn_fwd_sm90_kernel", block_mask=_random_mask((128, 128)))


@_call
def call_forward_mask_64x64() -> Call:
    return _attention("_attn_fwd_sm90_kernel", block_mask=_random_mask((64, 64)))


@_call
def call_forward_mask_128x16() -> Call:
    return _attention("_attn_fwd_sm90_kernel", block_mask=_random_mask((128, 16)))


@_call
def call_forward_mask_64x32_causal() -> Call:
    return _attention("_attn_fwd_sm90_kernel", block_mask=_random_mask((64, 32)), causal=True)


@_call
def call_forward_mask_d64() -> Call:
    mask = _random_mask((64, 128))
    return _attention("_attn_fwd_sm90_kernel", dims=(64, 64), block_mask=mask)


@_call
def call_forward_mask_d256() -> Call:
    mask = _random_mask((128, 64))
    return _attention("_attn_fwd_sm90_kernel", dims=(256, 256), block_mask=mask)


@_call
def call_forward_gated() -> Call:
    gate = (torch.rand(1, 1, 300), 0.5 * torch.rand(1, 1, 200))
    return _attention("_attn_fwd_sm90_kernel", causal=True, key_gate=gate)


@_call
def call_backward() -> Call:
    return _gradients("_attn_bwd_sm90_kernel", causal=True)


@_call
def call_backward_d64_window() -> Call:
    return _gradients("_attn_bwd_sm90_kernel", dims=(64, 64), causal=True, window=90)


@_call
def call_backward_deterministic() -> Call:
    return _gradients("_attn_bwd_sm90_kernel", 150, causal=True, deterministic=True)


@_call
def call_backward_mask_128x128() -> Call:
    return _gradients("_attn_bwd_sm90_kernel", block_mask=_random_mask((128, 128)))


@_call
def call_backward_mask_64x64() -> Call:
    return _gradients("_attn_bwd_dkdv_sm90_kernel", block_mask=_random_mask((64, 64)))


@_call
def call_backward_d192_128() -> Call:
    return _gradients("_attn_bwd_wide_sm90_kernel", 100, 150, (192, 128), causal=True)


def _packed(gradients: bool) -> Callable[[str, torch.dtype], Any]:
    offsets = torch.tensor([0, 70, 71, 250], dtype=torch.int32)
    inputs = [torch.randn(250, heads, 128).to(BF16) for heads in (2, 1, 1)]
    dout = torch.randn(250, 2, 128).to(BF16)

    def run(impl: str, dtype: torch.dtype) -> Any:
        given = [x.to(dtype).requires_grad_(gradients) for x in inputs]
        out = bsk.attention_varlen(
            *given, offsets, offsets, max_seqlen_q=180, max_seqlen_k=180, causal=True, impl=impl
        )
        return torch.autograd.grad(out, given, dout.to(dtype)) if gradients else out

    return run


@_call
def call_packed() -> Call:
    return Call("_attn_fwd_sm90_kernel", _packed(False))


@_call
def call_packed_backward() -> Call:
    return Call("_attn_bwd_sm90_kernel", _packed(True))


def _paged(heads: int, dim: int, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = 3 * 512 // page
    k, v = (torch.randn(pages, page, heads, dim).to(BF16) for _ in range(2))
    return k, v, torch.randperm(pages).to(torch.int32).view(3, -1)


@_call
def call_ragged_pages() -> Call:
    offsets = torch.tensor([0, 1, 60, 64], dtype=torch.int32)
    q = torch.randn(64, 8, 128).to(BF16)
    k, v, table = _paged(2, 128, 64)
    lengths = torch.tensor([300, 59, 512], dtype=torch.int32)

    def run(impl: str, dtype: torch.dtype) -> Any:
        return bsk.attention_varlen(
            *(x.to(dtype) for x in (q, k, v)), offsets, max_seqlen_q=59, cache_seqlens=lengths,
            page_table=table, causal=True, impl=impl,
        )  # fmt: skip

    return Call("_attn_ragged_sm90_kernel", run)


def _decoding(q_heads: int, heads: int, page: int | None, queries: int = 1) -> Call:
    q = torch.randn(3, q_heads, queries, 128).to(BF16)
    lengths = torch.tensor([512, 33, queries], dtype=torch.int32)
    if page is None:
        k, v = (torch.randn(3, heads, 512, 128).to(BF16) for _ in range(2))
        table = None
    else:
        k, v, table = _paged(heads, 128, page)

    def run(impl: str, dtype: torch.dtype) -> Any:
        given = (x.to(dtype) for x in (q, k, v))
        return bsk.attention_decode(*given, cache_seqlens=lengths, page_table=table, impl=impl)

    return Call("_attn_decode_sm90_kernel", run)


@_call
def call_decode() -> Call:
    return _decoding(8, 2, None)


@_call
def call_decode_pages16() -> Call:
    return _decoding(8, 2, 16, queries=3)


@_call
def call_decode_64_rows() -> Call:
    return _decoding(64, 1, None)


@_call
def call_decode_latent() -> Call:
    q = torch.randn(2, 64, 1, 576).to(BF16)
    cache = torch.randn(8, 64, 1, 576).to(BF16)
    table = torch.randperm(8).to(torch.int32).view(2, 4)
    lengths = torch.tensor([200, 33], dtype=torch.int32)

    def run(impl: str, dtype: torch.dtype) -> Any:
        latent = cache.to(dtype)
        return bsk.attention_decode(
            q.to(dtype),
            latent,
            latent[..., :512],
            cache_seqlens=lengths,
            page_table=table,
            impl=impl,
        )

    return Call("_attn_decode_latent_kernel", run)


def _fp8(block: tuple[int, int] | None) -> Call:
    keys = 320
    q, k, v = (torch.randn(1, 2, n, 128).to(FP8) for n in (200, keys, keys))
    v = v.transpose(2, 3).contiguous().transpose(2, 3)
    visible = visible_keys(200, keys, "cpu", causal=True)
    options: dict[str, Any] = {"causal": True}
    if block is not None:
        keep = torch.rand(1, 2, 200, keys) < 0.3
        keep[:, 1, 64:, 128:256] = True
        visible = visible & keep
        options["block_mask"] = bsk.BlockMask.from_element_mask(keep, block)

    def run(impl: str, dtype: torch.dtype) -> Any:
        if dtype == FP64:
            exact = (x.double().contiguous() for x in (q, k, v))
            return bsk.attention(*exact, **options)
        if impl == "eager":
            # which rounds no weights to e4m3
            plain, _ = rounded_weights(*(x.float() for x in (q, k, v)), 128**-0.5, visible)
            return plain
        return bsk.attention(q, k, v, impl=impl, **options)

    return Call("_attn_fwd_fp8_sm90_kernel", run)


@_call
def call_forward_fp8() -> Call:
    return _fp8(None)


@_call
def call_forward_fp8_mask_64x64() -> Call:
    return _fp8((64, 64))


@_call
def call_forward_fp8_mask_128x128() -> Call:
    return _fp8((128, 128))


def _matrix(block: tuple[int, int], rows: int = 256, columns: int = 256) -> bsk.BSRMatrix:
    keep = torch.rand(rows // block[0], columns // block[1]) < 0.4
    keep[0] = True
    keep[-1] = False
    return bsk.BSRMatrix.from_mask(torch.randn(rows, columns).to(FP16), keep)


def _product(
    kernel: str, block: tuple[int, int], columns: int, flipped: bool, rows: int = 256
) -> Call:
    matrix = _matrix(block, rows)
    x = torch.randn((columns, 256) if flipped else (256, columns)).to(FP16)

    def run(impl: str, dtype: torch.dtype) -> Any:
        if dtype == FP64:
            dense = matrix.to_dense().double()
            return x.double() @ dense.T if flipped else dense @ x.double()
        return bsk.matmul(x, matrix.T, impl=impl) if flipped else bsk.matmul(matrix, x, impl=impl)

    return Call(kernel, run, FP16)


@_call
def call_product_128x128() -> Call:
    return _product("_spmm_sm90_kernel", (128, 128), 192, False)


@_call
def call_product_64x64() -> Call:
    return _product("_spmm_sm90_kernel", (64, 64), 200, False)


@_call
def call_product_paired() -> Call:
    # wide enough for clusters of two programs, which share the tiles of x
    return _product("_spmm_sm90_kernel", (64, 64), 320, False, rows=512)


@_call
def call_product_paired_32x32() -> Call:
    return _product("_spmm_sm90_kernel", (32, 32), 320, False, rows=512)


@_call
def call_product_warps() -> Call:
    return _product("_spmm_warps_kernel", (16, 16), 192, False)


@_call
def call_product_narrow() -> Call:
    return _product("_spmm_narrow_sm90_kernel", (128, 128), 16, True)


@_call
def call_product_strips() -> Call:
    return _product("_spmm_strips_kernel", (16, 16), 8, True)


@_call
def call_sampled_product() -> Call:
    pattern = _matrix((64, 64)).to(BF16)
    a, b = torch.randn(256, 192).to(BF16), torch.randn(192, 256).to(BF16)

    def run(impl: str, dtype: torch.dtype) -> Any:
        return bsk.sddmm(a.to(dtype), b.to(dtype), pattern.to(dtype), impl=impl).data

    return Call("_sddmm_sm90_kernel", run)


# Portable kernels in bf16, which the interpreter does not compute with.


def _portable(call: Call, kernel: str) -> Call:
    return call._replace(kernel=kernel, impl="triton")


@_call
def call_portable_forward_mask() -> Call:
    call = _attention("", dims=(64, 64), block_mask=_random_mask((64, 32)))
    return _portable(call, "_attn_fwd_kernel")


@_call
def call_portable_backward() -> Call:
    return _portable(_gradients("", 70, 100, (64, 64), causal=True), "_attn_dkdv_kernel")


@_call
def call_portable_decode_blocks() -> Call:
    """Listed blocks that are smaller than a tile, over rows that do not start at 16 bytes."""
    q = torch.randn(2, 4, 1, 64).to(BF16)
    k, v = (torch.randn(2, 2, 256, 67).to(BF16)[..., :64] for _ in range(2))
    lengths = torch.tensor([256, 90], dtype=torch.int32)
    blocks = torch.tensor([0, 2, 5, -1], dtype=torch.int32).expand(2, 2, 4).contiguous()

    def run(impl: str, dtype: torch.dtype) -> Any:
        return bsk.attention_decode(
            *(x.to(dtype) for x in (q, k, v)), cache_seqlens=lengths, kv_blocks=blocks,
            kv_block_size=16, impl=impl,
        )  # fmt: skip

    return Call("_attn_decode_kernel", run, impl="triton")


@_call
def call_quantize_rotated() -> Call:
    x = torch.randn(1, 3, 70, 128).to(BF16)

    def run(impl: str, dtype: torch.dtype) -> Any:
        if dtype == FP64:
            return x.double() @ hadamard(128)
        return bsk.fp8.quantize(x, "block", hadamard=True, impl=impl).stored()

    return Call("_quantize_kernel", run, impl="triton")


def _listed(results: Any) -> Results:
    return results if isinstance(results, (tuple, list)) else (results,)


def check(name: str, seed: int) -> None:
    """Run a call in the emulator and compare with fp64."""
    torch.manual_seed(len(name))
    call = CALLS[name]()
    with poisoned_empty(), emulated_launches(seed=seed) as launches:
        results = _listed(call.run(call.impl, call.dtype))
    names = [launch.program.name for launch in launches]
    assert call.kernel in names, names
    exact = _listed(call.run("auto", FP64))
    plain = _listed(call.run("eager", call.dtype))
    for i, (got, right, same) in enumerate(zip(results, exact, plain, strict=True)):
        assert_within_budget(got, right, same, what=f"{name}, result {i}")


if __name__ == "__main__":
    for asked in sys.argv[2:]:
        check(asked, int(sys.argv[1]))
        print(asked, "ok", flush=True)
