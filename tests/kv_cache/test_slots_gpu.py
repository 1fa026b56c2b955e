"""What only a GPU can say about `kv_append` by slots: real writes, CUDA graphs, nothing that waits.

`PYTHONPATH=src python -m pytest -m gpu tests/kv_cache/test_slots_gpu.py`
"""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.cache import SlotsCall
from blackwell_sparsek.kv_cache import slots as by_slots
from blackwell_sparsek.kv_cache.append_kernel import MIN_SM_CONVERTS_FP8
from blackwell_sparsek.kv_cache.slots_kernel import launch_append_slots
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.kv_cases import assert_same_bits
from blackwell_sparsek.testing.poison import poison_
from blackwell_sparsek.testing.tolerance import assert_within_budget

from .test_slots import expected, naive_rotation

pytestmark = pytest.mark.gpu

FP8, BRAIN = torch.float8_e4m3fn, torch.bfloat16
INDICES = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
STORED = pytest.mark.parametrize("stored", [None, FP8], ids=["same", "fp8"])
POSITIONS = 100


class Batch(NamedTuple):
    """Poisoned pages and the tokens of a packed batch, every third of which is skipped."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    scales: dict[str, torch.Tensor]

    def append(self, **options):
        return bsk.kv_append(*self[:4], slot_mapping=self.slots, **self.scales, **options)

    def copy(self):
        """With copies of the caches, in the same layout."""
        return self._replace(k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())

    def written(self, k_cache, v_cache, k=None):
        """What caches on the host hold after the tokens were appended, written slot by slot."""
        exist = self.slots < self.k_cache.shape[0] * self.k_cache.shape[1]
        slots = torch.where(exist, self.slots, -1).cpu()
        scales = {name: x.cpu() for name, x in self.scales.items()}
        k = self.k.cpu() if k is None else k
        return (
            expected(k_cache, k, slots, scales.get("k_scale")),
            expected(v_cache, self.v.cpu(), slots, scales.get("v_scale")),
        )

    def check(self, caches):
        assert_same_bits(self.k_cache, caches[0])
        assert_same_bits(self.v_cache, caches[1])


def draw_slots(tokens, slots, seed):
    drawn = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:tokens]
    drawn[1::3] = -1
    return drawn


def batch(
    tokens=77, heads=8, dims=(128, 128), page_size=16, dtype=BRAIN, stored=None, hnd=False,
    index=torch.int64, factors=None,
):  # fmt: skip
    """On the GPU. Caches in fp8 have a scale for each head of keys, and one for all values."""
    pages = tokens // page_size + 3
    caches = []
    for dim in dims:
        shape = (pages, heads, page_size, dim) if hnd else (pages, page_size, heads, dim)
        cache = poison_(torch.empty(shape, dtype=stored or dtype, device="cuda"))
        caches.append(cache.transpose(1, 2) if hnd else cache)
    k, v = (
        normal(tokens, heads, dim, seed=i, dtype=dtype, device="cuda", scale=3.0)
        for i, dim in enumerate(dims)
    )
    scales = {}
    if stored == FP8:
        scales["k_scale"] = 0.02 * torch.arange(1.0, heads + 1, device="cuda")
        scales["v_scale"] = torch.tensor(0.3, device="cuda")
    slots = draw_slots(tokens, pages * page_size, seed=3).to("cuda", index)
    return Batch(*caches, k, v, slots, scales)


def rotary(half, interleaved=False, dtype=torch.float32):
    angles = torch.outer(torch.arange(float(POSITIONS)), 10000.0 ** -torch.linspace(0, 1, half))
    cos, sin = (x.to("cuda", dtype) for x in (angles.cos(), angles.sin()))
    return bsk.Rotary(cos, sin, interleaved)


def draw_positions(tokens, seed, index=torch.int32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(POSITIONS, (tokens,), generator=generator).to("cuda", index)


def rotations(x, rotation, positions):
    """Rows of x rotated in fp64, and in plain PyTorch at the dtype of x, on the host."""
    how = (rotation.cos.cpu(), rotation.sin.cpu(), positions.cpu(), rotation.interleaved)
    x = x.cpu()
    return naive_rotation(x, *how), naive_rotation(x, *how, dtype=x.dtype)


@pytest.mark.parametrize("options", [
    {}, {"hnd": True}, {"tokens": 1, "heads": 1}, {"dims": (72, 300), "page_size": 48},
    {"dtype": torch.float16, "dims": (64, 80)}, {"dtype": torch.float32, "page_size": 1},
    {"stored": FP8}, {"stored": FP8, "hnd": True, "dims": (192, 128)},
    {"stored": FP8, "dtype": torch.float32, "heads": 3, "dims": (40, 300)},
], ids=str)  # fmt: skip
@INDICES
def test_tokens_go_to_their_slots(options, index):
    given = batch(**options, index=index)
    caches = given.written(given.k_cache.cpu(), given.v_cache.cpu())
    assert given.append(impl="triton") is None
    given.check(caches)


@pytest.mark.parametrize("converts", [False, True])
def test_fp8_by_instruction_and_by_arithmetic(converts):
    """Values beyond the largest, infinities and NaN among them."""
    given = batch(heads=2, stored=FP8)
    call = SlotsCall(*given[:5], **given.scales)
    if converts and call.problem.arch.sm < MIN_SM_CONVERTS_FP8:
        pytest.skip("needs an instruction that converts to e4m3")
    edges = torch.tensor([447.9, 464, 1e9, torch.inf, -torch.inf, torch.nan, -0.0, 1e-9])
    given.k[..., :8], given.v[..., -8:] = edges.cuda(), -edges.cuda()
    spread = 10.0 ** torch.randint(-4, 4, (120,), device="cuda")
    given.k[..., 8:].mul_(spread)
    plain = given.copy()
    plain.append(impl="eager")
    launch_append_slots(call, converts_fp8=converts)
    given.check(plain[:2])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half, dtype", [(64, BRAIN), (5, torch.float16), (64, torch.float32)])
@INDICES
def test_rotary(half, dtype, interleaved, index):
    """All of a head, and a part of odd size; values are not rotated."""
    given = batch(tokens=23, heads=2, dtype=dtype, index=index)
    values = given.written(given.k_cache.cpu(), given.v_cache.cpu())[1]
    rotation, positions = rotary(half, interleaved, dtype), draw_positions(23, 4, index)
    q = normal(23, 6, 128, seed=5, dtype=dtype, device="cuda")
    got = given.append(rotary=rotation, positions=positions, q=q, impl="triton")
    exact, plain = rotations(q, rotation, positions)
    assert_within_budget(got, exact, plain, what="q")
    assert got[..., 2 * half :].equal(q[..., 2 * half :])
    written = (given.slots >= 0).cpu()
    stored = given.k_cache.cpu().flatten(0, 1)
    exact, plain = rotations(given.k, rotation, positions)
    at = given.slots.cpu()[written].long()
    assert_within_budget(stored[at], exact[written], plain[written], what="k")
    # the other slots still hold what they held
    assert stored.isnan().flatten(1).all(-1).sum() == len(stored) - written.sum()
    assert_same_bits(given.v_cache, values)


def test_rotated_keys_of_fp8_caches():
    """As numbers: the host may round a key the other way before it is scaled."""
    given = batch(tokens=23, heads=4, stored=FP8)
    rotation, positions = rotary(64), draw_positions(23, 4)
    exact, plain = rotations(given.k, rotation, positions)
    caches = given.written(given.k_cache.cpu(), given.v_cache.cpu(), k=plain)
    given.append(rotary=rotation, positions=positions, impl="triton")
    written = (given.slots >= 0).cpu()
    at, factor = given.slots.cpu()[written].long(), given.scales["k_scale"].cpu().view(-1, 1)
    found, same = (x.cpu().float().flatten(0, 1)[at] * factor for x in (given.k_cache, caches[0]))
    # not what is beyond 448: that is lost however well it was rotated
    limits = exact[written].clamp(-448 * factor.double(), 448 * factor.double())
    assert_within_budget(found, limits, same)
    assert_same_bits(given.v_cache, caches[1])


@pytest.mark.parametrize("wrong", [-1, -(2**31), 2**31 - 1, 2**40, -(2**63), "pages"])
def test_slots_that_do_not_exist_are_not_written(wrong):
    """The caches lie between canaries."""
    given = batch(heads=4)
    canaries = [torch.full((x.numel() * 3,), torch.nan, device="cuda").to(x) for x in given[:2]]
    caches = [
        c[x.numel() : 2 * x.numel()].view_as(x) for c, x in zip(canaries, given[:2], strict=True)
    ]
    slots = caches[0].shape[0] * caches[0].shape[1]
    wrong = slots if wrong == "pages" else wrong
    for index in (torch.int64, torch.int32):
        if -(2**31) <= wrong < 2**31:
            mapping = torch.full_like(given.slots, wrong, dtype=index)
            bsk.kv_append(*caches, *given[2:4], slot_mapping=mapping, impl="triton")
            assert all(c.isnan().all() for c in canaries)
    mapping = torch.full_like(given.slots, wrong)
    mapping[5] = slots - 1
    bsk.kv_append(*caches, *given[2:4], slot_mapping=mapping, impl="triton")
    for cache, new, around in zip(caches, given[2:4], canaries, strict=True):
        assert cache[-1, -1].equal(new[5])
        assert around.isfinite().sum() == new[5].numel()


@INDICES
@STORED
def test_a_graph_follows_the_slots(stored, index):
    """Captured once; tokens and slots change under it, and -1 skips a token."""
    given = batch(tokens=33, stored=stored, index=index)
    given.append()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given.append()
    caches = given.k_cache.cpu(), given.v_cache.cpu()
    slots = given.k_cache.shape[0] * given.k_cache.shape[1]
    drawn = [draw_slots(33, slots, seed) for seed in range(20)]
    drawn[5].fill_(-1)
    # past the last page
    drawn[9][2::3] += slots
    for step in drawn:
        given.slots.copy_(step)
        given.k.normal_()
        given.v.normal_()
        graph.replay()
        caches = given.written(*caches)
    given.check(caches)


@INDICES
def test_a_graph_follows_the_positions(index):
    """Its rotated queries too, which lie in the memory of the graph."""
    given = batch(tokens=33, heads=2, index=index)
    rotation, positions = rotary(32), draw_positions(33, 0, index)
    q = normal(33, 4, 128, seed=5, dtype=BRAIN, device="cuda")
    how = {"rotary": rotation, "positions": positions, "q": q}
    given.append(**how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = given.append(**how)
    slots = given.k_cache.shape[0] * given.k_cache.shape[1]
    for seed in range(10):
        given.slots.copy_(draw_slots(33, slots, seed))
        positions.copy_(draw_positions(33, seed))
        for x in (given.k, given.v, q):
            x.normal_()
        now = given.copy()
        expected_out = now.append(**how)
        graph.replay()
        assert out.equal(expected_out)
        given.check(now[:2])
    exact, plain = rotations(q, rotation, positions)
    assert_within_budget(out, exact, plain)


@INDICES
@STORED
def test_repeated_calls_take_recorded_launches(stored, index, monkeypatch):
    monkeypatch.setattr(by_slots, "_RECORDED", {})
    given = batch(tokens=33, stored=stored, index=index)
    slots = given.k_cache.shape[0] * given.k_cache.shape[1]
    caches = given.k_cache.cpu(), given.v_cache.cpu()
    for seed in range(6):
        # each with tensors of its own
        new = draw_slots(33, slots, seed).to("cuda", index)
        given = given._replace(slots=new, k=given.k.flip(0), v=given.v.flip(1))
        given.append()
        caches = given.written(*caches)
    assert [x is not None for x in by_slots._RECORDED.values()] == [True]
    given.check(caches)


def test_repeated_rotations_take_recorded_launches(monkeypatch):
    """Each time into new queries."""
    monkeypatch.setattr(by_slots, "_RECORDED", {})
    given = batch(tokens=33, heads=2)
    made = []
    for seed in range(6):
        q = normal(33, 4, 128, seed=seed, dtype=BRAIN, device="cuda")
        how = {"rotary": rotary(64), "positions": draw_positions(33, seed), "q": q}
        made.append((given.append(**how), how))
    assert [x is not None for x in by_slots._RECORDED.values()] == [True]
    for out, how in made:
        exact, plain = rotations(how["q"], how["rotary"], how["positions"])
        assert_within_budget(out, exact, plain)


@pytest.mark.parametrize("impl", ["auto", "triton", "eager"])
@INDICES
@STORED
def test_nothing_waits_for_the_device(stored, index, impl):
    """Neither in a full call nor in the recorded one or a repeated one that follow it."""
    given = batch(stored=stored, index=index)
    q = normal(77, 16, 128, seed=5, dtype=BRAIN, device="cuda")
    how = {"rotary": rotary(64), "positions": draw_positions(77, 0, index), "q": q}
    for options in ({}, how):
        given.append(**options, impl=impl)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                given.append(**options, impl=impl)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_more_than_two_to_the_31_elements():
    """The first slots and the last ones; the cache takes 2 GiB."""
    k_cache = torch.zeros(2**31 // (16 * 64) + 1, 16, 1, 64, dtype=FP8, device="cuda")
    v_cache, last = torch.zeros_like(k_cache), k_cache.shape[0] * 16 - 1
    k, v = normal(2, 4, 1, 64, seed=1, dtype=BRAIN, device="cuda")
    slots = torch.tensor([7, last, -1, last - 16], device="cuda")
    bsk.kv_append(k_cache, v_cache, k, v, slot_mapping=slots, impl="triton")
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert_same_bits(cache[0, 7], new[0].float().to(FP8))
        assert_same_bits(cache[-1, -1], new[1].float().to(FP8))
        assert_same_bits(cache[-2, -1], new[3].float().to(FP8))
        assert cache[0].view(torch.uint8).count_nonzero() <= 64
        assert cache[-1].view(torch.uint8).count_nonzero() <= 64
