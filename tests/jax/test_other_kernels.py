"""`impl="triton"` of decoding, products and sampled products in JAX: see test_attention_kernels."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

import jax.numpy as jnp  # noqa: E402

import blackwell_sparsek as bsk  # noqa: E402
import blackwell_sparsek.jax as bsk_jax  # noqa: E402
from blackwell_sparsek import Unsupported  # noqa: E402
from blackwell_sparsek.calls.decode import DecodeCall  # noqa: E402
from blackwell_sparsek.calls.matmul import MatmulCall, PatternTensors, SddmmCall  # noqa: E402
from blackwell_sparsek.decode.triton import decode  # noqa: E402
from blackwell_sparsek.jax import decode_triton, matmul_triton  # noqa: E402
from blackwell_sparsek.jax.attention_triton import KernelOptions  # noqa: E402
from blackwell_sparsek.jax.kernel_calls import Arrays  # noqa: E402
from blackwell_sparsek.masks.band import Band  # noqa: E402
from blackwell_sparsek.matmul.strides import Strides  # noqa: E402
from blackwell_sparsek.matmul.triton.sddmm import sddmm  # noqa: E402
from blackwell_sparsek.matmul.triton.spmm import matmul  # noqa: E402
from blackwell_sparsek.testing.captured_launches import captured_launches  # noqa: E402

from . import oracle  # noqa: E402
from . import test_decode as decoding  # noqa: E402
from . import test_matmul as products  # noqa: E402
from .kernels import H200, interpret_kernels  # noqa: E402
from .test_attention_kernels import as_noted, interpreted  # noqa: E402


@interpreted
@pytest.mark.parametrize("page_size", [None, 16])
def test_decode(monkeypatch, page_size):
    """Programs share softmaxes; what lies past the lengths is NaN and not read."""
    interpret_kernels(monkeypatch)
    q, k, v, lengths = decoding.problem(130, lengths=(0, 7, 129), dtype="float16")
    sinks = jnp.asarray(np.random.default_rng(3).standard_normal(6), "float32")
    formula = {"softcap": 2.0, "scale": 0.3, "sinks": sinks}
    shown = decoding.visible(lengths, 6, 2, 130, (40, 0))
    past = np.arange(130)[None, None, :, None] >= np.asarray(lengths)[:, None, None, None]
    k_cache, v_cache = (jnp.where(past, jnp.nan, x) for x in (k, v))
    table = {}
    if page_size is not None:
        (k_cache, pages), (v_cache, _) = (decoding.paged(x, page_size) for x in (k_cache, v_cache))
        table = {"page_table": pages}
    found = bsk_jax.attention_decode(
        q, k_cache, v_cache, cache_seqlens=lengths, window=(40, None), return_lse=True,
        impl="triton", **formula, **table,
    )  # fmt: skip
    decoding.check(found, q, k, v, shown, **formula)


@interpreted
def test_decode_listed_blocks(monkeypatch):
    interpret_kernels(monkeypatch)
    q, k, v, lengths = decoding.problem(96, lengths=(96, 50))
    blocks = jnp.array([[[2, 0, -1], [1, -1, -1]], [[0, 1, -1], [0, 2, 1]]], jnp.int32)
    shown = np.zeros((2, 6, 2, 96), bool)
    for b, h, i in np.ndindex(blocks.shape):
        if (block := int(blocks[b, h, i])) >= 0:
            shown[b, 3 * h : 3 * h + 3, :, 32 * block : 32 * block + 32] = True
    shown &= decoding.visible(lengths, 6, 2, 96)
    found = bsk_jax.attention_decode(
        q, k, v, cache_seqlens=lengths, kv_blocks=blocks, kv_block_size=32, return_lse=True,
        impl="triton",
    )  # fmt: skip
    decoding.check(found, q, k, v, shown)
    with pytest.raises(Unsupported, match="has no derivative"):
        jax.grad(
            lambda q: bsk_jax.attention_decode(
                q, k, v, cache_seqlens=lengths, impl="triton"
            ).sum()
        )(q)  # fmt: skip


@interpreted
@pytest.mark.parametrize(
    ("m", "k", "n", "block", "dtype"),
    [(65, 127, 17, (16, 32), "float32")],
)
def test_products_and_gradients(monkeypatch, m, k, n, block, dtype):
    interpret_kernels(monkeypatch)
    products.check_products(partial(bsk_jax.matmul, impl="triton"), m, k, n, block, dtype)


@interpreted
def test_batches_and_cut_rows(monkeypatch):
    """Long rows are cut: their parts are added by a second launch, which updates the result."""
    launched = []
    interpret_kernels(monkeypatch, launched=launched)
    real = matmul_triton.work_list
    monkeypatch.setattr(
        matmul_triton, "work_list", lambda indptr, nnz, cols, chunk: real(indptr, nnz, cols, 2)
    )
    a = products.matrix(48, 160, (16, 16), "float16")
    x = products.array(2, 160, 9, dtype="float16")
    found = jax.jit(lambda a, x: bsk_jax.matmul(a, x, impl="triton"))(a, x)
    products.budget(found, np.asarray(a.to_dense()), x)
    assert [x.kernel.__name__ for x in launched] == ["_bsr_spmm_kernel", "_bsr_spmm_reduce_kernel"]


@interpreted
def test_gradients_through_sddmm_and_a_product(monkeypatch):
    interpret_kernels(monkeypatch)
    pattern = products.matrix(40, 50, (16, 16))
    a, b = products.array(40, 24), products.array(24, 50, seed=8)

    def loss(a, b):
        made = bsk_jax.sddmm(a, b, pattern, impl="triton")
        return (bsk_jax.matmul(made, b.T, impl="triton") ** 2).sum()

    keep = products._keep(pattern)
    at_blocks = bsk_jax.BSRMatrix.from_mask(jnp.ones((40, 50)), keep, (16, 16)).to_dense()

    def expected(to):
        left, right, shown = to(a), to(b), to(at_blocks)
        made = left @ right * shown
        product = made @ right.T
        dmade = 2 * product @ right * shown
        return dmade @ right.T, left.T @ dmade + 2 * product.T @ made

    found = jax.jit(jax.grad(loss, (0, 1)))(a, b)
    for ours, exact, plain in zip(found, expected(oracle.as64), expected(oracle.as32), strict=True):
        oracle.within_budget(ours, exact, plain)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_every_block_is_in_one_item(chunk):
    lengths = np.array([0, 7, 3, 1, 0, 12, 3])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    made = jax.jit(lambda x: matmul_triton.work_list(x, int(indptr[-1]), 12, chunk))
    work = jax.tree.map(np.asarray, made(jnp.asarray(indptr, jnp.int32)))
    seen, slots = [], {}
    sizes = [end - begin for row, begin, end, _ in work.items.tolist() if row >= 0]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) <= max(chunk, 12 * (chunk > 12))
    for row, begin, end, slot in work.items.tolist():
        if row < 0:
            assert (begin, end, slot) == (0, 0, -1)
            continue
        seen.extend((row, block) for block in range(begin, end))
        if slot >= 0:
            slots.setdefault(row, []).append(slot)
    assert sorted(seen) == [(r, b) for r in range(7) for b in range(indptr[r], indptr[r + 1])]
    assert {row for row, *_ in work.items.tolist()} >= set(range(7))
    cut = {row: (first, last) for row, first, last in work.split_rows.tolist() if row >= 0}
    assert cut == {row: (min(s), max(s) + 1) for row, s in slots.items()}
    assert sum(len(s) for s in slots.values()) == len({s for x in slots.values() for s in x})
    assert all(last <= work.n_slots for _, last in cut.values())


def without_batch(value):
    """Strides between matrices, where there is one, may be anything."""
    if isinstance(value, Strides):
        return value._replace(batch=0)
    return value


def compared(planned, launches, note=lambda value: value):
    assert [x.kernel for x in planned] == [x.kernel for x in launches]
    assert [x.options for x in planned] == [x.options for x in launches]
    for ours, theirs in zip(planned, launches, strict=True):
        args, given = (tuple(map(note, launch.args)) for launch in (ours, theirs))
        assert as_noted(args) == as_noted(given)


@pytest.mark.parametrize("paged", [False, True])
def test_jax_plans_the_decoding_of_torch(paged):
    shapes = {"q": (3, 8, 1, 64), "k": (3, 2, 500, 64)}
    if paged:
        shapes["k"] = (40, 16, 2, 64)
    table = torch.zeros(3, 32, dtype=torch.int32) if paged else None
    q, k = (torch.zeros(s, dtype=torch.bfloat16) for s in shapes.values())
    lengths = torch.zeros(3, dtype=torch.int32)
    with captured_launches(90) as launches:
        decode(DecodeCall(q, k, k.clone(), lengths, 0.125, table, band=Band(None, 0)))
    options = KernelOptions(0.125, 0.0, Band(None, 0), H200, "", "ieee")
    x, y = (jnp.zeros(s, jnp.bfloat16) for s in shapes.values())
    pages = jnp.zeros((3, 32), jnp.int32) if paged else None
    cache = SimpleNamespace(
        k=y, v=y, lengths=jnp.zeros(3, jnp.int32), page_table=pages, kv_blocks=None
    )
    compared([decode_triton.plan(options, 0, x, cache, None, Arrays())], launches)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dense_left", [False, True])
def test_jax_plans_the_products_of_torch(transposed, dense_left):
    keep = torch.rand(8, 6) < 0.6
    a = bsk.BSRMatrix.from_mask(torch.randn(256, 384, dtype=torch.bfloat16), keep, (32, 64))
    ours = bsk_jax.BSRMatrix.from_torch(a)
    inner = 256 if transposed != dense_left else 384
    shape = (1, 300, inner) if dense_left else (2, inner, 300)
    features = 256 + 384 - inner
    dense = torch.zeros(shape, dtype=torch.bfloat16)
    dy = torch.zeros((1, 300, features) if dense_left else (2, features, 300), dtype=torch.bfloat16)
    pattern = PatternTensors(*a.pattern.tensors())
    with captured_launches(90) as launches:
        matmul(MatmulCall(a.data, pattern, a.shape, transposed, dense, dense_left))
    options = matmul_triton.ProductOptions(a.shape, transposed, dense_left, H200, "", "ieee")
    lists = matmul_triton.Pattern(ours.indices, ours.indptr, ours.row_indices())
    x, note = jnp.zeros(shape, jnp.bfloat16), without_batch if dense_left else lambda value: value
    compared(matmul_triton.plan_product(options, ours.data, x, lists, Arrays()), launches, note)
    with captured_launches(90) as launches:
        left, right = (dense, dy) if transposed != dense_left else (dy, dense)
        left, right = (left.mT, right.mT) if dense_left else (left, right)
        sddmm(SddmmCall(left, right.mT, pattern, a.shape, (32, 64)))
    sampled = matmul_triton.plan_sample(
        options, jnp.zeros(dy.shape, jnp.bfloat16), x, lists, (32, 64), Arrays()
    )
    compared(sampled, launches, without_batch)
