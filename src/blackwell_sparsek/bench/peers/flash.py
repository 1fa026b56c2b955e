"""FlashAttention 2, 3 and 4. All take `[B, S, H, D]`; masks of blocks only the fourth."""

from collections.abc import Callable
from typing import Any

import torch

from ..case import Contender, Peer
from ..problems.attention import AttentionInputs
from .importing import library_on_path, load, needs, why_missing
from .torch_attention import block_lists, on_gpu

FA2, FA3, FA4 = "fa2", "fa3", "fa4"
_FA3 = ("flash_attn_interface", "flash_attn_func")
# FlashAttention 3 as vLLM builds it: a library of torch operators without Python files
_FA3_LIBRARY = "_vllm_fa3_C.abi3.so"


def token_major_contender(
    inputs: AttentionInputs, call: Callable[..., Any], **notes: Any
) -> Contender:
    """A contender whose `call(q, k, v)` takes and gives `[B, S, H, D]`, alone or first of many."""

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
    """(left, right) of a problem, in the way of flash_attn."""
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
    """Call a torch operator by argument names: releases of it add arguments in the middle."""
    kinds = {"int": 0, "float": 0.0, "bool": False}
    arguments = {}
    for argument in operator.default._schema.arguments:
        if argument.name in values:
            arguments[argument.name] = values[argument.name]
        elif not argument.has_default_value():
            arguments[argument.name] = kinds.get(str(argument.type))
    return operator(**arguments)


def fa3_options(head_dim: int, causal: bool, window: tuple[int, int] = (-1, -1)) -> dict[str, Any]:
    """What the forward operator of vLLM's library takes besides tensors and lengths."""
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
        return out.view(q.shape)

    return call


def fa3_available() -> str | None:
    """Why there is no FlashAttention 3 here, neither its package nor vLLM's library, or None."""
    if (reason := why_missing(*_FA3)) is None or library_on_path(_FA3_LIBRARY) is not None:
        return None
    return reason


def _fa4(inputs: AttentionInputs) -> Contender:
    function = load("flash_attn.cute", "flash_attn_func")
    p = inputs.problem
    options: dict[str, Any] = {"causal": p.causal}
    if p.window is not None:
        # a window alone says what causal would
        options = {"window_size": window_of(inputs, None)}
    if inputs.keep is not None:
        options["block_sparse_tensors"] = fa4_blocks(inputs)
    return token_major_contender(inputs, lambda q, k, v: function(q, k, v, **options))


def fa4_blocks(inputs: AttentionInputs, transposed: bool = False) -> Any:
    """The kept blocks as FA4 takes them, all of them full; `transposed`: queries of each key."""
    assert inputs.keep is not None
    make = load("flash_attn.cute.block_sparsity", "BlockSparseTensorsTorch")
    batch = inputs.problem.batch
    keep = inputs.keep.mT if transposed else inputs.keep
    # the lists of a transposed mask come with its strides, which `zeros_like` would keep
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
    """On Hopper its tiles shrink to the blocks: 64 rows at the least, as many keys as a block."""
    block = inputs.problem.block
    if block is not None and (block[0] % 64 or block[1] % 16 or block[1] > 128):
        return f"has no tile for blocks of {block[0]}x{block[1]}"
    return on_gpu(inputs)


fa2 = Peer(
    FA2,
    "FlashAttention 2",
    _fa2,
    available=needs("flash_attn", "flash_attn_func"),
    supports=_no_blocks,
    rival=True,
)
fa3 = Peer(FA3, "FlashAttention 3", _fa3, available=fa3_available, supports=_no_blocks, rival=True)
fa4 = Peer(
    FA4,
    "FlashAttention 4 (CuTe)",
    _fa4,
    available=needs("flash_attn.cute", "flash_attn_func"),
    supports=_fa4_supports,
    rival=True,
)
