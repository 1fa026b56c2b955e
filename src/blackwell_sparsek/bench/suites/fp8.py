"""fp8: rounding, attention and block-sparse products, against 16 bits and other libraries.

Implementations are asked for by name, the first that takes the problem: what is measured must not
depend on what `auto` is told to take.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ... import BSRMatrix, attention, explain, fp8, matmul
from ...core.fp8 import E4M3
from ...fp8 import Quantized
from ..case import EAGER, GRAPH, Case, Contender, Peer, Suite
from .attention import dtype_of
from .attention_peers import (
    CUDNN_BLOCKS,
    FA3,
    OURS,
    blocks_of,
    call_by_name,
    fa3_available,
    fa3_operator,
    fa3_options,
    load,
    needs,
    options_of,
    supports_blocks,
    why_missing,
    window_of,
)
from .attention_peers import MODULE as CUDNN
from .attention_problem import Attention, AttentionInputs
from .matmul import LLAMA, Product, ProductInputs

ROUNDING, WIDE, CUBLAS, DENSE, CAST = "bsk_rounding", "bsk_16bit", "cublaslt_fp8", "dense", "cast"
_FA3 = ("flash_attn_interface", "flash_attn_func")
CUDNN_ROUNDING = "cudnn_rounding"
_CUDNN_FORWARD = (CUDNN, "block_sparse_attention_fp8_forward")
# Its steps by themselves have no public names.
_CUDNN_ROUND = (f"{CUDNN}._fp8_quant", "_quantize_sage_bhsd")
_CUDNN_STEPS = f"{CUDNN}._interface"


def first_impl(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The fastest implementation that takes a call."""
    on_gpu = args[0].data.is_cuda
    for impl in ("sm90", "triton") if on_gpu else ():
        if explain(function, *args, **kwargs, impl=impl).chosen == impl:
            return impl
    return "eager"


def _on_gpu(inputs: Any) -> str | None:
    return None if inputs.device.type == "cuda" else "needs a CUDA GPU"


# Rounding.


@dataclass(frozen=True)
class Rounding:
    """`bsk.fp8.quantize` of `[batch, heads, tokens, channels]`, or `[tokens, channels]`."""

    shape: tuple[int, ...]
    scale: str
    smooth: bool = False
    hadamard: bool = False
    transposed: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def title(self) -> str:
        """A name for tables."""
        names = ("smooth", "hadamard", "transposed")
        extras = [name for name in names if getattr(self, name)]
        return f"{'x'.join(map(str, self.shape))} {' '.join([self.scale, *extras])}"

    def describe(self) -> dict[str, Any]:
        """The problem as the results record it."""
        names = ("scale", "smooth", "hadamard", "transposed")
        found = {name: getattr(self, name) for name in names}
        return {"shape": list(self.shape), **found, "dtype": str(self.dtype).split(".")[-1]}

    def build(self, device: torch.device) -> "RoundingInputs":
        """Random values, the same at each call."""
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(self.shape, generator=generator, device=device, dtype=self.dtype)
        return RoundingInputs(self, x)


@dataclass(frozen=True)
class RoundingInputs:
    """The values to be rounded."""

    problem: Rounding
    x: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.x.device

    @property
    def moved_bytes(self) -> float:
        """Bytes that are read and written once."""
        return float(self.x.numel() * (self.x.element_size() + 1))


def _extras(problem: Rounding) -> dict[str, Any]:
    names = ("smooth", "hadamard", "transposed")
    return {name: getattr(problem, name) for name in names}


def _round(inputs: RoundingInputs) -> Contender:
    problem, x = inputs.problem, inputs.x
    impl = "triton" if x.is_cuda else "eager"
    run = partial(fp8.quantize, x, problem.scale, **_extras(problem), impl=impl)

    def check(made: Quantized) -> None:
        exact = fp8.quantize(x, problem.scale, **_extras(problem), impl="eager")
        # half a step each: 2^-4 of a value, or 2^-10 of its scale near zero
        step = 2.0**-3 * exact.stored().abs() + 2.0**-9 * exact.descale.max()
        if bool(((made.stored() - exact.stored()).abs() > step).any()):
            raise AssertionError("values are off by more than a step of e4m3")

    notes = {"implementation": impl}
    return Contender(run, check, notes=notes, moved_bytes=inputs.moved_bytes)


def _cast(inputs: RoundingInputs) -> Contender:
    """A cast without scales reads and writes the same bytes."""
    x = inputs.x

    def check(made: torch.Tensor) -> None:
        if made.dtype != E4M3 or made.shape != x.shape:
            raise AssertionError(f"expected {E4M3}, got {made.dtype}")

    return Contender(lambda: x.to(E4M3), check, moved_bytes=inputs.moved_bytes)


ROUNDING_PEERS = {
    OURS: Peer(OURS, "bsk.fp8.quantize", _round),
    CAST: Peer(CAST, "x.to(float8_e4m3fn), without scales", _cast),
}


def fp8_quantize(tiny: bool = False) -> Iterator[Case]:
    """Rounding queries, keys and values of 8k tokens, and activations of a layer."""
    tokens, heads, dim, wide = (130, 2, 16, 300) if tiny else (8192, 64, 128, 8192)
    q, kv = (1, heads, tokens, dim), (1, max(heads // 8, 1), tokens, dim)
    problems = [
        Rounding(q, "block"),
        Rounding(q, "block", hadamard=True),
        Rounding(kv, "block", smooth=True),
        Rounding(kv, "block", smooth=True, hadamard=True),
        Rounding(kv, "channel", transposed=True),
        Rounding((tokens, wide), "tensor"),
        Rounding((tokens, wide), "128x128"),
        Rounding((tokens, wide), "1x128"),
    ]
    for problem in problems:
        problem = replace(problem, dtype=dtype_of(tiny))
        yield Case(problem.title, problem.describe(), problem.build, tuple(ROUNDING_PEERS))


# Attention.


@dataclass(frozen=True)
class Fp8Inputs:
    """Tensors in 16 bits, and rounded: 128 tokens of q and k by a scale, channels of v."""

    wide: AttentionInputs
    q: Quantized
    k: Quantized
    v: Quantized

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.wide.q.device

    @classmethod
    def of(cls, problem: Attention, device: torch.device) -> "Fp8Inputs":
        """The inputs of a problem."""
        wide = problem.build(device)
        impl = "triton" if device.type == "cuda" else "eager"
        q, k = (fp8.quantize(x, "block", impl=impl) for x in (wide.q, wide.k))
        return cls(wide, q, k, fp8.quantize(wide.v, "channel", transposed=True, impl=impl))

    def check(self, out: torch.Tensor) -> None:
        """Compare with fp64 before rounding: at most twice the error that rounding itself makes."""
        rows, heads, exact, _ = self.wide._expected
        got = torch.stack([out[b, h, rows] for b, h in heads]).double()
        group = self.wide.q.shape[1] // self.wide.k.shape[1]
        q, k, v = (x.dequantize() for x in (self.q, self.k, self.v))
        plain = []
        for b, h in heads:
            scores = q[b, h, rows] @ k[b, h // group].mT * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~self.wide.visible(h, rows), -torch.inf)
            top = scores.amax(1, keepdim=True).nan_to_num(neginf=0.0)
            # weights in e4m3, the largest of a row being 256
            weights = torch.exp(scores - top) * 256
            total = weights.sum(1, keepdim=True)
            made = weights.to(E4M3).float() @ v[b, h // group]
            plain.append(made / torch.where(total == 0, 1.0, total))
        rounding = (torch.stack(plain).double() - exact).norm()
        error = (got - exact).norm()
        if not bool(error <= 2 * rounding):
            raise AssertionError(
                f"error {float(error):.4g}, that of rounding {float(rounding):.4g}"
            )


def _fp8_attention(inputs: Fp8Inputs) -> Contender:
    options = options_of(inputs.wide) | {
        "q_descale": inputs.q.descale,
        "k_descale": inputs.k.descale,
        "v_descale": inputs.v.descale,
        "out_dtype": inputs.wide.q.dtype,
    }
    tensors = (inputs.q.data, inputs.k.data, inputs.v.data)
    impl = first_impl(attention, *tensors, **options)
    run = partial(attention, *tensors, **options, impl=impl)
    return Contender(run, inputs.check, inputs.wide.flops, notes={"implementation": impl})


def _rounding_attention(inputs: Fp8Inputs) -> Contender:
    wide, options = inputs.wide, options_of(inputs.wide)
    tensors = (wide.q, wide.k, wide.v)
    impl = _fp8_attention(inputs).notes["implementation"]  # type: ignore[index]
    run = partial(fp8.attention, *tensors, **options, impl=impl)
    return Contender(run, inputs.check, wide.flops, notes={"implementation": impl})


def _wide_attention(inputs: Fp8Inputs) -> Contender:
    wide = inputs.wide
    run = partial(attention, wide.q, wide.k, wide.v, **options_of(wide))
    return Contender(run, wide.check(), wide.flops)


def _fa3_attention(inputs: Fp8Inputs) -> Contender:
    """FlashAttention 3 with a scale for each head, on its own layout."""
    wide, p = inputs.wide, inputs.wide.problem
    impl = "triton" if wide.q.is_cuda else "eager"
    q, k, v = (fp8.quantize(x, "head", impl=impl) for x in (wide.q, wide.k, wide.v))
    tokens = [x.data.transpose(1, 2).contiguous() for x in (q, k, v)]
    # one scale for the queries of a KV head
    group = wide.q.shape[1] // wide.k.shape[1]
    of_q = q.descale.view(*k.descale.shape, group).amax(2)
    ratio = (q.descale / of_q.repeat_interleave(group, 1))[:, None, :, None]
    tokens[0] = (tokens[0].float() * ratio).to(E4M3)
    scales = {"q_descale": of_q, "k_descale": k.descale, "v_descale": v.descale}
    window = window_of(wide, -1)

    def by_function() -> Any:
        function = load(*_FA3)
        return function(*tokens, causal=p.causal, window_size=window, **scales)

    starts = torch.arange(p.batch + 1, device=wide.q.device, dtype=torch.int32) * p.length
    options = fa3_options(p.head_dim, p.causal, window) | scales
    options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "num_splits": 1}
    options |= {"max_seqlen_q": p.length, "max_seqlen_k": p.length}
    packed = dict(zip("qkv", (x.flatten(0, 1) for x in tokens), strict=True))

    def by_library() -> Any:
        return call_by_name(fa3_operator(), packed | options)

    installed = why_missing(*_FA3) is None

    def run() -> torch.Tensor:
        out = by_function() if installed else by_library()
        first: torch.Tensor = out[0] if isinstance(out, (tuple, list)) else out
        return first.view(p.batch, p.length, p.heads, -1).transpose(1, 2)

    return Contender(run, inputs.check, wide.flops)


def _fa3_takes(inputs: Fp8Inputs) -> str | None:
    blocks = "has no block masks" if inputs.wide.keep is not None else None
    return _on_gpu(inputs) or blocks


def _cudnn_attention(inputs: Fp8Inputs) -> Contender:
    """cuDNN's kernel over what cuDNN rounds: a scale for a query, 16 keys, a channel of values."""
    wide = inputs.wide
    index, side = _cudnn_blocks(inputs)
    rounded = load(*_CUDNN_ROUND)(wide.q, wide.k, wide.v, v_layout="bhds")
    forward = load(_CUDNN_STEPS, f"_bsa_attn_fwd_sm90_fp8_blk{side}")

    def run() -> torch.Tensor:
        out: torch.Tensor = forward(*rounded, index, index.shape[-1])[0]
        return out

    return Contender(run, inputs.check, wide.flops)


def _cudnn_rounding_attention(inputs: Fp8Inputs) -> Contender:
    wide, forward = inputs.wide, load(*_CUDNN_FORWARD)
    index, side = _cudnn_blocks(inputs)

    def run() -> torch.Tensor:
        made = forward(wide.q, wide.k, wide.v, index, sparse_block_size=side)
        out: torch.Tensor = made["o_tensor"]
        return out

    return Contender(run, inputs.check, wide.flops)


def _cudnn_blocks(inputs: Fp8Inputs) -> tuple[torch.Tensor, int]:
    """The kept blocks of each row, and the side of a block."""
    blocks = blocks_of(inputs.wide)
    return blocks["q2k_block_index"], blocks["sparse_block_size"]


def _cudnn_takes(inputs: Fp8Inputs) -> str | None:
    p = inputs.wide.problem
    if (reason := supports_blocks(inputs.wide)) is not None:
        return reason
    if p.heads != inputs.wide.k.shape[1]:
        return "takes as many KV heads as query heads"
    return None if (p.head_dim, p.causal) == (128, False) else "takes head dim 128, not causal"


ATTENTION_PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "bsk.attention over e4m3", _fp8_attention),
        Peer(ROUNDING, "bsk.fp8.attention, with rounding", _rounding_attention),
        Peer(WIDE, "bsk.attention in 16 bits", _wide_attention),
        Peer(FA3, "FlashAttention 3 in fp8", _fa3_attention, fa3_available, _fa3_takes, True),
        Peer(
            CUDNN_BLOCKS,
            "cuDNN front end, block-sparse in fp8",
            _cudnn_attention,
            needs(*_CUDNN_ROUND),
            _cudnn_takes,
            True,
        ),
        Peer(
            CUDNN_ROUNDING,
            "the same with rounding",
            _cudnn_rounding_attention,
            needs(*_CUDNN_FORWARD),
            _cudnn_takes,
            True,
        ),
    )
}


def fp8_attention(tiny: bool = False) -> Iterator[Case]:
    """Attention in e4m3: dense, causal and block masks, compared with 16 bits."""
    if tiny:
        small = Attention(1, 2, 140, 16, 1, torch.float32)
        problems = [small, replace(small, causal=True)]
        problems.append(replace(small, length=128, block=(64, 64), density=0.5))
    else:
        long = Attention(1, 64, 16384, 128, 8)
        problems = [long, replace(long, causal=True), replace(long, length=8192, causal=True)]
        problems += [replace(long, head_dim=64, causal=True)]
        problems += [replace(long, heads=16, head_dim=256, length=8192, causal=True)]
        masked = Attention(1, 32, 16384, 128, 8, block=(128, 128), density=0.22)
        problems += [masked, replace(masked, block=(64, 64))]
        problems += [replace(masked, length=65536, density=0.05)]
        # without grouped heads, as cuDNN needs it
        problems += [replace(masked, kv_heads=0, block=(side, side)) for side in (128, 64)]
        problems += [replace(masked, heads=8, kv_heads=0, length=65536, density=0.05)]
    for problem in problems:
        build = partial(Fp8Inputs.of, problem)
        dense = 4.0 * problem.head_dim * problem.batch * problem.heads * problem.length**2
        names = tuple(ATTENTION_PEERS)
        yield Case(problem.title, problem.describe(), build, names, dense)


# Products.


@dataclass(frozen=True)
class Fp8ProductInputs:
    """A layer in 16 bits, and rounded: blocks by a scale each, x by 128 channels of a token."""

    wide: ProductInputs
    w: BSRMatrix
    x: Quantized

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.wide.x.device

    @classmethod
    def of(cls, product: Product, replicated: bool, device: torch.device) -> "Fp8ProductInputs":
        """The inputs of a product."""
        wide = product.build(device, replicated=replicated)
        impl = "triton" if device.type == "cuda" else "eager"
        return cls(wide, wide.sparse.to_fp8(), fp8.quantize(wide.x, "1x128", impl=impl))

    @property
    def flops(self) -> float:
        """FLOPs over the stored blocks."""
        return 2.0 * self.wide.stored * self.wide.product.n

    def check(self) -> Callable[[torch.Tensor], None]:
        """Compare with fp64 on what is stored."""
        return self.wide.check(self.w.to_dense(), self.x.dequantize())

    def replicas(self, call: Callable[[BSRMatrix], torch.Tensor]) -> tuple[Any, ...]:
        """The same call on copies of the matrix that outgrow the caches."""
        w = self.w
        return tuple(
            partial(call, BSRMatrix._from_parts(w.pattern, s, stored_descale=w.stored_descale))
            for s in self.wide.replicas(w.storage)
        )


def _fp8_product(inputs: Fp8ProductInputs) -> Contender:
    x, dtype = inputs.x, inputs.wide.x.dtype
    impl = first_impl(matmul, x, inputs.w.T, out_dtype=dtype)

    def call(w: BSRMatrix) -> torch.Tensor:
        return matmul(x, w.T, out_dtype=dtype, impl=impl)

    notes = {"implementation": impl}
    run = partial(call, inputs.w)
    return Contender(run, inputs.check(), inputs.flops, inputs.replicas(call), notes)


def _rounding_product(inputs: Fp8ProductInputs) -> Contender:
    x = inputs.wide.x
    impl = first_impl(matmul, inputs.x, inputs.w.T, out_dtype=x.dtype)

    def call(w: BSRMatrix) -> torch.Tensor:
        return fp8.matmul(x, w.T, impl=impl)

    notes = {"implementation": impl}
    run = partial(call, inputs.w)
    return Contender(run, inputs.check(), inputs.flops, inputs.replicas(call), notes)


def _wide_product(inputs: Fp8ProductInputs) -> Contender:
    wide = inputs.wide

    def call(w: BSRMatrix) -> torch.Tensor:
        return matmul(wide.x, w.T)

    copies = wide.replicas(wide.sparse.storage)
    replicas = tuple(partial(call, BSRMatrix._from_parts(wide.sparse.pattern, s)) for s in copies)
    return Contender(partial(call, wide.sparse), wide.check(), inputs.flops, replicas)


def _cublaslt(inputs: Fp8ProductInputs) -> Contender:
    """The dense product in fp8, by one scale for each operand."""
    wide = inputs.wide
    x, w = (fp8.quantize(t, "tensor", impl="eager") for t in (wide.x, wide.dense))

    def call(weight: torch.Tensor) -> torch.Tensor:
        scales: dict[str, Any] = {
            "scale_a": x.descale,
            "scale_b": w.descale,
            "out_dtype": wide.x.dtype,
        }
        return torch._scaled_mm(x.data, weight.mT, **scales)

    replicas = tuple(partial(call, weight) for weight in wide.replicas(w.data))
    check = wide.check(w.dequantize(), x.dequantize())
    flops = wide.product.dense_flops
    return Contender(partial(call, w.data), check, flops, replicas)


def _dense_product(inputs: Fp8ProductInputs) -> Contender:
    wide = inputs.wide

    def call(weight: torch.Tensor) -> torch.Tensor:
        return torch.matmul(wide.x, weight.mT)

    replicas = tuple(partial(call, weight) for weight in wide.replicas(wide.dense))
    flops = wide.product.dense_flops
    return Contender(partial(call, wide.dense), wide.check(), flops, replicas)


def _cublaslt_takes(inputs: Fp8ProductInputs) -> str | None:
    tokens = inputs.wide.product.n
    return _on_gpu(inputs) or (None if tokens % 16 == 0 else "takes multiples of 16 tokens")


PRODUCT_PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "bsk.matmul in e4m3", _fp8_product),
        Peer(ROUNDING, "bsk.fp8.matmul, with rounding", _rounding_product),
        Peer(WIDE, "bsk.matmul in 16 bits", _wide_product),
        Peer(CUBLAS, "torch._scaled_mm (cuBLASLt), dense", _cublaslt, supports=_cublaslt_takes),
        Peer(DENSE, "torch.matmul (cuBLAS on a GPU)", _dense_product),
    )
}


def fp8_matmul(tiny: bool = False) -> Iterator[Case]:
    """Layers in e4m3: 8192 cubed at 78 %, and those of Llama 3 8B for 1 to 64 tokens."""
    dtype = dtype_of(tiny)
    if tiny:
        for tokens in (1, 65):
            yield _product(Product(64, 256, tokens, (32, 32), 0.5, dtype, True), "64x256")
        return
    for block in ((128, 128), (64, 64), (32, 32)):
        yield _product(Product(8192, 8192, 8192, block, 0.22, dtype, True), "8192^3")
    for name in (name for name in LLAMA if name.startswith("8B")):
        for tokens in (1, 16, 64):
            product = Product(*LLAMA[name], tokens, (128, 128), 0.22, dtype, True)
            yield _product(product, f"{name}, {tokens} tokens", (EAGER, GRAPH))


def _product(product: Product, name: str, modes: tuple[str, ...] = (EAGER,)) -> Case:
    height, width = product.block
    title = f"{name}, {product.n} tokens" if "tokens" not in name else name
    title = f"{title}, blocks {height}x{width} at {product.density:.0%}"
    build = partial(Fp8ProductInputs.of, product, GRAPH in modes)
    names = tuple(PRODUCT_PEERS)
    return Case(title, product.describe(), build, names, product.dense_flops, modes)


SUITES = [
    Suite("fp8_attention", fp8_attention.__doc__ or "", fp8_attention, ATTENTION_PEERS, OURS),
    Suite("fp8_matmul", fp8_matmul.__doc__ or "", fp8_matmul, PRODUCT_PEERS, OURS, DENSE),
    Suite("fp8_quantize", fp8_quantize.__doc__ or "", fp8_quantize, ROUNDING_PEERS, unit="us"),
]
