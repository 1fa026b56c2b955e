"""What compiles another variant of the decode kernel, and what does not; see test_fwd_variants."""

import pytest

pytest.importorskip("triton")

SCRIPT = """
from blackwell_sparsek.calls.decode import DecodeSpec
from blackwell_sparsek.decode import triton as decode
from blackwell_sparsek.decode.tuning import DecodeConfig

decode._attn_decode_kernel = Recorder(decode._attn_decode_kernel)


def call(batch=2, q_len=1, slots=64, heads=8, kv_heads=2, dim=64, page=None, pages=9, wide=4,
         listed=None, fp8=False, **options):
    q = torch.empty(batch, heads, q_len, dim, dtype=torch.float16)
    dtype = torch.float8_e4m3fn if fp8 else torch.float16
    shape = (batch, kv_heads, slots, dim) if page is None else (pages, page, kv_heads, dim)
    k = torch.empty(shape, dtype=dtype)
    ints = lambda *shape: torch.zeros(shape, dtype=torch.int32)
    spec = DecodeSpec(
        **{"scale": 0.125, "band": Band(None, 0), **options},
        cache_seqlens=ints(batch),
        page_table=None if page is None else ints(batch, wide),
        kv_blocks=None if listed is None else ints(batch, kv_heads, listed),
        kv_block_size=0 if listed is None else page or 16,
    )
    config = DecodeConfig(16, 64, 4, 3, 6)
    decode.launch_attn_decode(empty_out(q, dim), empty_lse(q), q, k, k, spec, config)


print(json.dumps({
    "slots": variants([lambda n=n: call(slots=n) for n in LENGTHS]),
    "queries": variants([lambda n=n: call(q_len=n) for n in (1, 2, 3, 4, 15, 16, 17)]),
    "batch": variants([lambda n=n: call(batch=n) for n in (1, 2, 3, 16, 33)]),
    "bands": variants([lambda b=b: call(band=b) for b in BANDS]),
    "scales": variants([lambda s=s: call(scale=s) for s in (1.0, 0.5, -1.0, 0.0, 16.0)]),
    "softcaps": variants([lambda s=s: call(softcap=s) for s in (1.0, 16.0, 30.0)]),
    "pages": variants([lambda n=n: call(page=16, pages=n) for n in (1, 2, 16, 100)]),
    "tables": variants([lambda n=n: call(page=16, wide=n) for n in (1, 2, 16, 100)]),
    "lists": variants([lambda n=n: call(listed=n) for n in (1, 2, 16, 100)]),
    "kinds": variants([lambda: call(), lambda: call(page=16), lambda: call(listed=4),
                       lambda: call(softcap=2.0), lambda: call(sinks=torch.zeros(8)),
                       lambda: call(fp8=True), lambda: call(dim=128)]),
}))
"""


@pytest.fixture(scope="module")
def counts(run_recorder):
    return run_recorder(SCRIPT)


@pytest.mark.parametrize(
    "what",
    ["slots", "queries", "batch", "bands", "scales", "softcaps", "pages", "tables", "lists"],
)
def test_what_is_data_compiles_nothing(what, counts):
    assert counts[what] == 1


def test_what_a_kernel_is_made_for_compiles_another(counts):
    assert counts["kinds"] == 7
