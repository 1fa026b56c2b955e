"""Peers that cannot be installed here, by stand-ins with their signatures that read arguments anew.

What is tested is ours: layouts, windows, lists of blocks, page tables. That the packages still have
these signatures shows only where they are installed.
"""

import inspect
import itertools
import sys
import types
from typing import NamedTuple

import pytest
import torch

from blackwell_sparsek.bench.peers import importing
from blackwell_sparsek.bench.peers.attention import FORWARD
from blackwell_sparsek.bench.peers.backward import BACKWARD
from blackwell_sparsek.bench.peers.cudnn_frontend import blocks_of
from blackwell_sparsek.bench.peers.decode import DECODE
from blackwell_sparsek.bench.peers.mask_building import BUILDERS
from blackwell_sparsek.bench.peers.varlen import VARLEN
from blackwell_sparsek.bench.problems.attention import Attention
from blackwell_sparsek.bench.problems.decode import Decode
from blackwell_sparsek.bench.problems.varlen import Varlen

CPU = torch.device("cpu")
F32 = torch.float32
BANDS = [
    Attention(2, 4, 96, 16, dtype=F32),
    Attention(2, 4, 96, 16, kv_heads=2, dtype=F32, causal=True),
    Attention(1, 2, 96, 16, dtype=F32, causal=True, window=20),
]
PACKED = [
    Varlen((17, 64, 1, 40), 4, 16, dtype=F32),
    Varlen((17, 64, 1, 40), 4, 16, 2, F32, causal=True),
]
BLOCKS = Attention(1, 2, 256, 16, dtype=F32, block=(64, 64), density=0.4)


def _softmax(q, k, v, seen):
    """`[..., S, D]` with a mask that broadcasts; KV heads are repeated."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num() @ v


def _band(sq, sk, causal, left, right):
    at, key = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)
    right = 0 if causal else right
    seen = torch.ones(sq, sk, dtype=torch.bool)
    if left is not None and left >= 0:
        seen &= key >= at - left
    if right is not None and right >= 0:
        seen &= key <= at + right
    return seen


def _token_major(q, k, v, seen):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _softmax(q, k, v, seen).transpose(1, 2)


def _flash(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    return _token_major(q, k, v, _band(q.shape[1], k.shape[1], causal, *window_size))


def _from_lists(counts, indices, columns):
    """Kept blocks `[..., rows, columns]` from counts and padded lists."""
    place = torch.arange(indices.shape[-1])
    listed = place < counts[..., None]
    keep = torch.zeros(*counts.shape, columns, dtype=torch.int32)
    return keep.scatter_add(-1, indices.long(), listed.int()) > 0


def _elements(keep, rows, columns):
    return keep.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    block_size: tuple | None = None


def _fa4(
    q,
    k,
    v,
    causal=False,
    window_size=(None, None),
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
):
    seen = _band(q.shape[1], k.shape[1], causal, *window_size)
    if block_sparse_tensors is not None:
        lists, (rows, columns) = block_sparse_tensors, block_sparse_tensors.block_size
        assert lists.mask_block_cnt.sum() == 0
        assert lists.full_block_idx.dtype == torch.int32
        for given in (lists, block_sparse_tensors_bwd):
            assert given is None or all(x.is_contiguous() for x in given[:4])
        blocks = k.shape[1] // columns
        keep = _from_lists(lists.full_block_cnt, lists.full_block_idx, blocks)
        if block_sparse_tensors_bwd is not None:
            back = block_sparse_tensors_bwd
            other = _from_lists(back.full_block_cnt, back.full_block_idx, q.shape[1] // rows)
            assert torch.equal(other, keep.mT)
        seen = seen & _elements(keep, rows, columns)
    return _token_major(q, k, v, seen), None


def _varlen(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    causal=False,
):
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    ends = cu_seqlens_q.tolist()
    assert max_seqlen_q == max_seqlen_k == max(b - a for a, b in itertools.pairwise(ends))
    outs = []
    for begin, end in itertools.pairwise(ends):
        seen = _band(end - begin, end - begin, causal, -1, -1)
        outs.append(_token_major(*(x[begin:end][None] for x in (q, k, v)), seen)[0])
    return torch.cat(outs), None


class _Ragged:
    def __init__(self, workspace, layout):
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def plan(self, qo, kv, heads, kv_heads, dim, *, causal, window_left, q_data_type, kv_data_type):
        self.starts, self.causal, self.left = kv.tolist(), causal, window_left
        assert q_data_type == kv_data_type and torch.equal(qo, kv)

    def run(self, q, k, v):
        outs = []
        for start, end in zip(self.starts[:-1], self.starts[1:], strict=True):
            seen = _band(end - start, end - start, self.causal, self.left, -1)
            parts = (x[start:end][None] for x in (q, k, v))
            outs.append(_token_major(*parts, seen)[0])
        return torch.cat(outs)


class _Variable:
    def __init__(self, workspace):
        pass

    def plan(self, block_mask_map, row_sizes, column_sizes, heads, kv_heads, dim, *, q_data_type):
        assert block_mask_map.dtype == torch.bool and row_sizes.dtype == torch.int32
        (rows,), (columns,) = row_sizes.unique().tolist(), column_sizes.unique().tolist()
        assert row_sizes.shape == block_mask_map.shape[:2]
        assert column_sizes.shape == (heads, block_mask_map.shape[2])
        self.seen = _elements(block_mask_map, rows, columns)

    def run(self, q, k, v):
        return _softmax(q, k, v, self.seen)


class _PagedDecode:
    def __init__(self, workspace, layout, *, use_cuda_graph, use_tensor_cores, **buffers):
        assert (
            layout == "NHD"
            and use_cuda_graph
            and set(buffers)
            == {
                "paged_kv_indptr_buffer",
                "paged_kv_indices_buffer",
                "paged_kv_last_page_len_buffer",
            }
        )

    def plan(self, indptr, indices, last, heads, kv_heads, dim, page_size, **dtypes):
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        self.pages = [indices[a:b] for a, b in itertools.pairwise(indptr.tolist())]
        self.lengths = [
            (len(p) - 1) * page_size + int(n) for p, n in zip(self.pages, last, strict=True)
        ]

    def run(self, q, caches):
        outs = []
        for b, (pages, length) in enumerate(zip(self.pages, self.lengths, strict=True)):
            k, v = (c[pages.long()].flatten(0, 1)[:length].transpose(0, 1) for c in caches)
            seen = torch.ones(1, length, dtype=torch.bool)
            outs.append(_softmax(q[b][:, None], k, v, seen)[:, 0])
        return torch.stack(outs)


def _cudnn_forward(q, k, v, q2k_block_index, q2k_block_nums=None, *, sparse_block_size, layout):
    assert layout == "bhsd" and q2k_block_index.is_contiguous()
    if q2k_block_nums is None:
        q2k_block_nums = torch.full(q2k_block_index.shape[:3], q2k_block_index.shape[3])
    keep = _from_lists(q2k_block_nums, q2k_block_index, k.shape[2] // sparse_block_size)
    seen = _elements(keep, sparse_block_size, sparse_block_size)
    return {"o_tensor": _softmax(q, k, v, seen), "lse_tensor": seen}


def _cudnn_backward(do, q, k, v, o, lse, q2k_block_index, q2k_block_nums=None, **more):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = _cudnn_forward(*leaves, q2k_block_index, q2k_block_nums, **more)["o_tensor"]
    found = torch.autograd.grad(out, leaves, do)
    return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), found, strict=True))


def _with_kvcache(q, k_cache, v_cache, cache_seqlens, page_table, causal):
    assert causal
    if page_table is not None:
        k_cache, v_cache = (x[page_table.long()].flatten(1, 2) for x in (k_cache, v_cache))
    seen = torch.arange(k_cache.shape[1]) < cache_seqlens[:, None, None, None]
    return _token_major(q, k_cache, v_cache, seen)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """All of them, for one test."""
    modules = {
        "flash_attn": {"flash_attn_func": _flash},
        "flash_attn.cute": {"flash_attn_func": _fa4, "flash_attn_varlen_func": _varlen},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": BlockSparseTensorsTorch},
        "flash_attn_interface": {
            "flash_attn_func": _flash,
            "flash_attn_with_kvcache": _with_kvcache,
            "flash_attn_varlen_func": _varlen,
        },
        "flashinfer": {
            "BatchPrefillWithRaggedKVCacheWrapper": _Ragged,
            "BatchDecodeWithPagedKVCacheWrapper": _PagedDecode,
        },
        "flashinfer.sparse": {"VariableBlockSparseAttentionWrapper": _Variable},
        "cudnn": {},
        "cudnn.block_sparse_attention": {
            "block_sparse_attention_forward": _cudnn_forward,
            "block_sparse_attention_backward": _cudnn_backward,
        },
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        module.__path__ = []
        module.__spec__ = types.SimpleNamespace(name=name, submodule_search_locations=[])
        monkeypatch.setitem(sys.modules, name, module)
    importing.load.cache_clear()
    importing.why_missing.cache_clear()
    yield
    importing.load.cache_clear()
    importing.why_missing.cache_clear()


def _checked(peer, inputs):
    assert peer.available() is None
    contender = peer.prepare(inputs)
    contender.check(contender.run())
    return contender


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "flashinfer"])
@pytest.mark.parametrize("problem", BANDS, ids=lambda p: p.title)
def test_bands(name, problem):
    inputs = problem.build(CPU)
    assert _checked(FORWARD[name], inputs).flops == inputs.flops


@pytest.mark.parametrize("name", ["fa4", "flashinfer", "cudnn_blocks"])
def test_block_masks(name):
    inputs = BLOCKS.build(CPU)
    contender = _checked(FORWARD[name], inputs)
    wrong = contender.run().roll(1, 2)
    with pytest.raises(AssertionError):
        contender.check(wrong)


def test_rows_with_unequal_numbers_of_blocks():
    inputs = BLOCKS.build(CPU)
    inputs.keep[0, 0] = True
    for peers in (FORWARD, BACKWARD):
        _checked(peers["cudnn_blocks"], inputs)
    assert "q2k_block_nums" in blocks_of(inputs)


@pytest.mark.parametrize("name", ["fa2", "fa4"])
@pytest.mark.parametrize("problem", BANDS, ids=lambda p: p.title)
def test_gradients_of_bands(name, problem):
    _checked(BACKWARD[name], problem.build(CPU))


def test_gradients_of_64_by_64_blocks_are_not_asked_of_fa4():
    assert BACKWARD["fa4"].supports(BLOCKS.build(CPU)) == "has no gradients for blocks of 64x64"


@pytest.mark.parametrize("name", ["fa4", "cudnn_blocks"])
def test_gradients_of_block_masks(name):
    _checked(BACKWARD[name], BLOCKS.build(CPU))


@pytest.mark.parametrize("problem", PACKED, ids=lambda p: p.title)
@pytest.mark.parametrize("name", [name for name in VARLEN if name != "torch_varlen"])
def test_packed_sequences(name, problem):
    peer, inputs = VARLEN[name], problem.build(CPU)
    if "padded" in name and not problem.causal:
        assert peer.supports(inputs) == "padding would be visible"
        return
    contender = _checked(peer, inputs)
    assert contender.flops == problem.flops
    with pytest.raises(AssertionError):
        contender.check(contender.run().roll(1, 0))


@pytest.mark.parametrize(
    ("parameters", "causal", "given"),
    [
        ({"is_causal": False}, True, {"is_causal": True}),
        ({"window_size": (-1, -1), "enable_gqa": False}, True, {"window_size": (-1, 0)}),
        ({"window_size": (-1, -1), "enable_gqa": False}, False, {}),
    ],
)
def test_torch_says_causal_in_two_ways(monkeypatch, parameters, causal, given):
    seen = {}

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        seen.update(options)
        return _varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, causal)

    kind = inspect.Parameter.KEYWORD_ONLY
    known = [inspect.Parameter(n, kind, default=value) for n, value in parameters.items()]
    varlen_attn.__signature__ = inspect.Signature(known)
    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = varlen_attn
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    problem = Varlen((9, 30), 2, 16, dtype=F32, causal=causal)
    _checked(VARLEN["torch_varlen"], problem.build(CPU))
    assert seen == given
    grouped = Varlen((9, 30), 4, 16, 2, F32, causal)
    if "enable_gqa" in parameters:
        _checked(VARLEN["torch_varlen"], grouped.build(CPU))
        assert seen == given | {"enable_gqa": True}
    else:
        with pytest.raises(NotImplementedError, match="no GQA in this version"):
            VARLEN["torch_varlen"].prepare(grouped.build(CPU))


@pytest.mark.parametrize("shortest", [0, 7])
@pytest.mark.parametrize(("name", "page_size"), [("fa3", 0), ("fa3", 16), ("flashinfer", 16)])
def test_decoding(name, page_size, shortest):
    problem = Decode(3, 50, 4, 2, 16, page_size, F32, shortest=shortest)
    contender = _checked(DECODE[name], problem.build(CPU))
    assert contender.moved_bytes == problem.cache_bytes


def test_planning_is_timed():
    _checked(BUILDERS["flashinfer"], BLOCKS.build(CPU))


def test_the_library_of_flash_attention_3(monkeypatch):
    """vLLM's build: an operator over packed or paged tensors, called by names."""
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? q_v, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, "
        "Tensor? page_table, float? softmax_scale, bool is_causal, int window_size_left, "
        "int window_size_right, float softcap, bool is_rotary_interleaved, int num_splits, "
        "bool? pack_gqa, int cp_world_size, int cp_rank) -> Tensor[]"
    )

    def forward(*args):
        (q, k, v, _, cu_q, cu_k, used, longest, _, pages, _, causal, left, right, softcap) = args[
            :15
        ]
        assert softcap == 0.0 and args[15:] == (True, args[16], None, 1, 0)
        batch = cu_q.shape[0] - 1
        if pages is not None:
            k, v = (x[pages.long()].flatten(1, 2) for x in (k, v))
            return [_with_kvcache(q[:, None], k, v, used, None, causal)[:, 0]]
        if cu_k is None:
            return [_with_kvcache(q[:, None], k, v, used, None, causal)[:, 0]]
        if longest * batch != q.shape[0]:
            return [_varlen(q, k, v, cu_q, cu_k, longest, longest, causal)[0]]
        parts = [x.unflatten(0, (batch, longest)) for x in (q, k, v)]
        return [_flash(*parts, causal=causal, window_size=(left, right)).flatten(0, 1)]

    library.impl("fwd", forward, "CPU")
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    importing.why_missing.cache_clear()
    for problem in BANDS:
        contender = FORWARD["fa3"].prepare(problem.build(CPU))
        contender.check(contender.run())
        assert contender.notes == {"build": "vLLM's library"}
    for page_size in (0, 16):
        contender = DECODE["fa3"].prepare(Decode(3, 50, 4, 2, 16, page_size, F32).build(CPU))
        contender.check(contender.run())
    for packed in PACKED:
        contender = VARLEN["fa3"].prepare(packed.build(CPU))
        contender.check(contender.run())
    library._destroy()
