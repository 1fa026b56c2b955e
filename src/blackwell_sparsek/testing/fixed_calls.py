"""A fixed set of calls over every public function and every kernel family.

Long runs (`soak`) and compute-sanitizer (`sanitize`) repeat them. The calls are small, so that a
million take minutes, and their inputs come from fixed seeds on the CPU, so that every thread,
process and device starts from the same numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .. import masks
from ..attention import api as attention_api
from ..attention.merge import merge_states
from ..attention.sdpa import scaled_dot_product_attention
from ..core.errors import Unsupported
from ..decode import api as decode_api
from ..kv_cache import append as append_api
from ..kv_cache import selection as selection_api
from ..kv_cache.slots import Rotary
from ..masks.block_mask import BlockMask
from ..matmul.api import matmul, sddmm
from ..nn.bsr_linear import BSRLinear
from .bsr import operand_for, product, random_bsr
from .fixed_calls_sparse import sparse_calls
from .inputs import block_pattern, normal, qkv

# With options from tables and draws, whose types no checker can know.
attention: Any = attention_api.attention
attention_packed: Any = attention_api.attention_packed
attention_decode: Any = decode_api.attention_decode
kv_append: Any = append_api.kv_append
page_summaries: Any = selection_api.page_summaries
topk_pages: Any = selection_api.topk_pages

Results = tuple[torch.Tensor, ...]
Call = Callable[[], Results]
FP8 = torch.float8_e4m3fn
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
# Each as an argument of `impl`; those that a machine lacks are left out there.
KERNELS = ("triton", "sm90")


@dataclass(frozen=True)
class FixedCall:
    """One call with its inputs.

    Parameters
    ----------
    name : `<function>/<variant>/<impl>`
    make : (device) -> a function without arguments that makes the call and returns its results.
        Each function has inputs and caches of its own, so several threads may hold one each.
    varying : results that need not have the same bits in every run, by position; these are
        compared with the exact results under a bound
    exact : (device) -> the results in fp64 and in plain PyTorch of the call's dtype, for `varying`
    captured : whether a CUDA graph may hold the call
    """

    name: str
    make: Callable[[torch.device], Call]
    varying: tuple[int, ...] = ()
    exact: Callable[[torch.device], tuple[Results, Results]] | None = None
    captured: bool = True


def implementations(device: torch.device) -> tuple[str, ...]:
    """`auto`, and on a GPU the kernels by name."""
    return ("auto", *KERNELS) if device.type == "cuda" else ("auto",)


def fixed_calls(device: torch.device) -> list[FixedCall]:
    """All calls that this device can make, each with every implementation that takes it."""
    found = [
        call
        for impl in implementations(device)
        for source in (_attention, _backward, _decode, _caches, _products, _lists, _sparse)
        for call in source(impl)
    ]
    names = [call.name for call in found]
    assert len(set(names)) == len(names), "two calls have the same name"
    return found


def supported(call: FixedCall, device: torch.device) -> str | None:
    """Why the device cannot make this call, or None after it has made it once."""
    try:
        call.make(device)()
    except Unsupported as error:
        return str(error)
    return None


def _sparse(impl: str) -> Iterator[FixedCall]:
    for name, make in sparse_calls(impl).items():
        # the choice of keys looks at the sizes of what it chose from
        yield FixedCall(name, make, captured=not name.startswith("select_keys"))


# Attention.


def _qkv(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype, v_dim: int | None = None
) -> list[torch.Tensor]:
    batch, q_heads, kv_heads, q_len, kv_len, dim = shape
    made = qkv(batch, q_heads, kv_heads, q_len, kv_len, dim, seed=11, v_dim=v_dim, dtype=dtype)
    return [x.to(device) for x in made]


def _random_mask(
    device: torch.device, tokens: int, block_size: tuple[int, int], *, elements: bool = False
) -> BlockMask:
    grid = [-(-tokens // side) for side in block_size]
    keep = block_pattern(1, 2, *grid, density=0.5, seed=5)
    if not elements:
        return BlockMask.from_dense(keep.to(device), block_size, (tokens, tokens))
    visible = keep.repeat_interleave(block_size[0], -2).repeat_interleave(block_size[1], -1)
    visible = visible[..., :tokens, :tokens] & (normal(1, 2, tokens, tokens, seed=6) < 1)
    return BlockMask.from_element_mask(visible.to(device), block_size)


# Options by name: (batch, query heads, KV heads, queries, keys, D), dtype, Dv, block mask, options.
_SHAPES: dict[str, tuple[Any, ...]] = {
    "dense-d64": ((2, 4, 4, 300, 300, 64), BRAIN, None, None, {}),
    "causal-d128": ((1, 8, 8, 512, 512, 128), BRAIN, None, None, {"causal": True}),
    "gqa-d128-fp16": ((1, 8, 2, 257, 400, 128), HALF, None, None, {"causal": True}),
    "window-d64": ((1, 4, 4, 640, 640, 64), BRAIN, None, None, {"window": 100, "causal": True}),
    "d80": ((1, 4, 4, 129, 200, 80), HALF, None, None, {}),
    "d192-dv128": ((1, 2, 2, 200, 200, 192), BRAIN, 128, None, {"causal": True}),
    "d256": ((1, 4, 2, 200, 200, 256), BRAIN, None, None, {"causal": True}),
    "fp32-d64": ((1, 2, 1, 100, 130, 64), FLOAT, None, None, {}),
    "softcap-d128": ((1, 4, 4, 256, 256, 128), BRAIN, None, None, {"softcap": 20.0}),
    "blocks128-d128": ((1, 2, 2, 512, 512, 128), BRAIN, None, (128, 128), {}),
    "blocks64-d64": ((1, 2, 2, 448, 448, 64), BRAIN, None, (64, 64), {}),
    "elements128-d128": ((1, 2, 2, 400, 400, 128), BRAIN, None, (128, 128), {"causal": True}),
}


def _spec(name: str, device: torch.device) -> tuple[list[torch.Tensor], dict[str, Any]]:
    shape, dtype, v_dim, block_size, options = _SHAPES[name]
    options = dict(options)
    if block_size is not None:
        elements = name.startswith("elements")
        options["block_mask"] = _random_mask(device, shape[3], block_size, elements=elements)
    return _qkv(shape, device, dtype, v_dim), options


def _forward_call(name: str, impl: str, device: torch.device) -> Call:
    inputs, options = _spec(name, device)
    return lambda: attention(*inputs, **options, return_lse=True, impl=impl)


def _sinks_call(impl: str, device: torch.device) -> Call:
    inputs, options = _spec("causal-d128", device)
    sinks = normal(inputs[0].shape[1], seed=3, device=device)
    return lambda: attention(*inputs, **options, sinks=sinks, return_lse=True, impl=impl)


def _packed_inputs(device: torch.device, dim: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    lengths = (130, 1, 77, 300)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    q, k, v = (
        normal(sum(lengths), heads, dim, seed=21 + i, dtype=BRAIN, device=device)
        for i, heads in enumerate((4, 2, 2))
    )
    options = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths), "causal": True}
    return [q, k, v, offsets, offsets], options


def _varlen_call(dim: int, impl: str, device: torch.device) -> Call:
    inputs, options = _packed_inputs(device, dim)
    return lambda: attention_packed(*inputs, **options, return_lse=True, impl=impl)


def _sdpa_call(device: torch.device) -> Call:
    (q, k, v), _ = _spec("gqa-d128-fp16", device)
    return lambda: (scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),)


def _merge_call(device: torch.device) -> Call:
    o_a, o_b = (normal(2, 4, 100, 64, seed=i, dtype=BRAIN, device=device) for i in (1, 2))
    lse_a, lse_b = (normal(2, 4, 100, seed=i, device=device) for i in (3, 4))
    return lambda: merge_states(o_a, lse_a, o_b, lse_b)


def _attention(impl: str) -> Iterator[FixedCall]:
    for name in _SHAPES:
        yield FixedCall(f"attention/{name}/{impl}", partial(_forward_call, name, impl))
    yield FixedCall(f"attention/sinks/{impl}", partial(_sinks_call, impl))
    for dim in (64, 128):
        make = partial(_varlen_call, dim, impl)
        yield FixedCall(f"attention_varlen/d{dim}/{impl}", make)
    if impl == "auto":
        yield FixedCall("scaled_dot_product_attention/gqa/auto", _sdpa_call)
        yield FixedCall("merge_states/d64/auto", _merge_call)


# The backward pass. Only dq may differ, because the Hopper kernel adds to it in any order.

_BACKWARD = (
    "dense-d64", "causal-d128", "gqa-d128-fp16", "window-d64", "d192-dv128", "d256",
    "fp32-d64", "blocks128-d128", "blocks64-d64", "elements128-d128",
)  # fmt: skip


def _gradients(run: Callable[..., Any], inputs: list[torch.Tensor]) -> Results:
    with torch.enable_grad():
        out = run(*inputs)
        return torch.autograd.grad(out, inputs, _upstream(out))


def _upstream(out: torch.Tensor) -> torch.Tensor:
    """Ones with alternating signs: no host memory is read, so that a graph may hold it."""
    signs = torch.arange(out.shape[-1], device=out.device) % 2
    return (1 - 2 * signs).to(out.dtype).expand_as(out).contiguous()


def _backward_call(name: str, impl: str, deterministic: bool, device: torch.device) -> Call:
    inputs, options = _spec(name, device)
    inputs = [x.requires_grad_() for x in inputs]
    # lists for the backward are made once, as in training
    run = partial(attention, **options, impl=impl, deterministic=deterministic)
    return lambda: _gradients(run, inputs)


def _backward_exact(name: str, device: torch.device) -> tuple[Results, Results]:
    inputs, options = _spec(name, device)

    def of(dtype: torch.dtype, impl: str) -> Results:
        cast = [x.to(dtype).requires_grad_() for x in inputs]
        return _gradients(partial(attention, **options, impl=impl), cast)

    return of(torch.float64, "reference"), of(inputs[0].dtype, "eager")


def _varlen_backward(impl: str, device: torch.device) -> Call:
    inputs, options = _packed_inputs(device, 64)
    tensors, offsets = [x.requires_grad_() for x in inputs[:3]], inputs[3:]

    def run(*given: torch.Tensor) -> Any:
        return attention_packed(*given, *offsets, **options, impl=impl, deterministic=True)

    return lambda: _gradients(run, tensors)


def _backward(impl: str) -> Iterator[FixedCall]:
    for name in _BACKWARD:
        yield FixedCall(
            f"attention-backward/{name}-deterministic/{impl}",
            partial(_backward_call, name, impl, True),
        )
    for name in ("causal-d128", "blocks128-d128"):
        yield FixedCall(
            f"attention-backward/{name}/{impl}", partial(_backward_call, name, impl, False),
            varying=(0,), exact=partial(_backward_exact, name),
        )  # fmt: skip
    yield FixedCall(f"attention_varlen-backward/d64/{impl}", partial(_varlen_backward, impl))


# Decoding: lengths, (query heads, KV heads), queries, D, page size, fp8 cache, listed blocks.
_DECODE: dict[str, tuple[Any, ...]] = {
    "one-long-sequence": ((4000,), (8, 2), 1, 128, None, False, False),
    "batch": ((700, 33, 1, 512), (8, 2), 1, 128, None, False, False),
    "several-queries-d64": ((300, 77), (4, 4), 3, 64, None, False, False),
    "mqa": ((600, 10), (8, 1), 1, 128, None, False, False),
    "pages16": ((700, 33, 1, 512), (8, 2), 1, 128, 16, False, False),
    "pages64-d64": ((700, 33), (8, 2), 1, 64, 64, False, False),
    "fp8-pages64": ((700, 33, 1, 512), (8, 2), 1, 128, 64, True, False),
    "fp8-mha": ((300, 40), (4, 4), 1, 128, None, True, False),
    "listed-pages32": ((900, 65), (8, 2), 1, 128, 32, False, True),
    "d256": ((300,), (4, 2), 1, 256, None, False, False),
}


def _cache(
    lengths: Sequence[int], heads: int, dim: int, page_size: int | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Keys, values and the page table of a filled cache, on the CPU."""
    batch, slots = len(lengths), max(lengths)
    if page_size is None:
        shape: tuple[int, ...] = (batch, heads, slots, dim)
        table = None
    else:
        width = -(-slots // page_size)
        order = torch.randperm(batch * width + 2, generator=torch.Generator().manual_seed(7))
        shape = (batch * width + 2, page_size, heads, dim)
        table = order[: batch * width].view(batch, width).int()
    k, v = (normal(*shape, seed=31 + i).to(dtype) for i in range(2))
    return k, v, table


def _decode_call(name: str, impl: str, device: torch.device) -> Call:
    lengths, (q_heads, kv_heads), q_len, dim, page_size, fp8, listed = _DECODE[name]
    k, v, table = _cache(lengths, kv_heads, dim, page_size, FP8 if fp8 else BRAIN)
    q = normal(len(lengths), q_heads, q_len, dim, seed=30, dtype=BRAIN, device=device)
    options: dict[str, Any] = {
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device)
    }
    if table is not None:
        options["page_table"] = table.to(device)
    if fp8:
        options |= {"k_scale": torch.ones(kv_heads, device=device) / 2}
        options |= {"v_scale": torch.ones(kv_heads, device=device) * 2}
    if listed:
        blocks = torch.tensor([[0, 2, 5], [0, 1, -1]], dtype=torch.int32, device=device)
        options["kv_blocks"] = blocks[:, None].expand(2, kv_heads, 3).contiguous()
    k, v = k.to(device), v.to(device)
    return lambda: attention_decode(q, k, v, **options, return_lse=True, impl=impl)


def _decode(impl: str) -> Iterator[FixedCall]:
    for name in _DECODE:
        yield FixedCall(f"attention_decode/{name}/{impl}", partial(_decode_call, name, impl))


# Caches.


def _append_call(page_size: int | None, fp8: bool, impl: str, device: torch.device) -> Call:
    lengths, heads, tokens, dim = (40, 0, 17), 2, 5, 64
    dtype = FP8 if fp8 else BRAIN
    k_cache, v_cache, table = _cache([n + tokens for n in lengths], heads, dim, page_size, dtype)
    caches = [x.to(device) for x in (k_cache, v_cache)]
    k, v = (normal(3, heads, tokens, dim, seed=41 + i, dtype=BRAIN, device=device) for i in (0, 1))
    options: dict[str, Any] = {
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=device)
    }
    if table is not None:
        options["page_table"] = table.to(device)
    if fp8:
        options |= {"k_scale": torch.ones(heads, device=device) / 4}

    def append() -> Results:
        for cache in caches:
            cache.view(torch.uint8).zero_()
        kv_append(*caches, k, v, **options, impl=impl)
        return tuple(caches)

    return append


def _slots_call(rotary: bool, impl: str, device: torch.device) -> Call:
    """A packed batch; rotated, with its queries, into bf16 pages, or as it is into fp8 pages."""
    tokens, heads, dim, pages, page_size = 21, 2, 64, 5, 16
    dtype = BRAIN if rotary else FP8
    caches = [
        torch.empty(pages, page_size, heads, dim, dtype=dtype, device=device) for _ in range(2)
    ]
    q, k, v = (
        normal(tokens, count, dim, seed=44 + i, dtype=BRAIN, device=device)
        for i, count in enumerate((4, heads, heads))
    )
    slots = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(8))[:tokens]
    slots[::4] = -1
    options: dict[str, Any] = {"slot_mapping": slots.to(device)}
    if rotary:
        angles = torch.outer(torch.arange(50.0), 10000.0 ** -torch.linspace(0, 1, dim // 2))
        options["rotary"] = Rotary(angles.cos().to(device), angles.sin().to(device))
        options |= {"positions": torch.arange(tokens, dtype=torch.int32, device=device), "q": q}
    else:
        options["k_scale"] = torch.ones(heads, device=device) / 4

    def append() -> Results:
        for cache in caches:
            cache.view(torch.uint8).zero_()
        rotated = kv_append(*caches, k, v, **options, impl=impl)
        return (*caches, rotated) if rotary else tuple(caches)

    return append


def _summaries_call(kind: str, impl: str, device: torch.device) -> Call:
    lengths = (333, 64, 1)
    k, _, table = _cache(lengths, 2, 64, 32, BRAIN)
    assert table is not None
    k, table = k.to(device), table.to(device)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)

    def summarise() -> Results:
        made = page_summaries(k, cache_seqlens=seqlens, page_table=table, kind=kind, impl=impl)
        return made.low, made.high

    return summarise


def _topk_call(impl: str, device: torch.device) -> Call:
    lengths = (333, 64, 1)
    k, _, table = _cache(lengths, 2, 64, 32, BRAIN)
    assert table is not None
    k, table = k.to(device), table.to(device)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    made = page_summaries(k, cache_seqlens=seqlens, page_table=table)
    q = normal(3, 4, 1, 64, seed=43, dtype=BRAIN, device=device)
    options = {"cache_seqlens": seqlens, "page_table": table, "impl": impl}
    return lambda: (topk_pages(q, made, 4, **options),)


def _caches(impl: str) -> Iterator[FixedCall]:
    if impl == "sm90":
        return
    for name, page_size, fp8 in (("contiguous", None, False), ("pages16-fp8", 16, True)):
        make = partial(_append_call, page_size, fp8, impl)
        yield FixedCall(f"kv_append/{name}/{impl}", make)
    for name, rotary in (("slots-fp8", False), ("slots-rotary", True)):
        yield FixedCall(f"kv_append/{name}/{impl}", partial(_slots_call, rotary, impl))
    for kind in ("minmax", "mean"):
        yield FixedCall(f"page_summaries/{kind}/{impl}", partial(_summaries_call, kind, impl))
    yield FixedCall(f"topk_pages/pages32/{impl}", partial(_topk_call, impl))


# Products: (rows, columns) of A, block, density, order, columns of X, dtype, what follows.
_PRODUCTS: dict[str, tuple[Any, ...]] = {
    "wide-128x128": ((1024, 512), (128, 128), 0.3, "A@X", 512, BRAIN, {}),
    "wide-transposed": ((512, 1024), (128, 64), 0.3, "A.T@X", 256, HALF, {}),
    "right": ((512, 768), (64, 64), 0.3, "X@A", 200, BRAIN, {}),
    "pairs-64x64": ((2048, 512), (64, 64), 0.25, "A@X", 2560, BRAIN, {}),
    "pairs-32x32": ((2048, 512), (32, 32), 0.25, "A@X", 2560, BRAIN, {}),
    "epilogue": ((512, 512), (64, 64), 0.3, "X@A.T", 300, BRAIN, {"activation": "gelu"}),
    "narrow-64x64": ((1024, 1024), (64, 64), 0.3, "X@A.T", 16, BRAIN, {}),
    "narrow-split": ((5120, 1024), (64, 64), 0.9, "X@A.T", 16, BRAIN, {}),
    "narrow-one": ((512, 1024), (64, 64), 0.3, "X@A.T", 1, BRAIN, {}),
    "strips-16x16": ((1024, 512), (16, 16), 0.3, "X@A.T", 8, BRAIN, {}),
    "strips-128x16": ((1024, 512), (128, 16), 0.3, "X@A.T", 16, HALF, {}),
    "warps-16x16": ((4096, 1024), (16, 16), 0.1, "A@X", 1024, BRAIN, {}),
    "fp32": ((200, 300), (32, 16), 0.4, "A@X", 77, FLOAT, {}),
    "ragged": ((500, 300), (64, 32), 0.4, "X@A.T", 130, BRAIN, {}),
}


def _product_call(name: str, impl: str, device: torch.device) -> Call:
    shape, block, density, order, columns, dtype, follows = _PRODUCTS[name]
    if device.type == "cpu":
        # large shapes are for Hopper, which takes some kernels for products of a certain size only
        shape = tuple(min(side, 512) for side in shape)
        columns = min(columns, 512)
    a = random_bsr(shape, block, seed=51, density=density, dtype=dtype, device=device)
    x = operand_for(a, order, columns, seed=52)
    options = dict(follows)
    if follows:
        options["bias"] = normal(shape[0], seed=53, dtype=dtype, device=device)
    return lambda: (product(a, order, x, **options, impl=impl),)


def _pair_products_call(impl: str, device: torch.device) -> Call:
    a, b = (
        random_bsr((256, 256), (32, 32), seed=54 + i, dtype=BRAIN, device=device) for i in (0, 9)
    )
    return lambda: (matmul(a, b, impl=impl).data,)


def _sddmm_call(block: tuple[int, int], impl: str, device: torch.device) -> Call:
    pattern = random_bsr((512, 256), block, seed=56, dtype=BRAIN, device=device).pattern
    a, b = (normal(*shape, seed=57, dtype=BRAIN, device=device) for shape in ((512, 96), (96, 256)))
    return lambda: (sddmm(a, b, pattern, impl=impl).data,)


def _linear_call(impl: str, device: torch.device) -> Call:
    a = random_bsr((256, 384), (64, 64), seed=58, dtype=BRAIN, device=device)
    bias = normal(256, seed=59, dtype=BRAIN, device=device)
    layer = BSRLinear.from_matrix(a, bias, activation="silu", impl=impl)
    x = normal(150, 384, seed=60, dtype=BRAIN, device=device).requires_grad_()
    inputs = [x, *layer.parameters()]
    return lambda: _gradients(lambda *_: layer(x), inputs)


def _products(impl: str) -> Iterator[FixedCall]:
    for name in _PRODUCTS:
        yield FixedCall(f"matmul/{name}/{impl}", partial(_product_call, name, impl))
    if impl == "auto":
        yield FixedCall("matmul/densified/dense", partial(_product_call, "wide-128x128", "dense"))
    if impl == "sm90":
        return
    # waits for the device to learn which blocks the result has
    make = partial(_pair_products_call, impl)
    yield FixedCall(f"matmul/bsr-bsr/{impl}", make, captured=False)
    for block in ((128, 128), (32, 16)):
        name = f"sddmm/{block[0]}x{block[1]}/{impl}"
        yield FixedCall(name, partial(_sddmm_call, block, impl))
    yield FixedCall(f"BSRLinear-backward/silu/{impl}", partial(_linear_call, impl))


# Building lists of blocks allocates what depends on the data, so no graph holds it.


def _mask_call(device: torch.device) -> Call:
    keep = block_pattern(1, 2, 9, 7, density=0.5, seed=61).to(device)

    def build() -> Results:
        mask = BlockMask.from_dense(keep, (64, 64), (560, 440))
        lists = [x for x in (mask.forward, mask.transposed) if x is not None]
        return tuple(x for made in lists for x in (made.indptr, made.indices))

    return build


def _topk_mask_call(device: torch.device) -> Call:
    scores = normal(1, 2, 8, 8, seed=62, device=device)
    return lambda: (masks.topk(scores, 3, 64).to_dense(),)


def _lists(impl: str) -> Iterator[FixedCall]:
    if impl == "auto":
        yield FixedCall("BlockMask/from_dense/auto", _mask_call, captured=False)
        yield FixedCall("masks.topk/3/auto", _topk_mask_call, captured=False)
