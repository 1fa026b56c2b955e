import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blackwell_sparsek.core.errors import InvalidInput, Unsupported
from blackwell_sparsek.integrations import torch_sparse as routes
from blackwell_sparsek.integrations.torch_sparse import enable_torch_sparse, is_enabled
from blackwell_sparsek.matmul.api import matmul
from blackwell_sparsek.sparse.matrix import BSRPattern
from blackwell_sparsek.testing.inputs import block_pattern, integers, normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta")


@pytest.fixture
def enabled():
    with enable_torch_sparse():
        yield
    assert not is_enabled()


def weight(device, dtype=torch.float32, *, block=(16, 8), blocks=(3, 5), make=normal, seed=0):
    keep = block_pattern(*blocks, density=0.6, seed=seed, device=device)
    elements = keep.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    dense = make(*elements.shape, seed=seed, dtype=dtype, device=device) * elements
    return dense, dense.to_sparse_bsr(block)


PRODUCTS = {
    "bsr @ dense": lambda w, x, b: w @ x.mT,
    "torch.mm": lambda w, x, b: torch.mm(w, x.mT),
    "torch.sparse.mm": lambda w, x, b: torch.sparse.mm(w, x.mT) if w.is_sparse_csr else w @ x.mT,
    "dense @ bsr": lambda w, x, b: x.new_ones(3, 48) @ w,
    "dense @ bsr.T": lambda w, x, b: x @ w.t(),
    "bsr @ vector": lambda w, x, b: w @ x[0],
    "linear": lambda w, x, b: F.linear(x, w),
    "linear, bias": lambda w, x, b: F.linear(x, w, b),
    "linear 3-D": lambda w, x, b: F.linear(x.view(1, 7, 40), w),
    "linear 3-D, bias": lambda w, x, b: F.linear(x.view(7, 1, 40), w, b),
    "linear 1-D, bias": lambda w, x, b: F.linear(x[0], w, b),
    "addmm": lambda w, x, b: torch.addmm(b[:, None].expand(48, 7), w, x.mT),
    "addmm scaled": lambda w, x, b: torch.addmm(b[:, None], w, x.mT, alpha=2, beta=-1),
    "addmm by column": lambda w, x, b: torch.addmm(b[:7], w, x.mT),
    "addmm without input": lambda w, x, b: torch.addmm(b[:7] * torch.inf, w, x.mT, beta=0, alpha=3),
    "mm out": lambda w, x, b: torch.mm(w, x.mT, out=x.new_empty(48, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_exact(enabled, device, name):
    dense, sparse = weight(device, make=integers)
    x, bias = integers(7, 40, seed=1, device=device), integers(48, seed=2, device=device)
    expected = PRODUCTS[name](dense, x, bias)
    got = PRODUCTS[name](sparse, x, bias)
    assert got.layout == torch.strided and torch.equal(got, expected)


def test_scaled_addmm_rounds_once(enabled, device):
    dense, sparse = weight(device, torch.bfloat16)
    x = normal(40, 7, seed=3, dtype=torch.bfloat16, device=device)
    c = normal(48, 7, seed=4, dtype=torch.bfloat16, device=device)
    exact = 0.3 * c.double() + 1.7 * (dense.double() @ x.double())
    got = torch.addmm(c, sparse, x, beta=0.3, alpha=1.7)
    assert_within_budget(got, exact, torch.addmm(c, dense, x, beta=0.3, alpha=1.7))


@pytest.mark.parametrize(
    ("sparse_left", "shape", "added"),
    [
        (True, (48, 1), {"bias": [48]}),
        (True, (48, 7), {"residual": [48, 7]}),
        (True, (7,), {}),
        (True, (1, 7), {}),
        (False, (1, 40), {"bias": [40]}),
        (False, (40,), {"bias": [40]}),
        (False, (7, 40), {"residual": [7, 40]}),
        (False, (7, 1), {}),
    ],
)
def test_what_addmm_adds_joins_the_product_where_it_can(
    enabled, device, monkeypatch, sparse_left, shape, added
):
    """Otherwise the product is written in fp32 and read again."""
    _, sparse = weight(device)
    joined = []

    def noted(*operands, **options):
        kept = {name: list(x.shape) for name, x in options.items() if name != "out_dtype"}
        joined.append((kept, options.get("out_dtype")))
        return matmul(*operands, **options)

    monkeypatch.setattr(routes, "matmul", noted)
    operands = (sparse, normal(40, 7, seed=3, device=device))
    if not sparse_left:
        operands = (normal(7, 48, seed=3, device=device), sparse)
    torch.addmm(normal(*shape, seed=4, device=device), *operands)
    assert joined == [(added, None if added else torch.float32)]


def test_what_is_added_to_a_single_row_may_differ_by_column(enabled, device):
    dense, sparse = weight(device, block=(1, 8), blocks=(1, 5), make=integers, seed=1)
    x, c = integers(40, 7, seed=3, device=device), integers(7, seed=4, device=device)
    for added in (c, c[None], c[:1], c[:1, None]):
        assert torch.equal(torch.addmm(added, sparse, x), torch.addmm(added, dense, x))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_index_dtypes_and_unusual_strides(enabled, device, index_dtype):
    dense, t = weight(device, make=integers)
    crow, col = t.crow_indices().to(index_dtype), t.col_indices().to(index_dtype)
    sparse = torch.sparse_bsr_tensor(crow, col, t.values(), t.shape)
    x = integers(80, 14, seed=5, device=device)[::2, ::2]
    assert torch.equal(sparse @ x, dense @ x)
    assert torch.equal(
        sparse @ torch.ones(1, device=device).expand(40, 3), dense.sum(1, True).expand(-1, 3)
    )
    assert torch.equal(
        sparse @ torch.empty(40, 0, device=device), torch.empty(48, 0, device=device)
    )


def test_gradients_of_dense_operands(enabled, device):
    dense, sparse = weight(device, make=integers)
    results = []
    for w in (dense, sparse):
        x = integers(7, 40, seed=6, device=device).requires_grad_()
        bias = integers(48, seed=7, device=device).requires_grad_()
        F.linear(x, w, bias).sum().backward()
        results.append((x.grad, bias.grad))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_a_linear_module_with_a_sparse_weight(enabled, device):
    dense, sparse = weight(device, make=integers)
    linear = nn.Linear(40, 48, device=device)
    with torch.no_grad():
        linear.bias.zero_()
    linear.weight = nn.Parameter(sparse, requires_grad=False)
    x = integers(2, 7, 40, seed=8, device=device)
    assert torch.equal(linear(x), F.linear(x, dense))


def check(x, sparse, dense):
    exact = F.linear(x.double(), dense.double())
    assert_within_budget(F.linear(x, sparse), exact, F.linear(x, dense))


def test_conversion_happens_once_while_the_indices_live(enabled, device, monkeypatch):
    _, sparse = weight(device)
    calls = []

    def counted(*args):
        calls.append(len(args))
        return BSRPattern(*args)

    monkeypatch.setattr("blackwell_sparsek.integrations.torch_sparse.BSRPattern", counted)
    x = normal(7, 40, seed=9, device=device)
    for _ in range(3):
        F.linear(x, sparse)
        sparse @ x.mT
    assert len(calls) == 1 and len(routes._cache) == 1
    dense, other = weight(device, seed=1)
    sparse.values().mul_(2)
    check(x, sparse, sparse.to_dense())
    assert len(calls) == 1
    del sparse
    gc.collect()
    check(x, other, dense)
    assert len(calls) == 2 and len(routes._cache) == 1


def test_indices_changed_in_place_are_read_again(enabled, device):
    crow, col = torch.tensor([0, 1], device=device), torch.tensor([0], device=device)
    values = torch.ones(1, 2, 2, device=device)
    sparse = torch.sparse_bsr_tensor(crow, col, values, (2, 4))
    x = torch.arange(4.0, device=device)[:, None]
    assert (sparse @ x).flatten().tolist() == [1, 1]
    sparse.col_indices().fill_(1)
    assert (sparse @ x).flatten().tolist() == [5, 5]


def test_malformed_indices_raise(enabled, device):
    crow, col = torch.tensor([0, 1], device=device), torch.tensor([7], device=device)
    values = torch.ones(1, 2, 2, device=device)
    sparse = torch.sparse_bsr_tensor(crow, col, values, (2, 4), check_invariants=False)
    with pytest.raises(InvalidInput, match=r"indices is out of range at entry 0.*\[0, 2\), got 7"):
        sparse @ torch.ones(4, 1, device=device)


def test_what_is_not_ours_goes_to_torch(device):
    """Each case ends as it does without routing: with the same result or the same error."""
    dense, sparse = weight(device, make=integers)
    x = integers(40, 7, seed=10, device=device)
    cases = {
        "csr": lambda: dense.to_sparse_csr() @ x,
        "two sparse operands": lambda: sparse @ sparse.t(),
        "dtypes differ": lambda: sparse @ x.double(),
        "integers": lambda: sparse.to(torch.int32) @ x.int(),
        "sizes differ": lambda: sparse @ x[:39],
        "complex alpha": lambda: torch.addmm(x[:, :1], sparse, x, alpha=1j),
        "batch": lambda: torch.stack([dense, dense]).to_sparse_bsr((16, 8)) @ x,
    }

    def outcome(case):
        try:
            return case()
        except (RuntimeError, TypeError) as error:
            return f"{type(error).__name__}: {error}"

    for name, case in cases.items():
        before = outcome(case)
        with enable_torch_sparse():
            after = outcome(case)
        assert type(before) is type(after), name
        if isinstance(before, torch.Tensor):
            assert torch.equal(before.to_dense(), after.to_dense()), name
        else:
            assert after == before, name
    assert isinstance(outcome(cases["csr"]), torch.Tensor)


def test_reversible_and_counted():
    library = routes._library
    assert library is None and not is_enabled()
    first = enable_torch_sparse()
    with enable_torch_sparse() as second:
        assert is_enabled()
        first.disable()
        first.disable()
        assert is_enabled()
    assert not is_enabled() and routes._library is None and len(routes._cache) == 0
    second.disable()
    assert routes._users == 0
    with pytest.raises(ZeroDivisionError), enable_torch_sparse():
        raise ZeroDivisionError
    assert not is_enabled()


def test_off_means_torchs_own(monkeypatch):
    _, sparse = weight("cpu")
    with enable_torch_sparse():
        sparse @ torch.ones(40, 1)
    monkeypatch.setattr(routes, "matmul", lambda *operands: 1 / 0)
    # torch multiplies, or refuses: builds with MKL take square blocks alone, builds without it none
    with contextlib.suppress(RuntimeError):
        sparse @ torch.ones(40, 1)
    with enable_torch_sparse(), pytest.raises(ZeroDivisionError):
        sparse @ torch.ones(40, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1, 7, 64])
def test_cuda_products(enabled, dtype, columns):
    dense, sparse = weight("cuda", dtype, block=(32, 16), blocks=(5, 6))
    x = normal(columns, 96, seed=11, dtype=dtype, device="cuda")
    bias = normal(160, seed=12, dtype=dtype, device="cuda")
    calls = len(routes._cache)
    got = F.linear(x, sparse, bias)
    assert len(routes._cache) == calls + 1
    exact = F.linear(x.double(), dense.double(), bias.double())
    assert_within_budget(got, exact, F.linear(x, dense, bias), what="linear")
    exact = dense.double() @ x.mT.double()
    assert_within_budget(sparse @ x.mT, exact, dense @ x.mT, what="mm")


@pytest.mark.gpu
def test_cuda_graph_after_the_first_call(enabled):
    _, sparse = weight("cuda", torch.float16, block=(32, 16), blocks=(5, 6))
    x = normal(64, 96, seed=13, dtype=torch.float16, device="cuda")
    expected = F.linear(x, sparse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = F.linear(x, sparse)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)


def test_a_torch_without_get_kernel_is_refused(monkeypatch):
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(Unsupported, match=r"torch \d+\.\d+ has no torch.library.get_kernel"):
        enable_torch_sparse()
    assert not is_enabled()
