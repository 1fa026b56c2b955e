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
from ..fp8.test_matmul import activations, dense_product, matrix
from ..sparse_attention import problems

BF16, FP16, FP64, FP8 = torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn
Results = Sequence[torch.Tensor]
Dims = tuple[int, int]


class Call(NamedTuple):
    """A call, by any implementation and in any dtype."""

    run: Callable[[str, torch.dtype], Any]
    """Results of an implementation, for inputs of a dtype."""
    dtype: torch.dtype = BF16
    impl: str = "sm90"
    factor: float = 2.0
    roundings: float = 1.0


class Made(NamedTuple):
    """How a call is made, and the kernels that serve it."""

    make: Callable[[], Call]
    kernels: tuple[str, ...]


CALLS: dict[str, Made] = {}


def _call(*kernels: str) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
    """Name a call after its function, with the kernels that serve it."""

    def add(make: Callable[[], Call]) -> Callable[[], Call]:
        CALLS[make.__name__.removeprefix("call_")] = Made(make, kernels)
        return make

    return add


def _qkv(
    queries: int, keys: int, dims: Dims = (128, 128), heads: tuple[int, int] = (2, 1)
) -> list[torch.Tensor]:
    d, dv = dims
    hq, hkv = heads
    shapes = ((1, hq, queries, d), (1, hkv, keys, d), (1, hkv, keys, dv))
    return [torch.randn(shape).to(BF16) for shape in shapes]


def _attention(
    queries: int = 200,
    keys: int = 300,
    dims: tuple[int, int] = (128, 128),
    **options: Any,
) -> Call:
    inputs = _qkv(queries, keys, dims)

    def run(impl: str, dtype: torch.dtype) -> Any:
        given = [x.to(dtype) for x in inputs]
        return bsk.attention(*given, return_lse=True, impl=impl, **options)

    return Call(run)


def _gradients(
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

    return Call(run)


def _random_mask(block: tuple[int, int]) -> bsk.BlockMask:
    keep = torch.rand(1, 2, 200, 300) < 0.3
    # rows that see nothing, and blocks that are whole or empty
    keep[:, :, :40] = False
    keep[:, 1, 64:, 128:256] = True
    return bsk.BlockMask.from_element_mask(keep, block)


@_call("_attn_fwd_sm90_kernel")
def call_forward() -> Call:
    return _attention()


@_call("_attn_fwd_sm90_kernel")
def call_forward_causal_window() -> Call:
    return _attention(causal=True, window=70)


@_call("_attn_fwd_sm90_kernel")
def call_forward_softcap_sinks() -> Call:
    return _attention(softcap=20.0, sinks=torch.randn(2))


@_call("_attn_fwd_sm90_kernel")
def call_forward_d64() -> Call:
    return _attention(dims=(64, 64), causal=True)


@_call("_attn_fwd_sm90_kernel")
def call_forward_d256() -> Call:
    return _attention(100, 150, (256, 256), causal=True)


@_call("_attn_fwd_sm90_kernel")
def call_forward_mask_128x128() -> Call:
    return _attention(block_mask=_random_mask((128, 128)))


@_call("_attn_fwd_sm90_kernel")
def call_forward_mask_64x64() -> Call:
    return _attention(block_mask=_random_mask((64, 64)))


@_call("_attn_fwd_sm90_kernel")
def call_forward_mask_128x16() -> Call:
    return _attention(block_mask=_random_mask((128, 16)))


@_call("_attn_fwd_sm90_kernel")
def call_forward_mask_64x32_causal() -> Call:
    return _attention(block_mask=_random_mask((64, 32)), causal=True)


@_call("_attn_fwd_sm90_kernel")
def call_forward_mask_d64() -> Call:
    mask = _random_mask((64, 128))
    return _attention(dims=(64, 64), block_mask=mask)


@_call("_attn_fwd_sm90_kernel")
def call_forward_mask_d256() -> Call:
    mask = _random_mask((128, 64))
    return _attention(dims=(256, 256), block_mask=mask)


@_call("_attn_fwd_sm90_kernel")
def call_forward_gated() -> Call:
    gate = (torch.rand(1, 1, 300), 0.5 * torch.rand(1, 1, 200))
    return _attention(causal=True, key_gate=gate)


@_call("_attn_fwd_sm90_kernel", "_attn_bwd_sm90_kernel")
def call_backward() -> Call:
    return _gradients(causal=True)


@_call("_attn_fwd_sm90_kernel", "_attn_bwd_sm90_kernel")
def call_backward_d64_window() -> Call:
    return _gradients(dims=(64, 64), causal=True, window=90)


@_call("_attn_fwd_sm90_kernel", "_attn_bwd_sm90_kernel")
def call_backward_deterministic() -> Call:
    return _gradients(150, causal=True, deterministic=True)


@_call("_attn_fwd_sm90_kernel", "_attn_bwd_sm90_kernel")
def call_backward_mask_128x128() -> Call:
    return _gradients(block_mask=_random_mask((128, 128)))


@_call("_attn_fwd_sm90_kernel", "_attn_bwd_dkdv_sm90_kernel", "_attn_bwd_dq_sm90_kernel")
def call_backward_mask_64x64() -> Call:
    return _gradients(block_mask=_random_mask((64, 64)))


@_call("_attn_fwd_sm90_kernel", "_attn_bwd_wide_sm90_kernel", "_attn_bwd_wide_dq_sm90_kernel")
def call_backward_d192_128() -> Call:
    return _gradients(100, 150, (192, 128), causal=True)


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


@_call("_attn_fwd_sm90_kernel")
def call_packed() -> Call:
    return Call(_packed(False))


@_call("_attn_fwd_sm90_kernel", "_attn_bwd_sm90_kernel")
def call_packed_backward() -> Call:
    return Call(_packed(True))


def _paged(heads: int, dim: int, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pages = 3 * 512 // page
    k, v = (torch.randn(pages, page, heads, dim).to(BF16) for _ in range(2))
    return k, v, torch.randperm(pages).to(torch.int32).view(3, -1)


@_call("_attn_ragged_sm90_kernel")
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

    return Call(run)


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

    return Call(run)


@_call("_attn_decode_sm90_kernel")
def call_decode() -> Call:
    return _decoding(8, 2, None)


@_call("_attn_decode_sm90_kernel")
def call_decode_pages16() -> Call:
    return _decoding(8, 2, 16, queries=3)


@_call("_attn_decode_sm90_kernel")
def call_decode_64_rows() -> Call:
    return _decoding(64, 1, None)


@_call("_attn_decode_latent_kernel")
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

    return Call(run)


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

    return Call(run)


@_call("_attn_fwd_fp8_sm90_kernel")
def call_forward_fp8() -> Call:
    return _fp8(None)


@_call("_attn_fwd_fp8_sm90_kernel")
def call_forward_fp8_mask_64x64() -> Call:
    return _fp8((64, 64))


@_call("_attn_fwd_fp8_sm90_kernel")
def call_forward_fp8_mask_128x128() -> Call:
    return _fp8((128, 128))


def _matrix(block: tuple[int, int], rows: int = 256, columns: int = 256) -> bsk.BSRMatrix:
    keep = torch.rand(rows // block[0], columns // block[1]) < 0.4
    keep[0] = True
    keep[-1] = False
    return bsk.BSRMatrix.from_mask(torch.randn(rows, columns).to(FP16), keep)


def _product(block: tuple[int, int], columns: int, flipped: bool, rows: int = 256) -> Call:
    matrix = _matrix(block, rows)
    x = torch.randn((columns, 256) if flipped else (256, columns)).to(FP16)

    def run(impl: str, dtype: torch.dtype) -> Any:
        if dtype == FP64:
            dense = matrix.to_dense().double()
            return x.double() @ dense.T if flipped else dense @ x.double()
        return bsk.matmul(x, matrix.T, impl=impl) if flipped else bsk.matmul(matrix, x, impl=impl)

    return Call(run, FP16)


@_call("_spmm_sm90_kernel")
def call_product_128x128() -> Call:
    return _product((128, 128), 192, False)


@_call("_spmm_sm90_kernel")
def call_product_64x64() -> Call:
    return _product((64, 64), 200, False)


@_call("_spmm_sm90_kernel")
def call_product_paired() -> Call:
    # wide enough for clusters of two programs, which share the tiles of x
    return _product((64, 64), 320, False, rows=512)


@_call("_spmm_sm90_kernel")
def call_product_paired_32x32() -> Call:
    return _product((32, 32), 320, False, rows=512)


@_call("_spmm_warps_kernel")
def call_product_warps() -> Call:
    return _product((16, 16), 192, False)


@_call("_spmm_narrow_sm90_kernel")
def call_product_narrow() -> Call:
    return _product((128, 128), 16, True)


@_call("_spmm_strips_kernel")
def call_product_strips() -> Call:
    return _product((16, 16), 8, True)


@_call("_sddmm_sm90_kernel")
def call_sampled_product() -> Call:
    pattern = _matrix((64, 64)).to(BF16)
    a, b = torch.randn(256, 192).to(BF16), torch.randn(192, 256).to(BF16)

    def run(impl: str, dtype: torch.dtype) -> Any:
        return bsk.sddmm(a.to(dtype), b.to(dtype), pattern.to(dtype), impl=impl).data

    return Call(run)


def _fp8_product(shape: Dims, block: Dims, tokens: int, **options: Any) -> Call:
    w = matrix(shape, block, "cpu").T
    x = activations(tokens, shape[1], device="cpu")
    for name, size in (("bias", (shape[0],)), ("residual", (tokens, shape[0]))):
        options[name] = torch.randn(size).to(BF16)

    def run(impl: str, dtype: torch.dtype) -> Any:
        if dtype == FP64:
            exact = bsk.matmul(x, w, out_dtype=torch.float32, impl="reference", **options)
            return exact.double()
        if impl == "eager":
            # on dense matrices, in fp32
            return dense_product(x, w, **options).to(dtype)
        return bsk.matmul(x, w, out_dtype=dtype, impl=impl, **options)

    return Call(run)


@_call("_spmm_fp8_sm90_kernel")
def call_product_fp8_128x128() -> Call:
    """Scales change within a row; the last tiles reach beyond features, channels and tokens."""
    return _fp8_product((200, 272), (128, 128), 140, activation="gelu")


@_call("_spmm_fp8_sm90_kernel")
def call_product_fp8_64x32() -> Call:
    return _fp8_product((200, 144), (64, 32), 130, activation="relu")


@_call("_spmm_narrow_sm90_kernel")
def call_product_fp8_few_tokens() -> Call:
    return _fp8_product((280, 528), (128, 128), 17, activation="silu")


@_call("_spmm_narrow_sm90_kernel")
def call_product_fp8_one_token() -> Call:
    return _fp8_product((200, 336), (64, 64), 1)


# Attention to chosen keys.


def _chosen(gradients: bool, **given: Any) -> Call:
    problem = problems.dense(dtype=BF16, **given)

    def run(impl: str, dtype: torch.dtype) -> Any:
        def attend(arguments: Any, options: Any) -> Any:
            return bsk.sparse_attention(*arguments, **options, return_lse=True, impl=impl)

        wanted = FP64 if dtype == FP64 else None
        if gradients:
            return tuple(problems.gradients_by(problem, attend, wanted).values())
        (q, k, v, keys), options = problem
        q, k, v = (x.to(wanted or x.dtype) for x in (q, k, v))
        if k.shape[-1] == 576:
            v = k[..., :512]
        return attend((q, k, v, keys), options)

    # as `check_gradients` has it: lse and output are rounded before gradients come from them
    return Call(run, BF16, "sm90", 3.0, 4.0) if gradients else Call(run)


WALKED = {"granularity": 64, "most": 4, "heads": (4, 2), "lists": 2, "dims": (64, 64)}


@_call("_sparse_attn_fwd_sm90_kernel")
def call_chosen_blocks() -> Call:
    return _chosen(False, **WALKED, lengths=(140, 300), gate=True, window=40, sinks=True)


@_call("_sparse_attn_fwd_sm90_kernel")
def call_chosen_blocks_of_128() -> Call:
    given = {**WALKED, "granularity": 128, "heads": (2, 1), "lists": 1}
    given |= {"dims": (128, 128), "softcap": 2.0}
    return _chosen(False, **given, lengths=(70, 300))


@_call("_sparse_attn_gathered_kernel")
def call_chosen_keys() -> Call:
    given = {**WALKED, "granularity": 4, "most": 20}
    return _chosen(False, **given, lengths=(40, 200), window=20, sinks=True)


@_call("_sparse_attn_latent_kernel")
def call_chosen_keys_latent() -> Call:
    given = {"granularity": 1, "most": 70, "heads": (4, 1), "dims": (576, 576)}
    return _chosen(False, **given, lengths=(3, 130), window=9, gate=True)


@_call(
    "_sparse_attn_fwd_sm90_kernel", "_sparse_attn_dkdv_sm90_kernel", "_sparse_attn_dq_sm90_kernel"
)
def call_chosen_blocks_backward() -> Call:
    given = {**WALKED, "heads": (8, 1), "lists": 1, "gate": True, "window": 40}
    return _chosen(True, **given, lengths=(17, 100))


@_call("_sparse_attn_dkdv_sm90_kernel", "_sparse_attn_dq_sm90_kernel")
def call_chosen_blocks_of_128_backward() -> Call:
    given = {**WALKED, "heads": (8, 1), "lists": 1, "granularity": 128, "dims": (128, 128)}
    return _chosen(True, **given, lengths=(9, 140), sinks=True)


# Portable kernels in bf16, which the interpreter does not compute with.


def _portable(call: Call) -> Call:
    return call._replace(impl="triton")


@_call("_attn_fwd_kernel")
def call_portable_forward_mask() -> Call:
    call = _attention(dims=(64, 64), block_mask=_random_mask((64, 32)))
    return _portable(call)


@_call("_attn_dkdv_kernel")
def call_portable_backward() -> Call:
    return _portable(_gradients(70, 100, (64, 64), causal=True))


@_call("_attn_decode_kernel")
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

    return Call(run, impl="triton")


@_call("_quantize_kernel")
def call_quantize_rotated() -> Call:
    x = torch.randn(1, 3, 70, 128).to(BF16)

    def run(impl: str, dtype: torch.dtype) -> Any:
        if dtype == FP64:
            return x.double() @ hadamard(128)
        return bsk.fp8.quantize(x, "block", hadamard=True, impl=impl).stored()

    return Call(run, impl="triton")


def _listed(results: Any) -> Results:
    return results if isinstance(results, (tuple, list)) else (results,)


def check(name: str, seed: int) -> None:
    """Run a call in the emulator and compare with fp64."""
    torch.manual_seed(len(name))
    call = CALLS[name].make()
    with poisoned_empty(), emulated_launches(seed=seed) as launches:
        results = _listed(call.run(call.impl, call.dtype))
    names = {launch.program.name for launch in launches}
    assert names >= set(CALLS[name].kernels), names
    exact = _listed(call.run("reference", FP64))
    plain = _listed(call.run("eager", call.dtype))
    budget = {"factor": call.factor, "roundings": call.roundings}
    for i, (got, right, same) in enumerate(zip(results, exact, plain, strict=True)):
        assert_within_budget(got, right, same, **budget, what=f"{name}, result {i}")


if __name__ == "__main__":
    for asked in sys.argv[2:]:
        check(asked, int(sys.argv[1]))
        print(asked, "ok", flush=True)
