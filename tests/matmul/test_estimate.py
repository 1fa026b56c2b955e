import pytest
import torch

from blackwell_sparsek.calls.matmul import BsrProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.compat import WARPS_TRITON
from blackwell_sparsek.matmul.estimate import (
    dense_seconds,
    packed_fill,
    packed_seconds,
    sparse_seconds,
    takes_warp_rows,
    warp_rows_seconds,
)

H200 = Arch("cuda", 90, 132, 232448, False)
CPU = Arch("cpu", 0, 1, 0, False)
BLOCKS = [(128, 128), (128, 16), (64, 64), (32, 32), (16, 16)]
# one that does not let warps part
OTHER_TRITON = (3, 99)


@pytest.fixture(autouse=True)
def parting_triton(choosing_with):
    """As with a release that lets warps part, whichever is installed."""
    choosing_with(WARPS_TRITON[-1])


def problem(block=(128, 128), density=0.22, n=8192, size=8192, arch=H200, **options):
    blocks = (size // block[0]) * (size // block[1])
    dtype = options.pop("dtype", torch.float16)
    out_dtype = options.pop("out_dtype", dtype)
    return BsrProblem(
        "matmul", arch, dtype, out_dtype, (size, size), block, round(density * blocks), n, **options
    )


# Single calls of 8192^3 on an H200, milliseconds by share of the blocks.
MEASURED = {
    (128, 128): {
        0.1: 0.172,
        0.22: 0.333,
        0.3: 0.443,
        0.5: 0.727,
        0.7: 1.011,
        0.9: 1.297,
        1.0: 1.51,
    },
    (128, 64): {0.1: 0.172, 0.22: 0.332, 0.3: 0.443, 0.5: 0.725, 0.7: 1.010, 0.9: 1.294},
    (128, 32): {0.1: 0.177, 0.22: 0.340, 0.3: 0.454, 0.5: 0.746, 0.7: 1.049, 0.9: 1.321},
    (128, 16): {0.1: 0.193, 0.22: 0.370, 0.3: 0.491, 0.5: 0.793, 0.7: 1.100, 0.9: 1.402},
    (64, 64): {0.1: 0.216, 0.22: 0.418, 0.3: 0.548, 0.5: 0.835, 0.7: 1.096, 0.9: 1.347},
    (32, 32): {0.1: 0.387, 0.22: 0.716, 0.3: 0.887, 0.5: 1.195, 0.7: 1.389, 0.9: 1.503},
    (16, 16): {0.1: 0.560, 0.22: 0.844, 0.3: 1.079, 0.5: 1.654, 0.7: 2.341, 0.9: 2.326},
}
# The same of tiles of 64 rows without a partner.
ALONE = {
    (64, 64): {0.1: 0.237, 0.22: 0.485, 0.3: 0.658, 0.5: 1.075, 0.7: 1.481, 0.9: 1.870},
    (32, 32): {0.1: 0.437, 0.22: 0.865, 0.3: 1.126, 0.5: 1.637, 0.7: 1.966, 0.9: 2.079},
}


@pytest.mark.parametrize("block", MEASURED)
def test_products_take_what_was_measured(block):
    for density, measured_ms in MEASURED[block].items():
        estimate_ms = sparse_seconds(problem(block, density), "sm90") * 1e3
        assert estimate_ms == pytest.approx(measured_ms, rel=0.07), density


@pytest.mark.parametrize("block", ALONE)
def test_rows_without_a_partner_take_what_was_measured(block, choosing_with):
    choosing_with(OTHER_TRITON)
    for density, measured_ms in ALONE[block].items():
        estimate_ms = sparse_seconds(problem(block, density), "sm90") * 1e3
        assert estimate_ms == pytest.approx(measured_ms, rel=0.06), density


# What multiplying the densified matrix takes: cuBLAS in the same runs, and 0.06 ms.
DENSE_MS = {0.1: 1.31, 0.22: 1.31, 0.3: 1.34, 0.5: 1.41, 0.7: 1.44, 0.9: 1.48, 1.0: 1.65}


@pytest.mark.parametrize(
    ("triton", "measured"),
    [(WARPS_TRITON[-1], MEASURED), (OTHER_TRITON, ALONE)],
    ids=["parts", "not"],
)
def test_the_slower_product_is_never_much_slower(choosing_with, triton, measured):
    choosing_with(triton)
    for block, curve in measured.items():
        for density, stored_ms in curve.items():
            some = problem(block, density)
            stored = sparse_seconds(some, "sm90") <= dense_seconds(some)
            taken_ms = stored_ms if stored else DENSE_MS[density]
            assert taken_ms <= 1.05 * min(stored_ms, DENSE_MS[density]), (block, density)


def test_low_blocks_are_packed_only_where_that_is_faster():
    # measured, in milliseconds: packed 0.42, 0.79, 1.45, by warps 0.48, 0.57, 0.85
    for density, packed in ((0.05, True), (0.1, False), (0.22, False)):
        low = problem((16, 16), density)
        assert (packed_seconds(low) < warp_rows_seconds(low)) == packed
        assert takes_warp_rows(low, x_transposed=False) != packed
        assert not takes_warp_rows(low, x_transposed=True)
    # 63 % of the columns at 530 TFLOP/s, packing, 15.5 work tiles for each SM, two launches
    assert packed_seconds(problem((16, 16))) * 1e3 == pytest.approx(
        692.5 / 530 + 0.134218 * (0.22 + 0.6298) / 3 + 15.5 * 0.00325 + 0.008, rel=0.02
    )
    assert not takes_warp_rows(problem((32, 32)), x_transposed=False)
    assert not takes_warp_rows(problem((16, 16), 0.0), x_transposed=False)
    # as the product reads them, blocks are 32 x 16
    assert not takes_warp_rows(problem((16, 32), dense_left=True), x_transposed=False)
    assert takes_warp_rows(problem((32, 16), dense_left=True), x_transposed=False)


def test_the_dense_twin_takes_the_cublas_rate_and_writing():
    # 8192 x 8192 at 22 %: 164 MB at 80 % of 4.3 TB/s, and two launches
    densify_ms = 164 / 4300 / 0.8 + 0.008
    assert dense_seconds(problem()) * 1e3 == pytest.approx(1099.5 / 760 + densify_ms, rel=0.02)


def test_fill_of_packed_blocks():
    assert packed_fill(1.0, 4) == 1.0
    assert packed_fill(0.0, 4) == 1.0
    assert packed_fill(0.5, 1) == 0.5 / 0.5
    assert packed_fill(1e-6, 4) == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize(
    ("arch", "impl"), [(H200, "sm90"), (H200, "triton"), (H200, "eager"), (CPU, "eager")], ids=str
)
@pytest.mark.parametrize("block", BLOCKS)
def test_more_blocks_and_more_columns_take_longer(arch, impl, block):
    densities = [0.0, 0.05, 0.22, 0.5, 0.9, 1.0]
    times = [sparse_seconds(problem(block, d, arch=arch), impl) for d in densities]
    assert times == sorted(times) and times[0] < times[2] < times[-1]
    widths = [1, 16, 17, 64, 1000, 8192]
    times = [sparse_seconds(problem(block, n=n, arch=arch), impl) for n in widths]
    assert times == sorted(times) and times[0] < times[-1]
    times = [dense_seconds(problem(block, n=n, arch=arch)) for n in widths]
    assert times == sorted(times) and times[0] < times[-1]


def test_orientation_decides_which_side_is_the_height():
    tall, flat = problem((128, 16)), problem((16, 128))
    assert sparse_seconds(tall, "sm90") < sparse_seconds(flat, "sm90")
    transposed = problem((16, 128), dense_left=True)
    assert sparse_seconds(transposed, "sm90") == sparse_seconds(tall, "sm90")


def test_portable_kernels_are_slower_and_low_blocks_slowest():
    for block in BLOCKS:
        assert sparse_seconds(problem(block), "triton") > sparse_seconds(problem(block), "sm90")
    times = [sparse_seconds(problem((b, b)), "triton") for b in (128, 64, 32, 16)]
    assert times == sorted(times)


def test_a_narrow_product_only_reads():
    # 22 % of 134 MB at 78 % of 4.3 TB/s, against writing and reading all of it
    narrow = problem(n=1)
    assert sparse_seconds(narrow, "triton") == pytest.approx(
        0.22 * 134.2e6 / (0.78 * 4.3e12) + 4e-6, rel=0.02
    )
    assert dense_seconds(narrow) > 5 * sparse_seconds(narrow, "triton")


def test_the_epilogue_costs_the_dense_product_passes_over_the_result():
    plain = dense_seconds(problem())
    with_bias = dense_seconds(problem(bias=True))
    with_all = dense_seconds(problem(bias=True, residual=True, activation="gelu"))
    assert plain < with_bias < with_all
    assert plain < dense_seconds(problem(out_dtype=torch.float32)) < with_all
    assert sparse_seconds(problem(bias=True), "sm90") == sparse_seconds(problem(), "sm90")


def test_float32_runs_at_a_fraction_of_the_rate():
    assert dense_seconds(problem(dtype=torch.float32)) > 10 * dense_seconds(problem())


def test_newer_gpus_are_faster_and_unknown_ones_are_taken_for_older():
    def dense(sm):
        return dense_seconds(problem(arch=Arch("cuda", sm, 132, 0, False)))

    assert dense(100) < dense(90) < dense(80)
    assert dense(103) == dense(100) and dense(75) == dense(80)


def test_empty_products_have_an_estimate():
    assert sparse_seconds(problem(density=0.0), "sm90") > 0
    assert sparse_seconds(problem((16, 16), density=0.0), "sm90") > 0
    assert sparse_seconds(problem(n=0), "triton") > 0 and dense_seconds(problem(n=0)) > 0
