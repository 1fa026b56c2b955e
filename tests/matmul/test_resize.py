"""Products with new numbers of rows, launched as full ones are; CPU tensors for a GPU's."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls import matmul as calls
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.errors import InvalidInput
from blackwell_sparsek.launch import replay as launch_replay
from blackwell_sparsek.matmul import choice, fp8_inputs, products, resize
from blackwell_sparsek.matmul.sm90 import fp8_launch, spmm_launch
from blackwell_sparsek.matmul.sm90 import resize as sm90_resize

from ..launch.fakes import noting_variants, resizing_on_the_cpu
from ..launch.test_replay import DEVICE, SEEN_BEFORE, pretend_gpu

H200 = Arch("cuda", 90, 132, 232448, False)
LEARNED = (300, 500, 1000, 1500, 2500, 5000, 9000)
OTHERS = (301, 333, 700, 1024, 2000, 2051, 4097, 8000)


@pytest.fixture
def gpu(monkeypatch):
    """`launched` has what the GPU was given; `full` counts the products that were made in full."""
    state = SimpleNamespace(launched=[], full=0)
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(launch_replay, "_seen", {})
    monkeypatch.setattr(launch_replay, "seen_before", SEEN_BEFORE)
    monkeypatch.setattr(resize, "raw_device", lambda: DEVICE)
    resizing_on_the_cpu(monkeypatch, sm90_resize, spmm_launch, fp8_launch)
    for module in (calls, spmm_launch, fp8_launch):
        monkeypatch.setattr(module, "arch_of", lambda device: H200)
    noting_variants(monkeypatch, state.launched)
    for module in (products, fp8_inputs):
        monkeypatch.setattr(module, "_computed", counting(module._computed, state))
    return state


def counting(computed, state):
    def full(*given):
        state.full += 1
        return computed(*given)

    return full


class Layer:
    """A matrix with a fifth of its blocks, and what is added to its products."""

    def __init__(
        self, out=1024, inner=512, block=(64, 64), transposed=True, bias=False, residual=False,
        activation=None, density=0.2, fp8=False,
    ):  # fmt: skip
        torch.manual_seed(0)
        shape = (out, inner) if transposed else (inner, out)
        keep = torch.rand(shape[0] // block[0], shape[1] // block[1]) < density
        keep[0] = True
        dense = keep.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        matrix = bsk.BSRMatrix.from_dense(dense.to(torch.bfloat16), block)
        matrix, self.fp8 = matrix.to_fp8() if fp8 else matrix, fp8
        self.matrix, self.factor = matrix, matrix.T if transposed else matrix
        self.inner, self.out = inner, out
        self.bias = torch.zeros(out, dtype=torch.bfloat16) if bias else None
        self.has_residual, self.activation = residual, activation

    def make(self, *lead, **options):
        """x and its product."""
        x = torch.zeros(*lead, self.inner, dtype=torch.bfloat16)
        residual = None
        if self.has_residual:
            residual = torch.zeros(*lead, self.out, dtype=torch.bfloat16)
        options = {"activation": self.activation, **options}
        x = bsk.fp8.quantize(x, "1x128") if self.fp8 else x
        with torch.no_grad():
            y = bsk.matmul(x, self.factor, bias=self.bias, residual=residual, **options)
        return x, residual, y

    def launch(self, state, *lead):
        """What a product launches, with names in place of addresses."""
        x, residual, y = self.make(*lead)
        kernel, grid, _, values, maps = state.launched[-1]
        given = {"x": x, "y": y, "bias": self.bias, "residual": residual}
        if self.fp8:
            given |= {"x": x.data, "scales of x": x.descale, "scales": self.matrix.stored_descale}
        given["values"] = self.matrix.storage
        names = {t.data_ptr(): name for name, t in given.items() if t is not None}
        for place, (address, shape, strides) in maps.items():
            strides = [s if n > 1 else None for s, n in zip(strides, shape, strict=True)]
            values[place : place + 1 + 2 * len(shape)] = [names[address], *shape, *strides]
        return kernel, grid, [names.get(v, v) for v in values], y.shape, y.stride(), y.dtype


CASES = {
    "pairs of rows": {},
    "tall blocks": {"block": (128, 128)},
    "blocks 128x32": {"block": (128, 32)},
    "x @ w": {"transposed": False, "block": (64, 128)},
    "bias": {"bias": True},
    "residual, gelu": {"residual": True, "activation": "gelu"},
    "all": {"bias": True, "residual": True, "activation": "silu", "block": (128, 64)},
    "fp8": {"fp8": True, "block": (128, 128)},
    "fp8, low blocks": {"fp8": True, "block": (32, 32)},
    "fp8, all": {"fp8": True, "bias": True, "residual": True, "activation": "relu"},
}


@pytest.mark.parametrize("batch", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_launches_are_those_of_full_products(case, batch, gpu):
    layer = Layer(**CASES[case])
    for rows in LEARNED:
        layer.make(*batch, rows)
    learned = gpu.full
    # tiles are fewer than products
    assert learned < len(LEARNED)
    compared = 0
    for rows in OTHERS:
        quick = layer.launch(gpu, *batch, rows)
        if gpu.full > learned:
            learned = gpu.full
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer.matrix.pattern, "_families", {})
            slow = layer.launch(gpu, *batch, rows)
        assert gpu.full == learned + 1
        learned, compared = gpu.full, compared + 1
        assert quick == slow, rows
    assert compared >= 6


def test_what_else_differs_is_made_in_full(gpu):
    """Each of these is another family, or none."""
    layer = Layer()
    layer.make(500)
    layer.make(501)
    assert gpu.full == 1
    others = [{"activation": "relu"}, {"out_dtype": torch.float32}, {"impl": "sm90"}]
    for i, options in enumerate(others):
        layer.make(502 + i, **options)
        assert gpu.full == 2 + i, options
    made = gpu.full
    layer.make(1, 505)
    layer.bias = torch.zeros(layer.out, dtype=torch.bfloat16)
    layer.make(506)
    layer.bias = None
    # x with gaps
    x = torch.zeros(507, 2 * layer.inner, dtype=torch.bfloat16)[:, : layer.inner]
    bsk.matmul(x, layer.factor)
    # A @ x
    bsk.matmul(layer.matrix, torch.zeros(layer.inner, 512, dtype=torch.bfloat16))
    assert gpu.full == made + 4


def test_new_values_are_read(gpu):
    """A layer keeps its pattern and may replace its blocks."""
    layer = Layer()
    layer.make(500)
    values = torch.ones_like(layer.matrix.storage)
    layer.matrix = bsk.BSRMatrix._from_parts(layer.matrix.pattern, values)
    layer.factor = layer.matrix.T
    _, _, values, *_ = layer.launch(gpu, 501)
    assert gpu.full == 1 and values[0] == "values"


def test_new_scales_are_read(gpu):
    """In fp8, also of the same bytes."""
    layer = Layer(fp8=True)
    layer.make(500)
    x = bsk.fp8.quantize(torch.ones(501, layer.inner, dtype=torch.bfloat16), "1x128")
    for scaled in (x, x._replace(descale=2 * x.descale)):
        bsk.matmul(scaled, layer.factor)
        *_, values, _ = gpu.launched[-1]
        assert gpu.full == 1
        assert {scaled.descale.data_ptr(), layer.matrix.stored_descale.data_ptr()} < set(values)
    # with gaps between the scales of two rows
    gaps = torch.zeros(501, 8)[:, :4].copy_(x.descale)
    bsk.matmul(x._replace(descale=gaps), layer.factor)
    assert gpu.full == 2


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_that_come_again_are_recorded_and_replayed(fp8, gpu):
    layer = Layer(fp8=fp8)
    layer.make(500)
    for _ in range(launch_replay.RESIZED_CALLS):
        layer.make(600)
        assert gpu.full == 1 and not layer.matrix.pattern.launches
    layer.make(600)
    assert gpu.full == 2 and len(layer.matrix.pattern.launches) == 1
    layer.make(600)
    assert gpu.full == 2


# packed first, or x transposed first
@pytest.mark.parametrize("block", [(32, 32), (64, 16)])
def test_other_products_are_recorded_the_second_time(block, gpu):
    layer = Layer(block=block)
    for rows in (500, 600, 700):
        layer.make(rows)
    assert gpu.full == 3
    for _ in range(3):
        layer.make(800)
    assert gpu.full == 5


def test_what_torch_multiplies_faster_is_left_to_it(gpu, monkeypatch):
    layer = Layer()
    layer.make(500)
    monkeypatch.setattr(choice, "_slower_than_dense", lambda problem, impl: "dense is faster")
    monkeypatch.setattr(choice, "dense_seconds", lambda problem: 0.0)
    layer.make(501)
    assert gpu.full == 1
    for _ in range(3):
        layer.make(1000)
    assert gpu.full == 3 and len(gpu.launched) == 2


def test_split_rows_are_made_in_full(gpu):
    """Their parts are added by a second kernel."""
    matrix = torch.zeros(2048, 8192, dtype=torch.bfloat16)
    matrix[:128], matrix[:, :128] = 1, 1
    matrix = bsk.BSRMatrix.from_dense(matrix, (128, 128))
    for rows in (300, 301):
        bsk.matmul(torch.zeros(rows, 8192, dtype=torch.bfloat16), matrix.T)
    names = [kernel.fn.__name__ for kernel, *_ in gpu.launched]
    assert gpu.full == 2 and names == ["_spmm_sm90_kernel", names[1]] * 2


def test_few_rows_are_left_to_another_kernel(gpu):
    layer = Layer()
    layer.make(500)
    layer.make(501)
    assert gpu.full == 1
    for rows in (1, 7, 64, 200) * 3:
        layer.make(rows)
    # recorded the second time, replayed the third
    assert gpu.full == 9
    names = {kernel.fn.__name__ for kernel, *_ in gpu.launched[2:]}
    assert names == {"_bsr_spmm_narrow_kernel", "_spmm_narrow_sm90_kernel"}


def test_a_first_product_of_one_row_does_not_tell_what_tma_takes(gpu):
    """Rows of 100 elements begin where TMA cannot copy, which one row does not show."""
    matrix = bsk.BSRMatrix.from_dense(torch.ones(512, 100, dtype=torch.bfloat16), (64, 64))
    for rows in (1, 300, 301):
        bsk.matmul(torch.zeros(rows, 100, dtype=torch.bfloat16), matrix.T)
    assert gpu.full == 3


def test_wrong_shapes_reach_the_checks(gpu):
    layer = Layer(residual=True)
    layer.make(500)
    x, residual, _ = layer.make(501)
    with pytest.raises(InvalidInput, match="residual"):
        bsk.matmul(x[:500], layer.factor, residual=residual)
    layer.out = 512
    with pytest.raises(InvalidInput, match="residual"):
        layer.make(501)
    layer = Layer(fp8=True)
    x = bsk.fp8.quantize(torch.zeros(500, layer.inner, dtype=torch.bfloat16), "1x128")
    bsk.matmul(x, layer.factor)
    with pytest.raises(InvalidInput, match="smoothed"):
        bsk.matmul(x._replace(mean=torch.zeros(layer.inner)), layer.factor)
    # one scale, or a residual, without any dimension
    with pytest.raises(InvalidInput, match="other scales"):
        bsk.matmul(x._replace(descale=torch.ones(()), scale="tensor"), layer.factor)
    layer = Layer()
    x, *_ = layer.make(500)
    with pytest.raises(InvalidInput, match="residual"):
        bsk.matmul(x, layer.factor, residual=torch.zeros((), dtype=torch.bfloat16))
    with pytest.raises(InvalidInput, match="rank"):
        bsk.matmul(torch.zeros((), dtype=torch.bfloat16), layer.factor)
    layer.inner = 256
    with pytest.raises(InvalidInput, match="columns"):
        layer.make(502)


def test_nothing_is_kept_alive(gpu):
    layer = Layer()
    layer.make(500)
    layer.make(501)
    gc.collect()
    gc.disable()
    try:
        storage, pattern = weakref.ref(layer.matrix.storage), weakref.ref(layer.matrix.pattern)
        layer.matrix = bsk.BSRMatrix._from_parts(
            layer.matrix.pattern, torch.ones_like(layer.matrix.storage)
        )
        layer.factor = layer.matrix.T
        assert storage() is None, "old blocks are kept"
        del layer.matrix, layer.factor
        assert pattern() is None, "a cycle keeps the pattern alive"
    finally:
        gc.enable()


def test_the_choice_knows_batches(gpu, monkeypatch):
    """As in a full product: estimates may tell a batch from rows."""
    layer = Layer()
    layer.make(1, 600)
    asked, choose = [], sm90_resize.matmul_dispatch.choose

    def noting(impl, problem):
        asked.append((problem.batch, problem.n))
        return choose(impl, problem)

    monkeypatch.setattr(sm90_resize.matmul_dispatch, "choose", noting)
    for lead in ((1, 900), (3, 300), (1, 899)):
        layer.make(*lead)
    assert asked == [(1, 900), (3, 300)] and gpu.full == 1
