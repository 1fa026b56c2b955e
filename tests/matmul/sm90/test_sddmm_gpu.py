"""Hopper's sampled product against the fp64 oracle: orientations, blocks, edges, batches."""

import random

import pytest
import torch

from blackwell_sparsek.core.errors import Unsupported
from blackwell_sparsek.matmul.api import matmul, sddmm
from blackwell_sparsek.sparse.matrix import BSRMatrix, BSRPattern
from blackwell_sparsek.testing.bsr import assert_sddmm, random_bsr
from blackwell_sparsek.testing.inputs import integers, normal
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.tolerance import assert_within_budget

pytestmark = pytest.mark.sm90

SIDES = (16, 32, 64, 128, 256)
BLOCKS = [(h, w) for h in (*SIDES, 192) for w in SIDES]


def _laid_out(x, transposed):
    """The same values with contiguous columns where `transposed`."""
    return x.mT.contiguous().mT if transposed else x.contiguous()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_whole_numbers_are_exact(block, layout):
    bh, bw = block
    shape = (4 * bh, 7 * bw)
    pattern = random_bsr(shape, block, seed=1, density=0.4, dtype=torch.float16, device="cuda")
    a = integers(shape[0], 72, seed=2, dtype=torch.float16).cuda()
    b = integers(72, shape[1], seed=3, dtype=torch.float16).cuda()
    a, b = _laid_out(a, layout[0] == "t"), _laid_out(b, layout[1] == "t")
    with poisoned_empty():
        out = sddmm(a, b, pattern, impl="sm90").data
    exact = sddmm(a.double(), b.double(), pattern, impl="reference").data
    assert torch.equal(out.double(), exact.to(torch.float16).double())


@pytest.mark.parametrize("seed", range(120))
def test_random_sampled_products_match_the_oracle(seed):
    rng = random.Random(seed)
    dtype = rng.choice([torch.float16, torch.bfloat16])
    block = rng.choice(BLOCKS)
    shape = tuple(rng.choice([1, 3, 5]) * side + rng.choice([0, 0, 8]) for side in block)
    k = 8 * rng.choice([1, 2, 5, 33, 64, 200])
    batch = rng.choice([(), (), (3,), (2, 2)])
    density = rng.choice([0.0, 0.2, 0.6, 1.0])
    pattern = random_bsr(shape, block, seed=seed, density=density, dtype=dtype, device="cuda")
    a = normal(*batch, shape[0], k, seed=seed + 1, dtype=dtype).cuda()
    b = normal(*batch, k, shape[1], seed=seed + 2, dtype=dtype).cuda()
    a, b = _laid_out(a, rng.random() < 0.5), _laid_out(b, rng.random() < 0.5)
    assert_sddmm(a, b, pattern, impl="sm90")


@pytest.mark.parametrize("k", [1, 8, 31, 32, 33, 63, 65, 129])
def test_awkward_lengths_of_the_sum(k):
    pattern = random_bsr((256, 512), (64, 64), seed=5, dtype=torch.bfloat16, device="cuda")
    a = normal(k, 256, seed=6, dtype=torch.bfloat16).cuda().mT
    b = normal(k, 512, seed=7, dtype=torch.bfloat16).cuda()
    assert_sddmm(a, b, pattern, impl="sm90")


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (16, 16)], ids=str)
def test_long_sums_of_few_blocks_are_shared_and_repeatable(block):
    pattern = random_bsr((256, 256), block, seed=8, dtype=torch.bfloat16, device="cuda")
    a = normal(256, 16384, seed=9, dtype=torch.bfloat16).cuda()
    b = normal(16384, 256, seed=10, dtype=torch.bfloat16).cuda()
    first = assert_sddmm(a, b, pattern, impl="sm90").data
    for _ in range(5):
        assert torch.equal(sddmm(a, b, pattern, impl="sm90").data, first)


def test_more_tiles_than_programs_and_a_captured_graph():
    pattern = random_bsr((8192, 4096), (64, 64), seed=11, dtype=torch.bfloat16, device="cuda")
    a = normal(256, 8192, seed=12, dtype=torch.bfloat16).cuda().mT
    b = normal(256, 4096, seed=13, dtype=torch.bfloat16).cuda()
    expected = assert_sddmm(a, b, pattern, impl="sm90").data
    known = pattern.pattern
    lists = (known.indptr.clone(), known.indices.clone())
    fresh = BSRPattern._from_parts(*lists, known.shape, known.block_shape)
    fresh.tensors()  # the plan is not made yet, so the graph takes one of the largest size
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sddmm(a, b, fresh, impl="sm90").data
    captured.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    assert torch.equal(captured, expected)


def test_sums_in_float32():
    pattern = random_bsr((512, 512), (128, 128), seed=14, dtype=torch.bfloat16, device="cuda")
    a = integers(512, 4096, seed=15, dtype=torch.bfloat16).cuda()
    b = integers(4096, 512, seed=16, dtype=torch.bfloat16).cuda()
    out = sddmm(a, b, pattern, out_dtype=torch.float32, impl="sm90").data
    assert out.dtype == torch.float32
    exact = sddmm(a.double(), b.double(), pattern, impl="reference").data
    assert torch.equal(out.double(), exact)


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32)], ids=str)
@pytest.mark.parametrize("left", [False, True])
def test_gradients_of_a_product(block, left):
    """dx and dw of both orders, from whole numbers: exact."""
    w = random_bsr((512, 768), block, seed=17, dtype=torch.float16, device="cuda", whole=True)
    shape = (264, 768) if left else (768, 264)
    x = integers(*shape, seed=18, dtype=torch.float16).cuda()
    grads = {}
    for impl, dtype in (("auto", torch.float16), ("reference", torch.float64)):
        storage = w.storage.to(dtype).detach().requires_grad_()
        matrix = BSRMatrix._from_parts(w.pattern, storage)
        operand = x.to(dtype).requires_grad_()
        y = matmul(operand, matrix.T, impl=impl) if left else matmul(matrix, operand, impl=impl)
        dy = integers(*y.shape, seed=19, dtype=dtype).cuda()
        grads[impl] = torch.autograd.grad(y, (storage, operand), dy)
    for got, exact in zip(*grads.values(), strict=True):
        assert torch.equal(got.double(), exact.to(torch.float16).double())


def test_what_the_kernel_does_not_take_is_refused():
    pattern = random_bsr((96, 96), (48, 48), seed=20, dtype=torch.float16, device="cuda")
    a, b = (normal(96, 96, seed=i, dtype=torch.float16).cuda() for i in (21, 22))
    with pytest.raises(Unsupported, match="block height 48"):
        sddmm(a, b, pattern, impl="sm90")
    wide = random_bsr((128, 128), (64, 64), seed=23, dtype=torch.float16, device="cuda")
    a = normal(128, 99, seed=24, dtype=torch.float16).cuda()
    b = normal(99, 128, seed=25, dtype=torch.float16).cuda()
    with pytest.raises(Unsupported, match="multiples of 16 bytes"):
        sddmm(a, b, wide, impl="sm90")


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32)], ids=str)
def test_training_steps_replay_what_they_recorded(block, activation):
    """The third step replays all launches of the first two, with other tensors."""
    w = random_bsr((512, 768), block, seed=26, density=0.2, dtype=torch.bfloat16, device="cuda")
    made = {}
    ways = {"auto": torch.bfloat16, "eager": torch.bfloat16, "reference": torch.float64}
    for impl, dtype in ways.items():
        for step in range(4):
            storage = (w.storage * (step + 1)).to(dtype).detach().requires_grad_()
            matrix = BSRMatrix._from_parts(w.pattern, storage)
            x, bias, dy = (
                normal(*shape, seed=seed, dtype=torch.bfloat16).to("cuda", dtype)
                for shape, seed in (
                    ((1024, 768), 27 + step),
                    ((512,), 31),
                    ((1024, 512), 35 + step),
                )
            )
            inputs = (storage, x.requires_grad_(), bias.requires_grad_())
            y = matmul(x, matrix.T, bias=bias, activation=activation, impl=impl)
            made[impl, step] = (y, *torch.autograd.grad(y, inputs, dy))
    kinds = {options[0] for (options, *_), value in w.pattern.launches.items() if value}
    assert {"gradient of values", "gradient of epilogue"} <= kinds
    for step in range(4):
        results = (made[impl, step] for impl in ("auto", "reference", "eager"))
        for number, (got, exact, plain) in enumerate(zip(*results, strict=True)):
            assert_within_budget(got, exact, plain, what=f"result {number} of step {step}")
