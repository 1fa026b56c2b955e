"""What the Hopper decode kernel is launched with, and what compiles another variant of it.

In a process that does not interpret kernels; nothing is compiled or run.
"""

import pytest

pytest.importorskip("triton")

SCRIPT = """
from blackwell_sparsek.calls.decode import DecodeSpec
from blackwell_sparsek.decode import sm90_launch as decode_sm90_launch
from blackwell_sparsek.decode.tuning import make_config

decode_sm90_launch._attn_decode_sm90_kernel = Recorder(decode_sm90_launch._attn_decode_sm90_kernel)


def call(batch=2, q_len=1, slots=64, heads=8, kv_heads=2, dim=64, page=None, pages=9, wide=4,
         listed=None, **options):
    q = torch.empty(batch, heads, q_len, dim, dtype=torch.float16)
    shape = (batch, kv_heads, slots, dim) if page is None else (pages, page, kv_heads, dim)
    k = torch.empty(shape, dtype=torch.float16)
    ints = lambda *shape: torch.zeros(shape, dtype=torch.int32)
    block = None if listed is None else page or 16
    spec = DecodeSpec(
        **{"scale": 0.125, "band": Band(None, 0), **options},
        cache_seqlens=ints(batch),
        page_table=None if page is None else ints(batch, wide),
        kv_blocks=None if listed is None else ints(batch, kv_heads, listed),
        kv_block_size=block or 0,
    )
    config = make_config(8, dim, dim, page, block)
    decode_sm90_launch.launch_attn_decode_sm90(
        empty_out(q, dim), empty_lse(q), q, k, k, spec, config, 6)


counts = {
    "slots": variants([lambda n=n: call(slots=n) for n in LENGTHS]),
    "queries": variants([lambda n=n: call(q_len=n) for n in (1, 2)]),
    "batch": variants([lambda n=n: call(batch=n) for n in (1, 2, 3, 16, 33)]),
    "bands": variants([lambda b=b: call(band=b) for b in BANDS]),
    "scales": variants([lambda s=s: call(scale=s) for s in (1.0, 0.5, -1.0, 0.0, 16.0)]),
    "softcaps": variants([lambda s=s: call(softcap=s) for s in (1.0, 16.0, 30.0)]),
    "pages": variants([lambda n=n: call(page=16, pages=n) for n in (1, 2, 16, 100)]),
    "tables": variants([lambda n=n: call(page=16, wide=n) for n in (1, 2, 16, 100)]),
    "lists": variants([lambda n=n: call(listed=n) for n in (1, 2, 16, 100)]),
    "kinds": variants([lambda: call(), lambda: call(page=16), lambda: call(listed=4),
                       lambda: call(page=16, listed=4), lambda: call(softcap=2.0),
                       lambda: call(sinks=torch.zeros(8)), lambda: call(dim=128)]),
}
launches.clear()
call(batch=1, slots=70, dim=128)
call(page=48, pages=5)
call(batch=0)
(grid, contiguous, _), (_, paged, _) = launches
print(json.dumps({
    "counts": counts,
    "grid": grid,
    "shapes": [x.shape for x in (*contiguous[2:4], *paged[2:4])],
    "strides": [x.strides for x in (*contiguous[2:4], *paged[2:4])],
    "blocks": [x.block_shape for x in (*contiguous[2:4], *paged[2:4])],
}))
"""


@pytest.fixture(scope="module")
def result(run_recorder):
    return run_recorder(SCRIPT)


@pytest.mark.parametrize(
    "what",
    [
        "slots",
        "queries",
        "batch",
        "bands",
        "scales",
        "softcaps",
        "pages",
        "tables",
        "lists",
    ],
)
def test_what_is_data_compiles_nothing(what, result):
    assert result["counts"][what] == 1


def test_kinds_of_calls_are_variants(result):
    """The count can rise: each of these needs code of its own."""
    assert result["counts"]["kinds"] == 7


def test_descriptors(result):
    """[batch or page, head, token, dim] along the strides of the cache; none without queries."""
    assert result["grid"] == [6]
    assert result["shapes"] == [[1, 2, 70, 128]] * 2 + [[5, 2, 48, 64]] * 2
    # a dimension of size 1 gets the stride of a row
    assert result["strides"] == [[128, 8960, 128, 1]] * 2 + [[6144, 64, 128, 1]] * 2
    assert result["blocks"] == [[1, 1, 64, 128]] * 2 + [[1, 1, 16, 64]] * 2
