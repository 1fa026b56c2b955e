"""What the Hopper forward is launched with: descriptors, grid, and how many variants compile.

In a process that does not interpret kernels; nothing is compiled or run.
"""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.attention.sm90.forward_plan import tma_strides

SCRIPT = """
from blackwell_sparsek.masks.order import longest_first
from blackwell_sparsek.attention.sm90 import forward_plan, launch as fwd_sm90_launch
from blackwell_sparsek.attention.sm90.config import make_forward_config as make_config

forward_plan._attn_fwd_sm90_kernel = Recorder(forward_plan._attn_fwd_sm90_kernel)


def call(sq=64, sk=64, batch=2, heads=4, kv_heads=2, dim=64, bshd=False, mask=None, **options):
    q, k, v = inputs(sq, sk, batch, heads, kv_heads, dim, bshd)
    spec = AttnSpec(**{"scale": 0.125, **options}, block_mask=mask)
    order = None if mask is None else longest_first(mask, batch, heads, EVERYTHING, 2)
    config = make_config(2 if mask is None else 1, 64 if dim <= 64 else 128, 64,
                         None if mask is None else mask.block_size[1])
    fwd_sm90_launch.launch_attn_fwd_sm90(
        AttentionCall(q, k, v, spec), empty_out(q, dim), empty_lse(q), order, 2, config)


def packed(lengths=((64, 64),), heads=4, kv_heads=2, dim=64, fused=False, mask=None, **options):
    tq, tk = (sum(x) for x in zip(*lengths))
    max_q, max_k = (max(x) for x in zip(*lengths))
    q, k, v = (torch.empty(t, h, dim, dtype=torch.bfloat16)
               for t, h in ((tq, heads), (tk, kv_heads), (tk, kv_heads)))
    if fused:
        q, k, v = torch.empty(tq, 3 * heads, dim, dtype=torch.bfloat16).split(heads, 1)
    cu = [torch.tensor([0, *x], dtype=torch.int32).cumsum(0).to(torch.int32) for x in zip(*lengths)]
    spec = AttnSpec(**{"scale": 0.125, **options}, block_mask=mask, max_q=max_q, max_k=max_k,
                    cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
    config = make_config(2 if mask is None else 1, 64, 64,
                         None if mask is None else mask.block_size[1], True)
    fwd_sm90_launch.launch_attn_fwd_sm90(
        AttentionCall(q, k, v, spec), empty_out(q, dim), empty_lse(q), None, 2, config)


counts = {
    "packed lengths": variants([lambda a=a, b=b: packed([(a, b), (0, 5), (7, 0)])
                                for a in LENGTHS for b in LENGTHS]),
    "packed batch and heads": variants([lambda b=b, h=h: packed([(64, 64)] * b, h, 1)
                                        for b in (1, 2, 16) for h in (1, 3, 16)]),
    "packed layouts": variants([lambda x=x: packed(kv_heads=4, fused=x) for x in (False, True)]),
    "packed bands": variants([lambda b=b: packed(band=b) for b in BANDS]),
    "lengths": variants([lambda a=a, b=b: call(a, b) for a in LENGTHS for b in LENGTHS]),
    "layouts": variants([lambda x=x: call(bshd=x) for x in (False, True)]),
    "batch and heads": variants([lambda b=b, h=h: call(batch=b, heads=h, kv_heads=1)
                                 for b in (1, 2, 16) for h in (1, 3, 16)]),
    "head dimensions": variants([lambda d=d: call(dim=d) for d in (8, 16, 40, 64)]),
    "bands": variants([lambda b=b: call(band=b) for b in BANDS]),
    "scales": variants([lambda s=s: call(scale=s) for s in (1.0, 0.5, 16.0)]),
    "softcaps": variants([lambda s=s: call(softcap=s) for s in (1.0, 16.0, 30.0)]),
    "masks": variants([lambda b=b, h=h, n=n, keep=keep: call(n, n, mask=blocks(n, n, b, h, keep))
                       for b in (1, 2) for h in (1, 4) for n in (65, 1024) for keep in (0.1, 1.0)]),
    "kinds": variants([lambda: call(), lambda: call(softcap=2.0), lambda: call(mask=blocks(64, 64)),
                       lambda: call(sinks=torch.zeros(4)), lambda: call(dim=128),
                       lambda: packed(), lambda: packed(mask=blocks(64, 64))]),
}

launches.clear()
call(sq=130, sk=70, batch=1, heads=6, kv_heads=1, dim=40, bshd=True)
(grid, args, _), = launches
out, _, q, k, v, *_ = args
launches.clear()
call(sq=0)
empty = len(launches)
call(sq=130, sk=64, mask=blocks(130, 64))
rows = launches[-1][1][7][1].numel()
packed([(70, 3), (60, 0), (0, 9)], 6, 1, 40)
packed_grid, packed_args, _ = launches[-1]
packed([(130, 130)], 2, 2, 64, fused=True)
print(json.dumps({
    "packed grid": packed_grid,
    "packed shapes": [x.shape for x in packed_args[2:5]],
    "packed strides": [x.strides for x in packed_args[2:5]],
    "packed blocks": [x.block_shape for x in packed_args[2:5]],
    "fused strides": [x.strides for x in launches[-1][1][2:5]],
    "counts": counts,
    "grid": grid,
    "shapes": [x.shape for x in (out, q, k, v)],
    "strides": [x.strides for x in (out, q, k, v)],
    "blocks": [x.block_shape for x in (out, q, k, v)],
    "launches without queries": empty,
    "rows": rows,
}))
"""


@pytest.fixture(scope="module")
def result(run_recorder):
    return run_recorder(SCRIPT)


@pytest.mark.parametrize(
    "what",
    [
        "lengths",
        "packed lengths",
        "packed batch and heads",
        "packed layouts",
        "packed bands",
        "layouts",
        "batch and heads",
        "head dimensions",
        "bands",
        "scales",
        "softcaps",
        "masks",
    ],
)
def test_runtime_data_compiles_nothing(result, what):
    assert result["counts"][what] == 1


def test_kinds_of_calls_are_variants(result):
    """The count can rise: each of these needs code of its own."""
    assert result["counts"]["kinds"] == 7


def test_descriptors(result):
    assert result["shapes"] == [[1, 6, 130, 40], [1, 6, 130, 40], [1, 1, 70, 40], [1, 1, 70, 40]]
    # dimensions of size 1 get the stride of a row, the others keep theirs
    assert result["strides"] == [[40, 40, 240, 1]] * 2 + [[40, 40, 40, 1]] * 2
    assert result["blocks"] == [[1, 1, 64, 64]] * 2 + [[1, 1, 128, 64]] * 2


def test_packed_descriptors(result):
    shapes = [[2**31 - 2**16] * 2 + [heads, 2**30, 40] for heads in (6, 1, 1)]
    assert result["packed shapes"] == shapes
    assert result["packed strides"] == [
        [2**34 - 240, 240, 40, 240, 1],
        [2**34 - 40, 40, 40, 40, 1],
        [2**34 - 40, 40, 40, 40, 1],
    ]
    assert result["packed blocks"] == [[1, 1, 1, 64, 64]] + [[1, 1, 1, 128, 64]] * 2
    assert result["fused strides"] == [[2**34 - 384, 384, 64, 384, 1]] * 3


def test_grid(result):
    # this machine counts as one SM
    assert result["grid"] == result["packed grid"] == [1]
    assert result["launches without queries"] == 0
    assert result["rows"] == 2 * 4 * 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 1, 64, 1000), (1, 1, 1, 1), (1, 3, 1, 24), (2, 2, 8, 16)])
def test_strides_of_descriptors_are_multiples_of_16_bytes(dtype, shape):
    """A dimension of size 1 may carry any stride: that of one KV head was the row of 1000 bytes."""
    padded = torch.empty((*shape[:-1], -(-shape[-1] // 16) * 16), dtype=dtype)
    *outer, last = tma_strides(padded[..., : shape[-1]])
    assert last == 1 and all(stride * padded.element_size() % 16 == 0 for stride in outer)
