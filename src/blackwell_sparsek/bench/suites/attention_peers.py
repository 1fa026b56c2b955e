"""Peers of forward attention: this package, torch, and libraries that may be installed."""

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import attention, explain
from ..case import Contender, Peer
from .attention_problem import AttentionInputs

# Imports of optional libraries, with the reason if one is missing.


@cache
def load(module: str, name: str) -> Any:
    """`module.name`, imported on first use."""
    return getattr(importlib.import_module(module), name)


@cache
def why_missing(module: str, name: str) -> str | None:
    """The reason why `module.name` cannot be imported here, or None; imports it if installed."""
    top = module.split(".")[0]
    if importlib.util.find_spec(top) is None:
        return f"{top} is not installed"
    try:
        load(module, name)
    except AttributeError:
        return f"{module} has no {name}"
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # built for another torch, another GPU, ...
        return f"{module} does not import: {type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def needs(module: str, name: str) -> Callable[[], str | None]:
    """`Peer.available` for a peer that calls `module.name`."""
    return lambda: why_missing(module, name)


def library_on_path(name: str) -> pathlib.Path | None:
    """The first shared library of that name in a folder that Python imports from."""
    found = (pathlib.Path(folder or ".") / name for folder in sys.path)
    return next((path for path in found if path.is_file()), None)


# This package as a peer of attention.

OURS, OURS_DENSE = "bsk", "bsk_dense"


def options_of(inputs: AttentionInputs) -> dict[str, Any]:
    """Arguments of `bsk.attention` for a problem."""
    p = inputs.problem
    return {"causal": p.causal, "window": p.window, "block_mask": inputs.mask}


def _ours(inputs: AttentionInputs) -> Contender:
    options = options_of(inputs)

    def call(x: AttentionInputs) -> torch.Tensor:
        out = attention(x.q, x.k, x.v, **options)
        assert isinstance(out, torch.Tensor)  # a pair only with return_lse
        return out

    decision = explain(attention, inputs.q, inputs.k, inputs.v, **options)
    return Contender(
        lambda: call(inputs),
        inputs.check(),
        inputs.flops,
        tuple(partial(call, x) for x in inputs.others()),
        {"implementation": decision.chosen, "why_not": dict(decision.reasons)},
    )


def _ours_dense(inputs: AttentionInputs) -> Contender:
    """Attention without the mask, as a baseline for the cost of a mask that hides nothing."""
    whole = AttentionInputs(inputs.problem.dense(), inputs.q, inputs.k, inputs.v, None)
    return _ours(whole)


ours_dense: Peer = Peer(OURS_DENSE, "blackwell_sparsek without the mask", _ours_dense)
ours: Peer = Peer(OURS, "blackwell_sparsek, impl auto", _ours)


# torch's own attention: each backend of SDPA, and FlexAttention.

CUDNN, FLASH, SDPA = "sdpa_cudnn", "sdpa_flash", "sdpa"
DENSE, FLEX = "sdpa_dense", "flex"


def _sdpa(inputs: AttentionInputs, backends: list[SDPBackend]) -> Contender:
    grouped = bool(inputs.problem.kv_heads)

    def call(x: AttentionInputs) -> torch.Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(
                x.q, x.k, x.v, is_causal=x.problem.causal, enable_gqa=grouped
            )

    return contender_of(inputs, call)


def contender_of(
    inputs: AttentionInputs,
    call: Callable[[AttentionInputs], torch.Tensor],
    notes: dict[str, Any] | None = None,
) -> Contender:
    """A contender whose `call` takes inputs and returns `[B, H, S, D]`."""
    replicas = tuple(partial(call, x) for x in inputs.others())
    return Contender(partial(call, inputs), inputs.check(), inputs.flops, replicas, notes)


def _dense(inputs: AttentionInputs) -> Contender:
    """The alternative without a sparse kernel: the same attention with nothing left out."""
    whole = AttentionInputs(inputs.problem.dense(), inputs.q, inputs.k, inputs.v, None)
    return _sdpa(whole, _best_backends(inputs.q))


def _best_backends(q: torch.Tensor) -> list[SDPBackend]:
    order = [SDPBackend.CUDNN_ATTENTION] if q.is_cuda else []
    return [*order, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _flex(inputs: AttentionInputs) -> Contender:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    options: dict[str, Any] = {"block_mask": flex_mask(inputs)}
    options["enable_gqa"] = bool(inputs.problem.kv_heads)
    block = inputs.problem.block
    if block is not None and min(block) < 128:
        # its tiles must divide the blocks, and its default tiles have 128 rows
        options["kernel_options"] = {"BLOCK_M": min(128, block[0]), "BLOCK_N": min(64, block[1])}

    def call(x: AttentionInputs) -> torch.Tensor:
        out: torch.Tensor = compiled(x.q, x.k, x.v, **options)
        return out

    return contender_of(inputs, call)


def flex_mask(inputs: AttentionInputs) -> Any:
    """The block mask of FlexAttention for a problem; None if everything is visible."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    p = inputs.problem
    if inputs.keep is not None and p.block is not None:
        counts, order = block_lists(inputs.keep)
        nothing = torch.zeros_like(counts)
        return BlockMask.from_kv_blocks(
            nothing[None],
            order[None],
            counts[None],
            order[None],
            BLOCK_SIZE=p.block,
            seq_lengths=(p.length, p.length),
        )
    if not p.causal and p.window is None:
        return None
    window, causal = p.window, p.causal

    def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
        if window is None:
            return q >= kv
        inside = q - kv < window
        return inside & (q >= kv) if causal else inside & (kv - q < window)

    # compiled, because eager mode first builds a mask of Sq x Sk elements
    return create_block_mask(
        seen, None, None, p.length, p.length, device=inputs.q.device.type, _compile=True
    )


def block_lists(keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count and indices of the kept blocks of each row, int32; the other indices follow as padding.

    Examples
    --------
    >>> import torch
    >>> counts, order = block_lists(torch.tensor([[[False, True, True]]]))
    >>> counts.tolist(), order.tolist()
    ([[2]], [[[1, 2, 0]]])
    """
    counts = keep.sum(-1, dtype=torch.int32)
    order = keep.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts, order


def on_gpu(inputs: AttentionInputs) -> str | None:
    """The reason why a GPU-only peer does not run on these inputs, or None."""
    return None if inputs.q.is_cuda else "needs a CUDA GPU"


def _plain_band(inputs: AttentionInputs) -> str | None:
    return None if inputs.shown == "band" else f"has no {inputs.shown} mask"


def _plain_band_on_gpu(inputs: AttentionInputs) -> str | None:
    return on_gpu(inputs) or _plain_band(inputs)


def _equal_dims(inputs: AttentionInputs) -> str | None:
    p = inputs.problem
    if p.value_dim != p.head_dim:
        return f"needs values as wide as keys, not {p.value_dim} and {p.head_dim}"
    return None


def _flex_supports(inputs: AttentionInputs) -> str | None:
    if (reason := on_gpu(inputs)) is not None:
        return reason
    block = inputs.problem.block
    if block is not None and min(block) < 16:
        return f"has no blocks of {block[0]}x{block[1]}"
    return None


sdpa_cudnn: Peer = Peer(
    CUDNN,
    "SDPA, cuDNN",
    partial(_sdpa, backends=[SDPBackend.CUDNN_ATTENTION]),
    supports=_plain_band_on_gpu,
    rival=True,
)
sdpa_flash: Peer = Peer(
    FLASH,
    "SDPA, flash (FA2)",
    partial(_sdpa, backends=[SDPBackend.FLASH_ATTENTION]),
    supports=lambda inputs: _plain_band_on_gpu(inputs) or _equal_dims(inputs),
    rival=True,
)
sdpa: Peer = Peer(
    SDPA,
    "SDPA, torch's choice",
    lambda inputs: _sdpa(inputs, _best_backends(inputs.q)[-3:]),
    supports=lambda inputs: (
        _plain_band(inputs) or ("measured by backend" if inputs.q.is_cuda else None)
    ),
    rival=True,
)
sdpa_dense: Peer = Peer(
    DENSE,
    "SDPA without the mask's sparsity",
    _dense,
    supports=lambda inputs: "is the case itself" if inputs.shown == "band" else None,
)
flex: Peer = Peer(FLEX, "FlexAttention, compiled", _flex, supports=_flex_supports, rival=True)

FA2, FA3, FA4 = "fa2", "fa3", "fa4"
_FA3 = ("flash_attn_interface", "flash_attn_func")
# FlashAttention 3 as vLLM builds it: a library of torch operators without Python code
_FA3_LIBRARY = "_vllm_fa3_C.abi3.so"


def token_major_contender(
    inputs: AttentionInputs, call: Callable[..., Any], **notes: Any
) -> Contender:
    """A contender whose `call` takes and returns `[B, S, H, D]`, the output alone or in a tuple."""

    def run_of(x: AttentionInputs) -> Callable[[], torch.Tensor]:
        q, k, v = x.token_major()

        def run() -> torch.Tensor:
            out = call(q, k, v)
            first: torch.Tensor = out[0] if isinstance(out, (tuple, list)) else out
            return first.transpose(1, 2)

        return run

    replicas = tuple(run_of(x) for x in inputs.others())
    return Contender(run_of(inputs), inputs.check(), inputs.flops, replicas, notes)


def window_of(inputs: AttentionInputs, unbounded: Any) -> tuple[Any, Any]:
    """(left, right) of a problem, in the convention of flash_attn."""
    p = inputs.problem
    if p.window is None:
        return unbounded, (0 if p.causal and unbounded is None else unbounded)
    return p.window - 1, (0 if p.causal else p.window - 1)


def _fa2(inputs: AttentionInputs) -> Contender:
    function = load("flash_attn", "flash_attn_func")
    options = {"causal": inputs.problem.causal, "window_size": window_of(inputs, -1)}
    return token_major_contender(inputs, lambda q, k, v: function(q, k, v, **options))


def _fa3(inputs: AttentionInputs) -> Contender:
    if why_missing(*_FA3) is not None:
        return token_major_contender(inputs, _fa3_library_call(inputs), build="vLLM's library")
    function = load(*_FA3)
    options = {"causal": inputs.problem.causal, "window_size": window_of(inputs, -1)}
    return token_major_contender(inputs, lambda q, k, v: function(q, k, v, **options))


def fa3_operator() -> Any:
    """The forward operator of vLLM's library, loaded on first use."""
    path = library_on_path(_FA3_LIBRARY)
    if path is not None:
        ops: Any = torch.ops
        ops.load_library(str(path))
    return torch.ops._vllm_fa3_C.fwd


def call_by_name(operator: Any, values: dict[str, Any]) -> Any:
    """Call a torch operator by argument names, because new releases insert arguments."""
    kinds = {"int": 0, "float": 0.0, "bool": False}
    arguments = {}
    for argument in operator.default._schema.arguments:
        if argument.name in values:
            arguments[argument.name] = values[argument.name]
        elif not argument.has_default_value():
            arguments[argument.name] = kinds.get(str(argument.type))
    return operator(**arguments)


def fa3_options(head_dim: int, causal: bool, window: tuple[int, int] = (-1, -1)) -> dict[str, Any]:
    """The arguments of vLLM's forward operator besides tensors and lengths."""
    return {
        "softmax_scale": head_dim**-0.5,
        "is_causal": causal,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "is_rotary_interleaved": True,
        "cp_world_size": 1,
    }


def _fa3_library_call(inputs: AttentionInputs) -> Callable[..., torch.Tensor]:
    operator, p = fa3_operator(), inputs.problem
    starts = torch.arange(p.batch + 1, device=inputs.q.device, dtype=torch.int32) * p.length
    options = fa3_options(p.head_dim, p.causal, window_of(inputs, -1)) | {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": p.length,
        "max_seqlen_k": p.length,
        "num_splits": 1,
    }

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        packed = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1)}
        out: torch.Tensor = call_by_name(operator, packed | options)[0]
        return out.view(*q.shape[:-1], v.shape[-1])

    return call


def fa3_available() -> str | None:
    """The reason if neither FlashAttention 3 nor vLLM's library of it is installed, or None."""
    if (reason := why_missing(*_FA3)) is None or library_on_path(_FA3_LIBRARY) is not None:
        return None
    return reason


def _fa4(inputs: AttentionInputs) -> Contender:
    function = load("flash_attn.cute", "flash_attn_func")
    p = inputs.problem
    options: dict[str, Any] = {"causal": p.causal}
    if p.window is not None:
        # the bounds of the window include causal
        options = {"window_size": window_of(inputs, None)}
    if inputs.keep is not None:
        options["block_sparse_tensors"] = fa4_blocks(inputs)
    return token_major_contender(inputs, lambda q, k, v: function(q, k, v, **options))


def fa4_blocks(inputs: AttentionInputs, transposed: bool = False) -> Any:
    """The kept blocks as FA4 takes them, all full; `transposed` lists query blocks by KV block."""
    assert inputs.keep is not None
    make = load("flash_attn.cute.block_sparsity", "BlockSparseTensorsTorch")
    batch = inputs.problem.batch
    keep = inputs.keep.mT if transposed else inputs.keep
    # lists of a transposed mask have its strides, which `zeros_like` would copy: use `zeros`
    counts, order = (x[None].repeat(batch, *(1,) * x.dim()) for x in block_lists(keep))
    return make(
        mask_block_cnt=torch.zeros(counts.shape, dtype=counts.dtype, device=counts.device),
        mask_block_idx=torch.zeros(order.shape, dtype=order.dtype, device=order.device),
        full_block_cnt=counts,
        full_block_idx=order,
        block_size=inputs.problem.block,
    )


def _no_blocks(inputs: AttentionInputs) -> str | None:
    return on_gpu(inputs) or ("has no block masks" if inputs.keep is not None else None)


def _fa4_supports(inputs: AttentionInputs) -> str | None:
    """On Hopper its tiles shrink to the blocks: at least 64 rows, and as many keys as a block."""
    block = inputs.problem.block
    if block is not None and (block[0] % 64 or block[1] % 16 or block[1] > 128):
        return f"has no tile for blocks of {block[0]}x{block[1]}"
    return on_gpu(inputs)


fa2: Peer = Peer(
    FA2,
    "FlashAttention 2",
    _fa2,
    available=needs("flash_attn", "flash_attn_func"),
    supports=lambda inputs: _no_blocks(inputs) or _equal_dims(inputs),
    rival=True,
)
fa3: Peer = Peer(
    FA3, "FlashAttention 3", _fa3, available=fa3_available, supports=_no_blocks, rival=True
)
fa4: Peer = Peer(
    FA4,
    "FlashAttention 4 (CuTe)",
    _fa4,
    available=needs("flash_attn.cute", "flash_attn_func"),
    supports=_fa4_supports,
    rival=True,
)


# FlashInfer: dense and window attention through its ragged wrapper, block masks for each head.

FLASHINFER = "flashinfer"
_WORKSPACE_BYTES = 256 * 2**20


def workspace(device: torch.device) -> torch.Tensor:
    """Memory for the partial results of a wrapper."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _flashinfer(inputs: AttentionInputs) -> Contender:
    return _band(inputs) if inputs.keep is None else _blocks(inputs, inputs.keep)


def _band(inputs: AttentionInputs) -> Contender:
    p, device = inputs.problem, inputs.q.device
    wrapper = load("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper")(workspace(device), "NHD")
    starts = torch.arange(p.batch + 1, device=device, dtype=torch.int32) * p.length
    wrapper.plan(
        starts,
        starts,
        p.heads,
        p.kv_heads or p.heads,
        p.head_dim,
        head_dim_vo=p.value_dim,
        causal=p.causal,
        window_left=-1 if p.window is None else p.window - 1,
        q_data_type=p.dtype,
        kv_data_type=p.dtype,
    )

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        return out.view(*q.shape[:-1], v.shape[-1])

    return token_major_contender(inputs, call)


def _blocks(inputs: AttentionInputs, keep: torch.Tensor) -> Contender:
    p, device = inputs.problem, inputs.q.device
    assert p.block is not None
    wrapper = load("flashinfer.sparse", "VariableBlockSparseAttentionWrapper")(workspace(device))
    sizes = [
        torch.full(keep.shape[:2], p.block[0]),
        torch.full((p.heads, keep.shape[2]), p.block[1]),
    ]
    rows, columns = (size.to(device, torch.int32) for size in sizes)
    wrapper.plan(keep, rows, columns, p.heads, p.heads, p.head_dim, q_data_type=p.dtype)

    def call(x: AttentionInputs) -> torch.Tensor:
        out: torch.Tensor = wrapper.run(x.q[0], x.k[0], x.v[0])
        return out[None]

    return contender_of(inputs, call)


def _supports(inputs: AttentionInputs) -> str | None:
    p = inputs.problem
    if (reason := on_gpu(inputs)) is not None:
        return reason
    if p.window is not None and not p.causal:
        return "has windows to the left only"
    if inputs.keep is not None and (p.batch > 1 or p.kv_heads):
        return "takes block masks for one sequence with as many key as query heads"
    return None


flashinfer: Peer = Peer(
    FLASHINFER,
    "FlashInfer",
    _flashinfer,
    available=needs("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper"),
    supports=_supports,
    rival=True,
)


# Block-sparse attention of the cuDNN front end.

CUDNN_BLOCKS = "cudnn_blocks"
MODULE = "cudnn.block_sparse_attention"


def blocks_of(inputs: AttentionInputs) -> dict[str, Any]:
    """The kept blocks as the functions of cuDNN take them."""
    assert inputs.keep is not None and inputs.problem.block is not None
    counts, order = (
        x[None].expand(inputs.problem.batch, *x.shape).contiguous()
        for x in block_lists(inputs.keep)
    )
    fewest, most = int(counts.min()), int(counts.max())
    blocks = {
        "q2k_block_index": order[..., :most].contiguous(),
        "sparse_block_size": inputs.problem.block[0],
        "layout": "bhsd",
    }
    # if all rows have the same count, its kernels specialise on that count
    return blocks if fewest == most else blocks | {"q2k_block_nums": counts}


def _cudnn_blocks(inputs: AttentionInputs) -> Contender:
    forward = load(MODULE, "block_sparse_attention_forward")
    blocks = blocks_of(inputs)

    def call(x: AttentionInputs) -> torch.Tensor:
        out: torch.Tensor = forward(x.q, x.k, x.v, **blocks)["o_tensor"]
        return out

    return contender_of(inputs, call)


def supports_blocks(inputs: AttentionInputs) -> str | None:
    """The reason why cuDNN does not take this mask, or None."""
    block = inputs.problem.block
    if block is None:
        return "measured with block masks only"
    if block not in ((64, 64), (128, 128)):
        return f"takes blocks of 64x64 and 128x128, not {block[0]}x{block[1]}"
    return on_gpu(inputs)


cudnn_blocks: Peer = Peer(
    CUDNN_BLOCKS,
    "cuDNN front end, block-sparse",
    _cudnn_blocks,
    available=needs(MODULE, "block_sparse_attention_forward"),
    supports=supports_blocks,
    rival=True,
)


# All peers; those with third-party kernels come last.

FORWARD = {
    peer.name: peer
    for peer in (
        ours,
        ours_dense,
        sdpa_dense,
        sdpa,
        sdpa_cudnn,
        sdpa_flash,
        flex,
        fa2,
        fa3,
        fa4,
        flashinfer,
        cudnn_blocks,
    )
}
# FlexAttention recompiles for each shape and mask, so suites add it to selected cases only.
ON_BAND = (OURS, SDPA, CUDNN, FLASH, FA2, FA3, FA4, FLASHINFER)
ON_WINDOW = (OURS, DENSE, FA2, FA3, FA4, FLASHINFER)
ON_BLOCKS = (OURS, DENSE, FA4, FLASHINFER, CUDNN_BLOCKS)
