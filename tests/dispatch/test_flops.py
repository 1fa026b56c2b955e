"""FLOPs that torch's counter reports: those of the pairs and blocks that a naive count finds."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import blackwell_sparsek as bsk
from blackwell_sparsek.dispatch.flops import FORMULAS

from ..architecture.test_lazy_imports import fresh

D, DV, HEADS = 8, 4, 4
FORWARD, BACKWARD = 2 * (D + DV), 2 * (3 * D + 2 * DV)


def counted(function, *args, **options):
    with FlopCounterMode(display=False) as counter:
        made = function(*args, **options)
        if isinstance(made, torch.Tensor) and made.requires_grad:
            made.sum().backward()
    return counter.get_total_flops()


def visible(sq, sk, causal=False, window=None, *, shift=None):
    shift = sk - sq if shift is None else shift
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - shift
    left, right = (None, None) if window is None else window
    seen = torch.ones(sq, sk, dtype=torch.bool)
    seen &= distance <= (0 if causal else sk + sq if right is None else right)
    return seen & (distance >= -(sk + sq + abs(shift) if left is None else left))


def qkv(sq, sk, batch=2):
    q = torch.randn(batch, HEADS, sq, D)
    return q, torch.randn(batch, 2, sk, D), torch.randn(batch, 2, sk, DV)


def packed(q_lens, kv_lens):
    q, k, v = (x[0].transpose(0, 1) for x in qkv(sum(q_lens), sum(kv_lens), batch=1))
    return q, k, v, *map(offsets, (q_lens, kv_lens))


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_every_formula_belongs_to_an_operator():
    assert all(hasattr(torch.ops.bsk, name) for name in FORMULAS)


def test_as_torch_counts_dense_attention():
    q, k, v = (x.requires_grad_() for x in qkv(20, 30))
    torch_k, torch_v = (x.repeat_interleave(2, 1) for x in (k, v))
    want = counted(torch.nn.functional.scaled_dot_product_attention, q, torch_k, torch_v)
    pairs = 2 * HEADS * 20 * 30
    # on a CPU, torch decomposes its attention, and its backward computes no scores again
    assert counted(bsk.attention, q, k, v) == pairs * (FORWARD + BACKWARD)
    assert want in (pairs * (FORWARD + BACKWARD), pairs * 3 * FORWARD)


@pytest.mark.parametrize("window", [None, (3, 2), (None, 5), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(20, 30), (30, 20), (1, 7), (5, 0), (0, 5)])
def test_bands(sq, sk, causal, window):
    q, k, v = (x.requires_grad_() for x in qkv(sq, sk))
    pairs = 2 * HEADS * int(visible(sq, sk, causal, window).sum())
    made = counted(bsk.attention, q, k, v, causal=causal, window=window)
    assert made == pairs * (FORWARD + BACKWARD)


@pytest.mark.parametrize("heads", [1, 2, HEADS])
@pytest.mark.parametrize("masks", [1, 2])
def test_block_masks(masks, heads):
    keep = torch.rand(masks, heads, 3, 3) < 0.5
    mask = bsk.BlockMask.from_dense(keep, 16, seq_lengths=(40, 45))
    seen = mask.to_element_mask() & visible(40, 45, True)
    pairs = int(seen.sum()) * (2 // masks) * (HEADS // heads)
    q, k, v = (x.requires_grad_() for x in qkv(40, 45))
    made = counted(bsk.attention, q, k, v, causal=True, block_mask=mask)
    assert made == pairs * (FORWARD + BACKWARD)


def test_packed_sequences():
    q_lens, kv_lens = [3, 0, 20, 1], [5, 4, 33, 0]
    inputs = packed(q_lens, kv_lens)
    keep = torch.rand(1, 1, 2, 3) < 0.5
    mask = bsk.BlockMask.from_dense(keep, 16, seq_lengths=(20, 33))
    elements = mask.to_element_mask()[0, 0]
    seen = [visible(a, b, True) for a, b in zip(q_lens, kv_lens, strict=True)]
    longest = {"max_seqlen_q": 20, "max_seqlen_k": 33, "causal": True}
    pairs = HEADS * sum(int(x.sum()) for x in seen)
    assert counted(bsk.attention_varlen, *inputs, **longest) == FORWARD * pairs
    # one of the options that go to the kernels for caches
    assert counted(bsk.attention_varlen, *inputs, **longest, batch_invariant=True) == (
        FORWARD * pairs
    )
    pairs = HEADS * sum(int((x & elements[: x.shape[0], : x.shape[1]]).sum()) for x in seen)
    made = counted(bsk.attention_varlen, *inputs, **longest, block_mask=mask)
    assert made == FORWARD * pairs


@pytest.mark.parametrize("into", [False, True])
def test_decoding(into):
    q, k, v = qkv(3, 32)
    lengths = [20, 2]
    out = torch.empty(2, HEADS, 3, DV) if into else None
    options = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), "out": out}
    pairs = HEADS * sum(int(visible(3, n, True, (9, 0)).sum()) for n in lengths)
    assert counted(bsk.attention_decode, q, k, v, window=10, **options) == FORWARD * pairs
    blocks = torch.tensor([[[1, -1], [0, 2]], [[0, -1], [-1, -1]]], dtype=torch.int32)
    listed = {"kv_blocks": blocks, "kv_block_size": 8, "causal": False}
    pairs = 3 * (HEADS // 2) * ((8 + 12) + (2 + 0))
    assert counted(bsk.attention_decode, q, k, v, **listed, **options) == FORWARD * pairs


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_chunks_and_left_padding(align):
    q_lens, kv_lens, first = [7, 2], [9, 20], [3, 0]
    q, _, _, cu_q, _ = packed(q_lens, q_lens)
    _, k, v = qkv(1, 20)
    seen = []
    for sq, sk, start in zip(q_lens, kv_lens, first, strict=True):
        shift = 0 if align == "top_left" else sk - sq
        same = ((torch.arange(sq) + shift) // 4)[:, None] == torch.arange(sk) // 4
        own = visible(sq, sk, True, shift=shift) & same & (torch.arange(sk) >= start)
        seen.append(int(own.sum()))
    options = {"cache_seqlens": torch.tensor(kv_lens).int(), "leftpad_k": torch.tensor(first).int()}
    made = counted(
        *(bsk.attention_varlen, q, k, v, cu_q),
        **(options | {"max_seqlen_q": 7, "chunk": 4, "align": align, "causal": True}),
    )
    assert made == FORWARD * HEADS * sum(seen)


def lists(heads, queries, kv_len, granularity, most=3):
    """Entries drawn for each query, some queries with none."""
    entries = -(-kv_len // granularity)
    order = torch.rand(*heads, queries, entries).argsort(-1)[..., :most]
    drawn = torch.where(torch.rand(order.shape) < 0.7, order, -1).int()
    return bsk.KeySelection.from_indices(drawn, granularity=granularity, kv_len=kv_len)


@pytest.mark.parametrize("window", [None, 5, (3, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("masks", "heads", "granularity"), [(2, 1, 16), (2, 2, 1), (1, 4, 4)])
def test_sparse_attention(masks, heads, granularity, causal, window):
    chosen = lists((masks, heads), 20, 30, granularity)
    seen = chosen.to_dense()
    if window is not None:
        left, right = (window - 1, 0 if causal else window - 1) if window == 5 else window
        seen = seen | visible(20, 30, window=(left, right))
    seen = seen & visible(20, 30, causal)
    pairs = int(seen.sum()) * (2 // masks) * (HEADS // heads)
    q, k, v = (x.requires_grad_() for x in qkv(20, 30))
    made = counted(bsk.sparse_attention, q, k, v, chosen, causal=causal, window=window)
    assert made == pairs * (FORWARD + BACKWARD)


def test_sparse_attention_packed_and_paged():
    q_lens, kv_lens = [3, 0, 20, 1], [5, 4, 33, 0]
    inputs = packed(q_lens, kv_lens)
    chosen = lists((1, 2), 24, 33, 4)
    rows = torch.split(chosen.to_dense()[0], q_lens, 1)
    longest = {"max_seqlen_q": 20, "max_seqlen_k": 33}
    seen = [x[..., :n] & visible(x.shape[1], n, True) for x, n in zip(rows, kv_lens, strict=True)]
    pairs = sum(int(x.sum()) for x in seen) * HEADS // 2
    q, k, v, cu_q, cu_k = inputs
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **longest}
    assert counted(bsk.sparse_attention, q, k, v, chosen, **options) == pairs * FORWARD
    lengths = [20, 7]
    q, _, _ = qkv(3, 1)
    k, v = torch.randn(6, 8, 2, D), torch.randn(6, 8, 2, DV)
    chosen = lists((2, 1), 3, 24, 4)
    where = {"page_table": torch.arange(6).view(2, 3).int(), "cache_seqlens": torch.tensor(lengths)}
    where["cache_seqlens"] = where["cache_seqlens"].int()
    seen = [chosen.to_dense()[b, 0, :, :n] & visible(3, n, True) for b, n in enumerate(lengths)]
    pairs = HEADS * sum(int(x.sum()) for x in seen)
    assert counted(bsk.sparse_attention, q, k, v, chosen, **where) == pairs * FORWARD


@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_choose_keys(causal):
    q, k = torch.randn(2, 4, 20, D), torch.randn(2, 1, 30, D)
    pairs = 2 * 4 * int(visible(20, 30, causal).sum())
    made = counted(
        lambda: bsk.select_keys(q, k, granularity=4, pool="max", top_k=2, causal=causal).counts
    )
    assert made == 2 * D * pairs


def test_scores_that_choose_pages():
    pages = torch.randn(6, 8, 2, D)
    where = {
        "page_table": torch.arange(6).view(2, 3).int(),
        "cache_seqlens": torch.tensor([24, 9]).int(),
    }
    summaries = bsk.page_summaries(pages, **where)
    q = torch.randn(2, HEADS, 3, D)
    # three pages of the first sequence, two of the second, with smallest and largest keys each
    made = counted(bsk.topk_pages, q, summaries, 2, **where)
    assert made == 2 * 2 * D * HEADS * 3 * (3 + 2)


def test_fp8():
    q, k, v = (x.requires_grad_() for x in qkv(20, 30))
    pairs = 2 * HEADS * int(visible(20, 30, True).sum())
    # the backward computes the attention without fp8 once more
    made = counted(bsk.fp8.attention, q, k, v, causal=True)
    assert made == pairs * (FORWARD + FORWARD + BACKWARD)
    # mapped over, it is an operator of its own
    several = torch.stack([q, q])
    made = counted(lambda: torch.vmap(lambda x: bsk.fp8.attention(x, k, v, causal=True))(several))
    assert made == 2 * pairs * (FORWARD + FORWARD + BACKWARD)
    w = bsk.BSRMatrix.from_mask(torch.randn(128, 256), torch.rand(4, 8) < 0.5)
    x = torch.randn(10, 256)
    assert counted(bsk.fp8.matmul, x, w.to_fp8().T) == 2 * w.nnz_blocks * 32 * 32 * 10


def test_gradients_of_every_kind():
    """Gradients are products too: those of gates, packed sequences, sampled products and pairs."""
    q, k, v = (x.requires_grad_() for x in qkv(20, 20))
    pairs = 2 * HEADS * int(visible(20, 20, True).sum())
    gate = (torch.rand(2, 1, 20), torch.zeros(2, 1, 20))
    made = counted(bsk.attention, q, k, v, causal=True, key_gate=gate)
    assert made == pairs * (FORWARD + BACKWARD)
    lengths = [3, 0, 20]
    q, k, v, cu, _ = (
        x.requires_grad_() if x.is_floating_point() else x for x in packed(lengths, lengths)
    )
    pairs = HEADS * sum(int(visible(n, n).sum()) for n in lengths)
    made = counted(bsk.attention_varlen, q, k, v, cu, cu, max_seqlen_q=20, max_seqlen_k=20)
    assert made == pairs * (FORWARD + BACKWARD)
    keep = torch.rand(3, 4) < 0.5
    w = bsk.BSRMatrix.from_mask(torch.randn(48, 32), keep, (16, 8))
    a, b = torch.randn(48, 5, requires_grad=True), torch.randn(5, 32, requires_grad=True)
    made = counted(lambda: bsk.sddmm(a, b, w).storage)
    assert made == 3 * 2 * w.nnz_blocks * 16 * 8 * 5
    w.storage.requires_grad_()
    pairs = int((keep.int() @ keep.int().T).sum())
    made = counted(lambda: bsk.matmul(w, w.T).storage)
    assert made == 3 * 2 * pairs * 16 * 8 * 16


def test_products():
    keep = torch.rand(3, 4) < 0.5
    w = bsk.BSRMatrix.from_mask(torch.randn(48, 32), keep, (16, 8))
    stored = w.nnz_blocks * 16 * 8
    x = torch.randn(2, 5, 48)
    assert counted(bsk.matmul, x, w) == 2 * stored * 10
    assert counted(bsk.matmul, w, torch.randn(32)) == 2 * stored
    assert counted(bsk.matmul, w.T, x.mT) == 2 * stored * 10
    assert counted(bsk.sddmm, x.mT, torch.randn(2, 5, 32), w) == 2 * stored * 10
    # the gradient of x is a product too, that of w a sampled one
    w.storage.requires_grad_()
    assert counted(bsk.matmul, x.requires_grad_(), w) == 3 * 2 * stored * 10
    pairs = int((keep.int() @ keep.int().T).sum())
    assert counted(lambda: bsk.matmul(w, w.T).nnz_blocks) == 2 * pairs * 16 * 8 * 16


def test_fake_tensors_count_as_full():
    mask = bsk.BlockMask.from_dense(torch.zeros(1, 1, 2, 2).bool(), 16, seq_lengths=(20, 20))
    inputs = [x.to("meta") for x in qkv(20, 20)]
    made = counted(bsk.attention, *inputs, block_mask=mask.to("meta"))
    assert made == FORWARD * 2 * HEADS * 20 * 20
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = packed([3, 5], [3, 5])
        made = counted(bsk.attention_varlen, *inputs, max_seqlen_q=5, max_seqlen_k=5)
    assert made == FORWARD * HEADS * 2 * 5 * 5


def test_another_default_device():
    inputs = qkv(20, 30)
    with torch.device("meta"):
        made = counted(bsk.attention, *inputs, causal=True)
    assert made == FORWARD * 2 * HEADS * int(visible(20, 30, True).sum())


def test_whichever_is_imported_first():
    program = "from torch.utils.flop_counter import flop_registry, FlopCounterMode\n"
    check = "import torch; assert torch.ops.bsk.attn_fwd in flop_registry\n"
    fresh(program + "import blackwell_sparsek\n" + check)
    fresh("import blackwell_sparsek\n" + program + check)
