"""What the Hopper forward is launched with: descriptors, grid, and how many variants compile.

In a process that does not interpret kernels; nothing is compiled or run.
"""

import pytest

pytest.importorskip("triton")

SCRIPT = """
from blackwell_sparsek.formats.block_order import longest_first
from blackwell_sparsek.kernels.attention import fwd_sm90_launch
from blackwell_sparsek.kernels.attention.config_sm90 import make_config

fwd_sm90_launch._attn_fwd_sm90_kernel = Recorder(fwd_sm90_launch._attn_fwd_sm90_kernel)


def call(sq=64, sk=64, batch=2, heads=4, kv_heads=2, dim=64, bshd=False, mask=None, **options):
    q, k, v = inputs(sq, sk, batch, heads, kv_heads, dim, bshd)
    spec = AttnSpec(**{"scale": 0.125, **options}, block_mask=mask)
    order = None if mask is None else longest_first(mask, batch, heads, EVERYTHING, 2)
    config = make_config(2 if mask is None else 1, 64 if dim <= 64 else 128, 64,
                         None if mask is None else mask.block_size[1])
    fwd_sm90_launch.launch_attn_fwd_sm90(
        empty_out(q, dim), empty_lse(q), q, k, v, spec, order, 2, config)


counts = {
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
                       lambda: call(sinks=torch.zeros(4)), lambda: call(dim=128)]),
}

launches.clear()
call(sq=130, sk=70, batch=1, heads=6, kv_heads=1, dim=40, bshd=True)
(grid, args, _), = launches
out, _, q, k, v, *_ = args
launches.clear()
call(sq=0)
empty = len(launches)
call(sq=130, sk=64, mask=blocks(130, 64))
rows = launches[-1][1][7].numel()
print(json.dumps({
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
    assert result["counts"]["kinds"] == 5


def test_descriptors(result):
    assert result["shapes"] == [[1, 6, 130, 40], [1, 6, 130, 40], [1, 1, 70, 40], [1, 1, 70, 40]]
    # dimensions of size 1 get the stride of a row, the others keep theirs
    assert result["strides"] == [[40, 40, 240, 1]] * 2 + [[40, 40, 40, 1]] * 2
    assert result["blocks"] == [[1, 1, 64, 64]] * 2 + [[1, 1, 128, 64]] * 2


def test_grid(result):
    # this machine counts as one SM
    assert result["grid"] == [1]
    assert result["launches without queries"] == 0
    assert result["rows"] == 2 * 4 * 3
