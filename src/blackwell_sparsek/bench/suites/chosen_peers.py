"""Other libraries that attend to chosen keys: vLLM's Triton kernels, FLA's NSA, FlashMLA.

Each takes lists and caches in its own form, which are made before the clock starts.
"""

import math
from typing import TYPE_CHECKING, Any

import torch

from ..case import Contender, Peer
from .attention_peers import load, needs
from .flash_mla import FLASH_MLA, flash_mla_available, latent_prefill

if TYPE_CHECKING:
    from .sparse_attention import ChosenInputs

_MSA = ("vllm.models.minimax_m3.common.ops.sparse_attn", "minimax_m3_sparse_attn")
_QSA = ("vllm.models.qwen4_exp.nvidia.ops.qsa", "qsa_sparse_paged_attention")
_NSA = ("fla.ops.nsa.parallel", "ParallelNSAFunction")
# Pages of vLLM's kernel for blocks of 128 are these blocks; the other one takes any.
_MSA_PAGE, _QSA_PAGE = 128, 64
# FlashMLA takes multiples of this many heads; fewer are padded.
_MLA_HEADS = 64


def token_lists(inputs: "ChosenInputs") -> torch.Tensor:
    """int32 [Hkv, T, K]: the entries of each query, -1 after the last."""
    (ids,), (counts,) = inputs.chosen.ids, inputs.chosen.counts
    place = torch.arange(ids.shape[-1], device=ids.device)
    filled: torch.Tensor = ids.masked_fill(place >= counts[..., None], -1)
    return filled


def _token_major(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D] of [1, H, T, D]."""
    return x.detach()[0].transpose(0, 1).contiguous()


def _forward(inputs: "ChosenInputs", run: Any) -> Contender:
    """A contender whose `run` gives [T, H, D]."""
    flops = inputs.problem.flops(inputs.pairs())
    return Contender(lambda: (run().transpose(0, 1)[None], None), inputs.check, flops)


def _one_request(inputs: "ChosenInputs", page: int) -> torch.Tensor:
    pages = -(-inputs.problem.length // page)
    return torch.arange(pages, dtype=torch.int32, device=inputs.q.device)[None]


def _vllm_blocks(inputs: "ChosenInputs") -> Contender:
    attend = load(*_MSA)
    problem, q = inputs.problem, _token_major(inputs.q)
    pairs = torch.cat([inputs.k.detach(), inputs.v.detach()], -1)[0]
    paged = pairs.view(problem.kv_heads, -1, _MSA_PAGE, pairs.shape[-1])
    cache = paged.transpose(0, 1).contiguous()
    ends = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    lengths = torch.tensor([problem.length], dtype=torch.int32, device=q.device)
    before, lists = lengths - len(q), token_lists(inputs)
    table, out = _one_request(inputs, _MSA_PAGE), torch.empty_like(q)
    scale = problem.head_dim**-0.5

    def run() -> torch.Tensor:
        sizes = (len(q), problem.kv_heads, scale)
        attend(q, cache, lists, table, ends, lengths, before, *sizes, out)
        return out

    return _forward(inputs, run)


def _vllm_tokens(inputs: "ChosenInputs") -> Contender:
    attend = load(*_QSA)
    problem, q = inputs.problem, _token_major(inputs.q)
    paged = (-1, _QSA_PAGE, problem.kv_heads, problem.head_dim)
    k, v = (_token_major(x).view(paged) for x in (inputs.k, inputs.v))
    # one list for all KV heads: that of the last, whose results are checked
    entries = token_lists(inputs)[-1]
    size = problem.granularity
    tokens = entries[..., None] * size + torch.arange(size, device=q.device, dtype=torch.int32)
    position = torch.arange(problem.first, problem.length, device=q.device)[:, None, None]
    tokens = tokens.masked_fill((entries[..., None] < 0) | (tokens > position), -1).flatten(1)
    count = torch.full((len(q), 1), tokens.shape[1], dtype=torch.int32, device=q.device)
    lists = torch.cat([tokens, count], 1)
    request = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    table, out = _one_request(inputs, _QSA_PAGE), torch.empty_like(q)
    open_gate = torch.full_like(q, 1e4)

    def run() -> torch.Tensor:
        attend(q, k, v, lists, table, request, True, out, output_gate=open_gate)
        return out

    return _forward(inputs, run)


def _fla(inputs: "ChosenInputs") -> Contender:
    attend = load(*_NSA).apply
    problem = inputs.problem
    q, k, v = (
        _token_major(x)[None].requires_grad_(problem.backward)
        for x in (inputs.q, inputs.k, inputs.v)
    )
    dout = _token_major(inputs.dout)[None]
    ids = token_lists(inputs).transpose(0, 1)[None].long().contiguous()
    counts = inputs.chosen.counts.transpose(1, 2).long().contiguous()
    lists = (ids, counts, problem.granularity, problem.head_dim**-0.5, None)

    def run() -> tuple[torch.Tensor, torch.Tensor | None]:
        if not problem.backward:
            return attend(q, k, v, *lists).transpose(1, 2), None
        with torch.enable_grad():
            out = attend(q, k, v, *lists)
            dq, _, _ = torch.autograd.grad(out, (q, k, v), dout)
        return out.detach().transpose(1, 2), dq.transpose(1, 2)

    return Contender(run, inputs.check, problem.flops(inputs.pairs()))


def _flash_mla(inputs: "ChosenInputs") -> Contender:
    problem, keys = inputs.problem, _token_major(inputs.k)
    padded = -(-problem.heads // _MLA_HEADS) * _MLA_HEADS
    q = torch.nn.functional.pad(_token_major(inputs.q), (0, 0, 0, padded - problem.heads))
    lists = token_lists(inputs).transpose(0, 1).contiguous()
    scale = 1 / math.sqrt(problem.head_dim)

    def run() -> torch.Tensor:
        return latent_prefill(q, keys, lists, problem.latent, scale)[:, : problem.heads]

    return _forward(inputs, run)


def _plain_forward(inputs: "ChosenInputs") -> str | None:
    if inputs.problem.backward:
        return "has no gradients"
    if inputs.problem.latent:
        return "needs values of their own"
    return None if inputs.q.dtype == torch.bfloat16 else "takes bfloat16"


def _takes_blocks(inputs: "ChosenInputs") -> str | None:
    size = inputs.problem.granularity
    return _plain_forward(inputs) or (None if size == _MSA_PAGE else "takes blocks of 128 keys")


def _takes_tokens(inputs: "ChosenInputs") -> str | None:
    size = inputs.problem.granularity
    return _plain_forward(inputs) or (None if size <= 4 else "takes entries of a few keys")


def _takes_nsa(inputs: "ChosenInputs") -> str | None:
    problem = inputs.problem
    group = problem.heads // problem.kv_heads
    if problem.latent or problem.queries:
        return "needs values of their own and as many queries as keys"
    if group < 16 or group & (group - 1):
        return f"needs 16, 32, ... query heads for each KV head, not {group}"
    return None if problem.granularity >= 16 else "takes blocks of 16 keys and more"


def _takes_latent(inputs: "ChosenInputs") -> str | None:
    problem = inputs.problem
    if (problem.head_dim, problem.latent, problem.granularity) != (576, 512, 1):
        return "takes single keys of 576 columns whose first 512 are the values"
    return "has no gradients" if problem.backward else None


CHOSEN_PEERS: dict[str, Peer] = {
    "vllm_msa": Peer(
        "vllm_msa", "vLLM, Triton kernel of MSA", _vllm_blocks, needs(*_MSA), _takes_blocks, True
    ),
    "vllm_qsa": Peer(
        "vllm_qsa", "vLLM, Triton kernel of QSA", _vllm_tokens, needs(*_QSA), _takes_tokens, True
    ),
    "fla_nsa": Peer("fla_nsa", "flash-linear-attention, NSA", _fla, needs(*_NSA), _takes_nsa, True),
    FLASH_MLA: Peer(
        FLASH_MLA,
        "FlashMLA, heads padded to 64",
        _flash_mla,
        flash_mla_available,
        _takes_latent,
        True,
    ),
}
