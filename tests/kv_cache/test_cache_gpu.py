"""What only a GPU can say about KV caches: real appends, CUDA graphs, nothing that waits."""

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.calls.cache import AppendCall
from blackwell_sparsek.kv_cache.append import _RECORDED, append_eager
from blackwell_sparsek.kv_cache.append_kernel import launch_kv_append
from blackwell_sparsek.testing import layouts
from blackwell_sparsek.testing.kv_cases import append_case, assert_same_bits

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
PAGED = pytest.mark.parametrize("page_size", [None, 16, 64])


def check_against_eager(case, **options):
    expected = case.copy()
    append_eager(AppendCall(*expected))
    launch_kv_append(AppendCall(*case), **options)
    assert_same_bits(case.k_cache, expected.k_cache)
    assert_same_bits(case.v_cache, expected.v_cache)


def test_the_instruction_rounds_as_the_arithmetic_does():
    case = append_case([0], 1, heads=1, dims=(1024, 1024), stored=FP8, device="cuda")
    spread = 10.0 ** torch.randint(-4, 4, (1024,), device="cuda")
    edges = torch.tensor([447.9, 464, 1e9, torch.inf, -torch.inf, torch.nan, -0.0, 1e-9]).cuda()
    case.k.mul_(spread)[..., :8] = edges
    case.v.mul_(spread)[..., :8] = -edges
    for converts in (True, False):
        check_against_eager(case.copy(), converts_fp8=converts)


@PAGED
@pytest.mark.parametrize("stored", [None, FP8], ids=["same", "fp8"])
@pytest.mark.parametrize("dims", [(128, 128), (64, 80), (192, 128), (72, 300)])
def test_equals_eager(page_size, stored, dims):
    case = append_case(
        [0, 1000, 333, 4096],
        257,
        counts=[257, 0, 100, 256],
        heads=8,
        dims=dims,
        page_size=page_size,
        dtype=torch.bfloat16,
        stored=stored,
        scales=None if stored is None else (0.02, 0.3),
        device="cuda",
    )
    check_against_eager(case)


@PAGED
@pytest.mark.parametrize("start", range(len(layouts.KINDS)))
def test_strides_of_their_own(page_size, start):
    options = {"page_size": page_size, "heads": 3, "dims": (64, 48), "dtype": torch.float16}
    case = append_case([5, 70], 19, device="cuda", **options)
    tensors = layouts.different_layouts(*case[:4], start=start)
    check_against_eager(case._replace(**dict(zip(case._fields, tensors, strict=False))))
    for cache in tensors[:2]:
        layouts.assert_gaps_untouched(cache)


@pytest.mark.parametrize("wrong", [-1, 2**31 - 1, -(2**31), "pages"])
def test_wrong_tables_and_lengths_write_nothing(wrong):
    """The caches lie between canaries, and pages that no table names are canaries as well."""
    case = append_case([0, 40], 33, page_size=16, dtype=torch.bfloat16, heads=4, device="cuda")
    canaries = [torch.full((x.numel() * 3,), torch.nan, device="cuda").to(x) for x in case[:2]]
    caches = [
        c[x.numel() : 2 * x.numel()].view_as(x) for c, x in zip(canaries, case[:2], strict=True)
    ]
    pages = caches[0].shape[0]
    table = torch.full_like(case.page_table, pages if wrong == "pages" else wrong)
    launch_kv_append(AppendCall(*caches, *case[2:6], table))
    lengths = torch.tensor([2**31 - 1, -7], dtype=torch.int32, device="cuda")
    launch_kv_append(AppendCall(*caches, *case[2:4], lengths, None, case.page_table))
    full = torch.full_like(lengths, case.page_table.shape[1] * 16)
    launch_kv_append(AppendCall(*caches, *case[2:4], full, None, case.page_table))
    assert all(c.isnan().all() for c in canaries)


@PAGED
def test_graph_follows_lengths_and_tables(page_size):
    case = append_case([0, 3], 1, capacity=200, page_size=page_size, heads=8, dims=(128, 128),
                       dtype=torch.bfloat16, device="cuda")  # fmt: skip
    launch_kv_append(AppendCall(*case))
    expected = case.copy()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bsk.kv_append(*case[:4], cache_seqlens=case.cache_seqlens, page_table=case.page_table)
        case.cache_seqlens.add_(1)
    lengths = torch.tensor([0, 3], dtype=torch.int32, device="cuda")
    for step in range(100):
        if page_size and step == 50:
            case.page_table.copy_(case.page_table.flip(0))
        case.k.normal_()
        case.v.normal_()
        now = expected._replace(cache_seqlens=lengths, page_table=case.page_table)
        append_eager(AppendCall(*now))
        lengths += 1
        graph.replay()
    assert torch.equal(case.cache_seqlens, lengths)
    assert_same_bits(case.k_cache, expected.k_cache)
    assert_same_bits(case.v_cache, expected.v_cache)


@PAGED
def test_latent_appends_are_replayed(page_size):
    case = append_case([0, 40], 3, heads=1, dims=(576, 512), page_size=page_size,
                       dtype=torch.bfloat16, device="cuda")  # fmt: skip
    case = case._replace(v_cache=case.k_cache[..., :512])
    kept = len(_RECORDED)
    for step in range(4):
        # other tensors of the same sizes: a replay must not write the first ones again
        k = torch.randn_like(case.k)
        expected = case._replace(k=k, v=k[..., :512], k_cache=case.k_cache.clone())
        append_eager(AppendCall(*expected._replace(v_cache=expected.k_cache[..., :512])))
        where = {"cache_seqlens": case.cache_seqlens, "page_table": case.page_table}
        bsk.kv_append(case.k_cache, case.v_cache, k, k[..., :512], **where)
        assert_same_bits(case.k_cache, expected.k_cache)
        if step == 2:
            assert len(_RECORDED) == kept + 1 and list(_RECORDED.values())[-1] is not None
    with pytest.raises(bsk.InvalidInput, match="v is not a view of k"):
        bsk.kv_append(case.k_cache, case.v_cache, k, k[..., :512].clone(), **where)


def test_contiguous_cache_in_a_graph():
    """`reserve` before each replay, `write` inside of the graph."""
    cache = bsk.KVCache(3, 8, 64, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, 3, 8, 1, 128, dtype=torch.bfloat16, device="cuda")
    cache.append(k.expand(-1, -1, 5, -1), v.expand(-1, -1, 5, -1), counts=[5, 0, 2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.write(k, v)
        with pytest.raises(bsk.BskError, match="which a CUDA graph would not repeat"):
            cache.append(k, v)
    written = []
    for _ in range(20):
        k.normal_()
        written.append(k.clone())
        cache.reserve(1)
        graph.replay()
    assert cache.lengths.tolist() == [25, 20, 22] == list(cache.host_lengths)
    assert torch.equal(cache.k[1, :, :20], torch.cat(written, 2)[1])
    assert torch.equal(cache.k[0, :, 5:25], torch.cat(written, 2)[0])
    assert not cache.k[1, :, 20:].any()


def test_paged_cache_waits_for_nothing():
    cache = bsk.PagedKVCache(200, 16, 8, 64, dtype=torch.bfloat16, device="cuda")
    ids = cache.add_sequences(5)
    k, v = torch.randn(2, 5, 8, 33, 64, dtype=torch.bfloat16, device="cuda")
    cache.append(ids, k, v)
    chosen = [ids[3], ids[0], ids[4]]
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids.append(cache.fork(ids[0]))
        cache.append(chosen, k[:3], v[:3], counts=[1, 33, 20])
        cache.truncate([ids[4]], 40)
        cache.release(ids[1])
        table, lengths = cache.page_table(chosen), cache.lengths(chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert lengths.tolist() == [34, 66, 40]
    first = cache.k[table[1].long()].flatten(0, 1)[:66].transpose(0, 1)
    assert torch.equal(first, torch.cat((k[0], k[1]), 1))
    (parent,) = cache.page_table([ids[5]])
    assert torch.equal(cache.k[parent.long()].flatten(0, 1)[:33].transpose(0, 1), k[0])


def test_compiled_in_one_piece():
    case = append_case([0, 3], 2, page_size=16, heads=8, dims=(64, 64), dtype=torch.bfloat16,
                       device="cuda")  # fmt: skip
    expected = case.copy()
    append_eager(AppendCall(*expected))

    @torch.compile(fullgraph=True)
    def step(k_cache, v_cache, k, v, lengths, table):
        bsk.kv_append(k_cache, v_cache, k + 0, v + 0, cache_seqlens=lengths, page_table=table)
        return lengths + 2

    assert step(*case[:5], case.page_table).tolist() == [2, 5]
    assert_same_bits(case.k_cache, expected.k_cache)


def test_more_than_two_to_the_31_elements():
    cache = torch.zeros(2, 1, 2**31 // 64, 64, dtype=FP8, device="cuda")
    k = torch.randn(2, 1, 4, 64, dtype=torch.bfloat16, device="cuda")
    lengths = torch.tensor([7, cache.shape[2] - 3], dtype=torch.int32, device="cuda")
    launch_kv_append(AppendCall(cache, cache.clone(), k, k, lengths))
    assert_same_bits(cache[0, :, 7:11], k[0].float().to(FP8))
    assert_same_bits(cache[1, :, -3:], k[1, :, :3].float().to(FP8))
    assert not cache[1, :, :4].view(torch.uint8).any()
