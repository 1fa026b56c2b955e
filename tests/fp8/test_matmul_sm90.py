"""Hopper's products in fp8: what they refuse, what fits, and results on a GPU."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.launch.descriptors import SMEM_BYTES
from blackwell_sparsek.matmul import resize
from blackwell_sparsek.matmul.sm90 import fp8_launch
from blackwell_sparsek.matmul.sm90.tuning import (
    narrow_fp8_config,
    spmm_fp8_sm90_config,
    spmm_fp8_sm90_unsupported,
)
from blackwell_sparsek.testing import poison
from blackwell_sparsek.testing.cases.fp8 import product_problem
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

from ..testing.child import printed
from .test_matmul import activations, dense_product, matrix, scales_beside_nan

SHAPES = [((280, 528), (128, 128)), ((200, 336), (64, 64)), ((136, 208), (32, 32))]
SHAPES += [((528, 784), (256, 256)), ((264, 400), (128, 32)), ((104, 656), (32, 128))]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"transposed": False}, "contiguous channels"),
        ({"block_shape": (128, 48)}, "height 48 is not a multiple of 32"),
        ({"block_shape": (96, 128)}, "width 96 is neither 32, 64 nor"),
        ({"out_dtype": torch.float64}, "no output in torch.float64"),
        ({"tma": False}, "multiples of 16 bytes"),
        ({"nnz_blocks": 0}, "at least one block"),
    ],
)
def test_what_they_refuse(changes, text):
    taken = product_problem((128, 128), 64, 90)
    assert spmm_fp8_sm90_unsupported(taken) is None
    assert text in spmm_fp8_sm90_unsupported(replace(taken, **changes))


def test_other_gpus_are_refused():
    assert "needs sm_90" in spmm_fp8_sm90_unsupported(product_problem((128, 128), 64, 100))


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32), (256, 256), (96, 64)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_tiles_fit_into_shared_memory(block, out_dtype):
    for tokens in (65, 512, 8192):
        problem = replace(product_problem(block, tokens, 90), out_dtype=out_dtype)
        config = spmm_fp8_sm90_config(problem)
        ring = config.STAGES * config.TILE_K * (config.TILE_M + config.tile_n)
        out = 2 * 64 * config.out_chunk * out_dtype.itemsize
        assert config.STAGES >= 3 and ring + out <= SMEM_BYTES
        # a step has one scale of x and one block
        assert 128 % config.TILE_K == 0 and config.BLOCK_W % config.TILE_K == 0
        assert narrow_fp8_config(problem) is None
    for tokens in (1, 16, 64):
        problem = replace(product_problem(block, tokens, 90), out_dtype=out_dtype)
        few = narrow_fp8_config(problem)
        ring = few.STAGES * few.STAGE_BLOCKS * few.TILE_K * (few.TILE_M + few.x_rows)
        assert few.STAGES >= 4 and few.ITEM_BYTES == 1 and ring <= SMEM_BYTES


def test_many_tokens_take_larger_tiles():
    assert spmm_fp8_sm90_config(product_problem((128, 128), 8192, 90)).tile_n == 256
    assert spmm_fp8_sm90_config(product_problem((128, 128), 256, 90)).tile_n == 128


def check(x, w, out_dtype=torch.bfloat16, **options):
    """Within the budget of plain PyTorch in fp32, rounded to the same result."""
    with poison.poisoned_empty():
        out = bsk.matmul(x, w, out_dtype=out_dtype, impl="sm90", **options)
    exact = bsk.matmul(x, w, out_dtype=torch.float32, impl="reference", **options)
    assert_within_budget(out, exact.double(), dense_product(x, w, **options).to(out_dtype))
    return out


@pytest.mark.sm90
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 129, 257, 1000])
@pytest.mark.parametrize(("shape", "block"), SHAPES)
def test_products_keep_the_budget(shape, block, tokens):
    w = matrix(shape, block, "cuda", seed=tokens)
    x = activations(tokens, shape[1], device="cuda")
    check(x, w.T)
    options = {
        "bias": normal(shape[0], seed=3, dtype=torch.float16, device="cuda"),
        "residual": normal(tokens, shape[0], seed=4, dtype=torch.float16, device="cuda"),
        "activation": ("relu", "gelu", "silu")[tokens % 3],
    }
    check(x, w.T, torch.float16, **options)


@pytest.mark.sm90
@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (32, 64)])
def test_programs_with_several_tiles_of_different_lengths(block, tokens):
    rows = torch.arange(600)[:, None] % 5 + 1
    keep = torch.arange(6)[None, :] < rows
    dense = normal(600 * block[0], 6 * block[1], seed=8, dtype=torch.bfloat16, device="cuda")
    w = bsk.BSRMatrix.from_mask(dense, keep.cuda()).to_fp8()
    check(activations(tokens, w.shape[1], device="cuda"), w.T)


CASE = """
from blackwell_sparsek.testing.cases import fp8 as cases
case, = (case for case in cases.hopper_products() if case.name.endswith(sys.argv[1]))
"""


@pytest.mark.parametrize("name", ["narrow_fp8_sm90/x@A.T-128x128-n16"])
def test_every_role_counts_the_blocks_of_each_tile(name):
    """Triton 3.6 and 3.7 drop a number that only bounds of inner loops read."""
    report = 'print(compiled.asm["ttgir"].count("tt.load %next_blocks"), end=" ")'
    found, _ = printed(CASE, report, name).split(" ", 1)
    assert int(found) == len(("producer", "loader of scales", "consumer"))


@pytest.mark.sm90
@pytest.mark.parametrize("tokens", [16, 300])
def test_steps_beyond_the_channels_read_no_scale(tokens):
    w = matrix((512, 528), (256, 256), "cuda")
    x = activations(tokens, 528, device="cuda")
    assert torch.equal(check(scales_beside_nan(x), w.T), check(x, w.T))


@pytest.mark.sm90
@pytest.mark.parametrize("tokens", [16, 300])
def test_batches_and_repeated_calls(tokens):
    w = matrix((256, 384), (128, 128), "cuda")
    x = activations(3, 2, tokens, 384, device="cuda")
    apart = x._replace(data=x.data.transpose(0, 1), descale=x.descale.transpose(0, 1))
    first = check(x, w.T)
    assert torch.equal(check(apart, w.T), first.transpose(0, 1))
    for _ in range(5):
        assert torch.equal(bsk.matmul(x, w.T, impl="sm90"), first)


@pytest.mark.sm90
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_replayed_calls_read_their_own_operands(tokens, monkeypatch):
    # the second call is recorded, also of many tokens
    monkeypatch.setattr(resize, "RESIZED_CALLS", 1)
    w = matrix((256, 384), (128, 128), "cuda")
    bias = normal(256, seed=7, dtype=torch.bfloat16, device="cuda")
    for seed in range(4):
        x = activations(tokens, 384, device="cuda", seed=seed)
        check(x, w.T, bias=bias)
        w.stored_descale.mul_(1.5)
        bias = bias + 1
    recorded = [value for value in w.pattern.launches.values() if value is not None]
    assert recorded


@pytest.mark.sm90
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (32, 32)], ids=str)
def test_tokens_never_seen(block):
    """Launches of earlier products, with new numbers of tokens, scales and addresses."""
    w = matrix((512, 384), block, "cuda")
    bias = normal(512, seed=7, dtype=torch.bfloat16, device="cuda")
    for seed, lead in enumerate([(300,), (301,), (1, 299), (1, 1000), (2, 130), (77,), (900,)]):
        x = activations(*lead, 384, device="cuda", seed=seed)
        check(x, w.T, bias=bias)
        w.stored_descale.mul_(1.5)
        bias = bias + 1


@pytest.mark.sm90
def test_rows_that_are_cut():
    w = matrix((384, 128 * 60), (128, 128), "cuda")
    x = activations(100, w.shape[1], device="cuda")
    with mock.patch.object(fp8_launch, "spmm_chunk", lambda *args: 4):
        bias = normal(384, seed=5, device="cuda")
        check(x, w.T, bias=bias, activation="relu")


@pytest.mark.sm90
@pytest.mark.parametrize("tokens", [16, 300])
def test_in_a_graph(tokens):
    w = matrix((512, 512), (128, 128), "cuda").T
    x = normal(tokens, 512, seed=6, dtype=torch.bfloat16, device="cuda")
    expected = bsk.fp8.matmul(x, w, impl="sm90")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out = bsk.fp8.matmul(x, w, impl="sm90")
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
