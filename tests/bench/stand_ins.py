"""Packages of peers that cannot be installed here: their signatures, reading arguments anew."""

import itertools
from typing import NamedTuple

import torch


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


def flash_attention(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
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


def flash_attention_4(
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


def varlen_attention(
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


class Ragged:
    def __init__(self, workspace, layout):
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def plan(
        self, qo, kv, heads, kv_heads, dim, head_dim_vo=None, *, causal, window_left, q_data_type,
        kv_data_type,
    ):  # fmt: skip
        self.dims = (dim, head_dim_vo or dim)
        self.starts, self.causal, self.left = kv.tolist(), causal, window_left
        assert q_data_type == kv_data_type and torch.equal(qo, kv)

    def run(self, q, k, v):
        assert self.dims == (k.shape[-1], v.shape[-1])
        outs = []
        for start, end in zip(self.starts[:-1], self.starts[1:], strict=True):
            seen = _band(end - start, end - start, self.causal, self.left, -1)
            parts = (x[start:end][None] for x in (q, k, v))
            outs.append(_token_major(*parts, seen)[0])
        return torch.cat(outs)


class Variable:
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


class PagedDecode:
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


def cudnn_forward(q, k, v, q2k_block_index, q2k_block_nums=None, *, sparse_block_size, layout):
    assert layout == "bhsd" and q2k_block_index.is_contiguous()
    if q2k_block_nums is None:
        q2k_block_nums = torch.full(q2k_block_index.shape[:3], q2k_block_index.shape[3])
    keep = _from_lists(q2k_block_nums, q2k_block_index, k.shape[2] // sparse_block_size)
    seen = _elements(keep, sparse_block_size, sparse_block_size)
    return {"o_tensor": _softmax(q, k, v, seen), "lse_tensor": seen}


def cudnn_fp8_round(q, k, v, *, v_layout):
    assert v_layout == "bhds" and all(x.is_contiguous() for x in (q, k, v))
    scales = [torch.ones(*x.shape[:-1]) for x in (q, k)]
    return q, k, v.mT.contiguous(), *scales, torch.ones(v.shape[1], v.shape[3])


def cudnn_fp8_kernel(side):
    def forward(q, k, v, q_scale, k_scale, v_scale, q2k_block_index, block_sparse_num):
        assert block_sparse_num == q2k_block_index.shape[-1]
        options = {"sparse_block_size": side, "layout": "bhsd"}
        return cudnn_forward(q, k, v.mT, q2k_block_index, **options)["o_tensor"], None

    return forward


def cudnn_fp8_forward(q, k, v, q2k_block_index, *, sparse_block_size):
    options = {"sparse_block_size": sparse_block_size, "layout": "bhsd"}
    return {"o_tensor": cudnn_forward(q, k, v, q2k_block_index, **options)["o_tensor"]}


def cudnn_backward(do, q, k, v, o, lse, q2k_block_index, q2k_block_nums=None, **more):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = cudnn_forward(*leaves, q2k_block_index, q2k_block_nums, **more)["o_tensor"]
    found = torch.autograd.grad(out, leaves, do)
    return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), found, strict=True))


def attention_with_cache(q, k_cache, v_cache, cache_seqlens, page_table, causal):
    assert causal
    if page_table is not None:
        k_cache, v_cache = (x[page_table.long()].flatten(1, 2) for x in (k_cache, v_cache))
    ends = cache_seqlens[:, None] - torch.arange(q.shape[1]).flip(0)
    seen = torch.arange(k_cache.shape[1]) < ends[:, None, :, None]
    return _token_major(q, k_cache, v_cache, seen)


def _chosen(q, k, v, seen, scale):
    """Token-major `[T, H, D]` over `[S, Hkv, D]`; `seen` `[Hkv, T, S]`."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v, seen = (x.repeat_interleave(group, 0) for x in (k, v, seen))
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(0, 1)


def _listed(ids, size, keys):
    """Keys `[..., keys]` of entries `[..., K]`, -1 after the last."""
    keep = torch.zeros(*ids.shape[:-1], -(-keys // size) + 1, dtype=torch.bool)
    keep.scatter_(-1, torch.where(ids < 0, keep.shape[-1] - 1, ids).long(), True)
    return keep[..., :-1].repeat_interleave(size, -1)[..., :keys]


def msa_attention(q, cache, ids, table, ends, lengths, before, longest, kv_heads, scale, output):
    assert ends.tolist() == [0, longest] and q.shape[0] == longest
    keys, position = int(lengths), int(before) + torch.arange(longest)
    # as many entries are read as a query sees blocks, up to all: lists have no gaps
    read = torch.minimum(position // 128 + 1, torch.tensor(ids.shape[-1]))
    assert (ids >= 0).sum(-1).eq(read).all()
    pages = cache[table[0].long()].transpose(1, 2).flatten(0, 1)[:keys]
    k, v = pages.chunk(2, -1)
    seen = _listed(ids, 128, keys) & (torch.arange(keys) <= position[:, None])
    output.copy_(_chosen(q, k, v, seen, scale))


def qsa_attention(q, k, v, lists, table, request, prefill, out, *, output_gate):
    assert not request.any() and prefill and (output_gate > 100).all()
    ids, count = lists[:, :-1], lists[:, -1]
    assert count.eq(ids.shape[1]).all()
    k, v = (x[table[0].long()].flatten(0, 1) for x in (k, v))
    seen = _listed(ids, 1, k.shape[0]).expand(k.shape[1], -1, -1)
    out.copy_(_chosen(q, k, v, seen, q.shape[-1] ** -0.5))


class NSA:
    @staticmethod
    def apply(q, k, v, ids, counts, size, scale, cu_seqlens):
        assert cu_seqlens is None
        place = torch.arange(ids.shape[-1])
        ids = ids.masked_fill(place >= counts[..., None], -1)[0].transpose(0, 1)
        tokens = torch.arange(k.shape[1])
        seen = _listed(ids, size, len(tokens)) & (tokens <= tokens[:, None])
        return _chosen(q[0], k[0], v[0], seen, scale)[None]


def latent_decoding(q, pages, table, lengths, values, plan, splits, softmax_scale, causal):
    assert (plan, splits, causal) == ("plan", "splits", True)
    rows = []
    for one, row, length in zip(q, table, lengths.tolist(), strict=True):
        keys = pages[row.long()].flatten(0, 1)[:length]
        seen = torch.ones(1, 1, length, dtype=torch.bool)
        rows.append(_chosen(one, keys, keys[..., :values], seen, softmax_scale))
    return torch.stack(rows), None


def latent_prefill(q, keys, ids, scale, values):
    assert q.shape[1] % 64 == 0
    seen = _listed(ids.transpose(0, 1), 1, keys.shape[0])
    return _chosen(q, keys, keys[..., :values], seen, scale), None, None


MODULES = {
    "flash_attn": {"flash_attn_func": flash_attention},
    "vllm": {},
    "vllm.models.minimax_m3.common.ops.sparse_attn": {"minimax_m3_sparse_attn": msa_attention},
    "vllm.models.qwen4_exp.nvidia.ops.qsa": {"qsa_sparse_paged_attention": qsa_attention},
    "fla": {},
    "fla.ops.nsa.parallel": {"ParallelNSAFunction": NSA},
    "flash_mla": {
        "get_mla_metadata": lambda lengths, rows, heads: ("plan", "splits"),
        "flash_mla_with_kvcache": latent_decoding,
        "flash_mla_sparse_fwd": latent_prefill,
    },
    "flash_attn.cute": {
        "flash_attn_func": flash_attention_4,
        "flash_attn_varlen_func": varlen_attention,
    },
    "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": BlockSparseTensorsTorch},
    "flash_attn_interface": {
        "flash_attn_func": flash_attention,
        "flash_attn_with_kvcache": attention_with_cache,
        "flash_attn_varlen_func": varlen_attention,
    },
    "flashinfer": {
        "BatchPrefillWithRaggedKVCacheWrapper": Ragged,
        "BatchDecodeWithPagedKVCacheWrapper": PagedDecode,
    },
    "flashinfer.sparse": {"VariableBlockSparseAttentionWrapper": Variable},
    "cudnn": {},
    "cudnn.block_sparse_attention": {
        "block_sparse_attention_forward": cudnn_forward,
        "block_sparse_attention_backward": cudnn_backward,
        "block_sparse_attention_fp8_forward": cudnn_fp8_forward,
    },
    "cudnn.block_sparse_attention._fp8_quant": {"_quantize_sage_bhsd": cudnn_fp8_round},
    "cudnn.block_sparse_attention._interface": {
        f"_bsa_attn_fwd_sm90_fp8_blk{side}": cudnn_fp8_kernel(side) for side in (64, 128)
    },
}
