"""Both implementations of append against the rule slot by slot; interpreted and compiled."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.calls.cache import AppendCall
from blackwell_sparsek.kv_cache.append import append_eager
from blackwell_sparsek.kv_cache.append_kernel import launch_kv_append
from blackwell_sparsek.testing import guard, layouts
from blackwell_sparsek.testing.kv_cases import append_case, appended, assert_same_bits

FP8 = torch.float8_e4m3fn
BOTH = pytest.mark.parametrize("append", [launch_kv_append, append_eager], ids=["triton", "eager"])
PAGED = pytest.mark.parametrize("page_size", [None, 1, 16, 20])


def check(append, case):
    expected = appended(case)
    append(AppendCall(*case))
    assert_same_bits(case.k_cache, expected[0])
    assert_same_bits(case.v_cache, expected[1])


@BOTH
@PAGED
@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_writes_behind_the_lengths(append, page_size, tokens, dtype, device):
    check(append, append_case([0, 15, 40], tokens, page_size=page_size, dtype=dtype, device=device))


@BOTH
@PAGED
@pytest.mark.parametrize("dims", [(1, 1), (15, 40), (72, 64), (300, 16)])
@pytest.mark.parametrize("heads", [1, 3])
def test_head_dims(append, page_size, dims, heads, device):
    check(
        append, append_case([3, 0], 5, page_size=page_size, dims=dims, heads=heads, device=device)
    )


@BOTH
@PAGED
def test_counts_leave_the_rest_alone(append, page_size, device):
    counts = [0, 5, 2, 1]
    case = append_case([4, 0, 16, 33], 5, counts=counts, page_size=page_size, device=device)
    check(append, case)


@BOTH
@PAGED
@pytest.mark.parametrize(
    "lengths", [[40, 0], [38, 37], [2**31 - 1, 3], [-1, 0], [-(2**31), -3], [40, 2**31 - 2]]
)
def test_slots_that_do_not_exist_are_not_written(append, page_size, lengths, device):
    case = append_case([0, 0], 4, capacity=40, page_size=page_size, device=device)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    check(append, case._replace(cache_seqlens=lengths))


@BOTH
@pytest.mark.parametrize("wrong", [-1, -(2**31), 2**31 - 1, "pages"])
def test_pages_that_do_not_exist_are_not_written(append, wrong, device):
    case = append_case([0, 3, 17], 20, page_size=8, device=device)
    case.page_table[1, 0] = case.page_table[2, 3] = (
        case.k_cache.shape[0] if wrong == "pages" else wrong
    )
    check(append, case)


@BOTH
def test_no_slot_at_all(append, device):
    case = append_case([5, 9], 3, page_size=8, device=device)
    check(append, case._replace(page_table=torch.full_like(case.page_table, -1)))
    check(append, case._replace(page_table=case.page_table[:, :0]))
    check(append, append_case([0, 0], 0, capacity=4, device=device))
    empty = append_case([0, 0], 2, capacity=4, device=device)
    none = {"k_cache": empty.k_cache[:, :, :0], "v_cache": empty.v_cache[:, :, :0]}
    check(append, empty._replace(**none))


@BOTH
@PAGED
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scales", [None, (0.03, 0.7)])
def test_fp8(append, page_size, dtype, scales, device):
    options = {"page_size": page_size, "dims": (64, 48), "dtype": dtype, "stored": FP8}
    check(append, append_case([0, 7], 33, scales=scales, device=device, **options))


@BOTH
def test_fp8_rounds_to_even_saturates_and_keeps_nan(append, device):
    exact = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    exact = exact[~exact.isnan()]
    between = (exact.sort().values[1:] + exact.sort().values[:-1]) / 2
    special = torch.tensor(
        [447.9, 448, 464, 465, 1e9, torch.inf, -torch.inf, torch.nan, -0.0, 1e-9]
    )
    x = torch.cat((exact, between, between * 1.0001, special, -special)).view(1, 1, 1, -1)
    case = append_case([0], 1, heads=1, dims=(x.shape[-1],) * 2, stored=FP8, device=device)
    case = case._replace(k=x.to(device), v=-x.to(device))
    check(append, case)
    stored = case.k_cache.float().flatten().cpu()
    assert torch.equal(stored[: len(exact)], exact)
    assert stored.isnan().sum() == 2 and stored[~stored.isnan()].abs().max() == 448


@BOTH
def test_one_scale_for_all_heads(append, device):
    case = append_case([2, 0], 3, stored=FP8, device=device)
    scale = torch.tensor(0.25, device=device)
    expanded = case._replace(k_scale=scale.expand(2), v_scale=scale.expand(2))
    expected = appended(expanded)
    append(AppendCall(*case._replace(k_scale=scale, v_scale=scale.view(1))))
    assert_same_bits(case.k_cache, expected[0])
    assert_same_bits(case.v_cache, expected[1])


@BOTH
@PAGED
@pytest.mark.parametrize("start", range(len(layouts.KINDS)))
def test_every_tensor_with_strides_of_its_own(append, page_size, start, device):
    case = append_case([5, 0], 19, page_size=page_size, heads=3, dims=(24, 20), device=device)
    tensors = layouts.different_layouts(*case[:4], start=start)
    check(append, case._replace(**dict(zip(case._fields, tensors, strict=False))))
    for cache in tensors[:2]:
        layouts.assert_gaps_untouched(cache)


def test_keys_and_values_side_by_side_in_one_page(device):
    """The layout of vLLM: [pages, Hkv, page_size, 2 * D], seen through transpose and split."""
    case = append_case([5, 0], 19, page_size=16, heads=3, dims=(24, 24), device=device)
    both = torch.full((case.k_cache.shape[0], 3, 16, 48), torch.nan, device=device)
    k_cache, v_cache = both.transpose(1, 2).split(24, -1)
    check(launch_kv_append, case._replace(k_cache=k_cache, v_cache=v_cache))


@PAGED
@pytest.mark.parametrize("side", ["left", "right"])
def test_touches_nothing_outside(page_size, side, interpreted):
    case = append_case([0, 17], 4, capacity=18, page_size=page_size, dims=(15, 40), counts=[4, 3])
    tensors = [x if x is None else guard.guarded(x, side) for x in case]
    check(launch_kv_append, type(case)(*tensors))


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("page_size", [None, 8])
def test_offsets_past_two_to_the_31(which, page_size, interpreted):
    case = append_case([0, 5, 9], 3, page_size=page_size, spare_pages=0)
    small = case[which]
    step = 2**31 // (small.shape[0] - 1) + 8
    far = guard.huge_zeros(small.shape, small.dtype, (step, *small.stride()[1:]))
    far.copy_(small)
    check(launch_kv_append, case._replace(**{case._fields[which]: far}))


@pytest.mark.parametrize("page_size", [None, 16])
def test_lengths_and_sizes_compile_nothing_new(page_size, run_recorder):
    """In the process of `run_recorder` nothing is interpreted; variants are counted there."""
    script = f"""
import blackwell_sparsek.kv_cache.append_kernel as append
from blackwell_sparsek.calls.cache import AppendCall
from blackwell_sparsek.testing.kv_cases import append_case

append._kv_append_kernel = Recorder(append._kv_append_kernel)
calls = [
    (lambda case=append_case([n, 2 * n], t, capacity=s, page_size={page_size}, heads=h,
                             counts=[1, 1]): append.launch_kv_append(AppendCall(*case)))
    for n in (0, 1, 16) for t in (2, 3, 16) for s in (64, 70, 160) for h in (2, 8)
]
print(json.dumps(variants(calls)))
"""
    assert run_recorder(script) == 1
