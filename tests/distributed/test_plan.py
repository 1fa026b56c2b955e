import itertools
import json
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import Band, Plan, Shapes, balance, traffic
from blackwell_sparsek.distributed.plan import tile_work
from blackwell_sparsek.distributed.visible import Visible

from .. import fuzzing

DOCUMENTS = torch.tensor([0, 300, 5000, 5100, 9000, 16384, 20000, 32768], dtype=torch.int32)


def topk_mask(length=16384, heads=4, kept=16):
    generator = torch.Generator().manual_seed(0)
    blocks = length // 128
    scores = torch.randn(1, heads, blocks, blocks, generator=generator)
    return bsk.masks.topk(scores, kept, 128, causal=True)


CASES = {
    "causal": (Band(None, 0), 32768),
    "causal, awkward": (Band(None, 0), 10007),
    "window": (Band(1023, 0), 32768),
    "documents": (bsk.masks.documents(DOCUMENTS, 128, causal=True), None),
    "top-k": (topk_mask(), None),
    "skewed": (bsk.masks.global_local(16384, 128, global_blocks=4, causal=True), None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_work_and_tokens_are_even(name, ranks):
    mask, length = CASES[name]
    plan = balance(mask, ranks, seq_length=length)
    # the count of kept blocks again, from the dense mask of blocks
    if isinstance(mask, Band):
        p = bsk.masks.sliding_window(plan.seq_length, tuple(mask), 16)
        rows = p.forward.indptr.diff().double()
        work = torch.zeros(-(-plan.seq_length // 128)).double()
        work.index_add_(0, torch.arange(rows.numel()) // 8, rows)
    else:
        work = mask.to_dense().sum((0, 1, 3)).double() * 64
    loads = torch.stack([work[list(tiles)].sum() for tiles in plan.tiles])
    assert loads.tolist() == list(plan.work)
    assert float(loads.max() / loads.mean()) == pytest.approx(plan.imbalance)
    assert plan.imbalance <= 1.05
    counts = [len(tiles) for tiles in plan.tiles]
    assert max(counts) - min(counts) <= 1


def test_contiguous_runs_where_they_are_even_and_zigzag_for_causal():
    window = balance(Band(1023, 0), 8, seq_length=32768)
    assert all(tiles == tuple(range(tiles[0], tiles[-1] + 1)) for tiles in window.tiles)
    causal = balance(Band(None, 0), 2, seq_length=1024)
    assert causal.tiles == ((0, 1, 6, 7), (2, 3, 4, 5)) and causal.imbalance == 1.0


def test_of_plans_that_are_equally_uneven_the_longest_runs_win():
    """Whichever rank has the only block of queries that sees anything, it has all of the work."""
    dense = torch.zeros(4, 4, dtype=torch.bool)
    dense[0, 0] = True
    plan = balance(bsk.BlockMask.from_dense(dense, 16), 2, tile=16)
    assert (plan.tiles, plan.imbalance) == (((0, 1), (2, 3)), 2.0)


def test_several_masks_are_weighted():
    causal = bsk.masks.causal(4096, 128)
    local = bsk.masks.sliding_window(4096, 256, 128, causal=True)
    plan = balance([causal, local], 4, weights=[1, 5])
    expected = tile_work(causal, 4096, 128) + 5 * tile_work(local, 4096, 128)
    assert sum(plan.work) == float(expected.sum())
    assert plan.imbalance <= 1.05
    # a mask of no weight does not count
    assert balance([causal, local], 4, weights=[1, 0]).work == balance(causal, 4).work


@pytest.mark.parametrize("length", [0, 1, 15, 17, 129, 1000])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_shards_join_to_the_whole(length, ranks):
    x = torch.randn(2, 3, length, 5)
    for plan in (
        Plan.contiguous(length, ranks, tile=32),
        balance(Band(None, 0), ranks, seq_length=length, tile=16),
    ):
        shards = [plan.shard(x, 2, rank=rank) for rank in range(ranks)]
        assert tuple(part.shape[2] for part in shards) == plan.lengths
        assert torch.equal(plan.join(shards, 2), x)
        positions = torch.cat([plan.positions(rank) for rank in range(ranks)])
        assert sorted(positions.tolist()) == list(range(length))
        for rank, part in enumerate(shards):
            assert torch.equal(part, x[:, :, plan.positions(rank)])


def test_positions_inside_documents():
    offsets = torch.tensor([0, 5, 5, 30, 48], dtype=torch.int32)
    plan = Plan(48, 16, ((0, 2), (1,)))
    whole = torch.cat([torch.arange(n) for n in (5, 25, 18)])
    for rank in (0, 1):
        found = plan.positions(rank, cu_seqlens=offsets)
        assert torch.equal(found, plan.shard(whole[None], rank=rank)[0])
    with pytest.raises(bsk.InvalidInput, match=r"cu_seqlens\[4\] is not the number of tokens"):
        Plan(64, 16, ((0, 1, 2, 3),)).positions(0, cu_seqlens=offsets)


def test_positions_may_be_written_to():
    plan = Plan.contiguous(32, 2)
    plan.positions(0).zero_()
    assert plan.positions(0)[-1] == 15


def test_plans_are_saved_and_loaded(tmp_path):
    plan = balance(topk_mask(2048, 2, 3), 3)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and hash(loaded) == hash(plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "text is not JSON"),
        ("[]", "text is not a plan; expected the keys of .*, got list$"),
        (
            '{"tile": 16, "seq_length": 32}',
            r"text is not a plan; .*, got \['seq_length', 'tile'\]$",
        ),
        ("KIND, 'tiles': [0, 1]}", "tiles is malformed"),
        ("KIND, 'tiles': [[0, 1], [1]]}", "are not a partition; .* at fault .1."),
        ("KIND, 'tiles': [[0]]}", "are not a partition; .* at fault .1."),
        ("KIND, 'tiles': [[1, 0]]}", "is not ascending"),
        ("KIND, 'tiles': [[0, 2], [1]]}", "are not a partition; .* at fault .2."),
        ("KIND, 'tiles': [[0, true]]}", "is malformed; expected ints"),
        ("KIND, 'tiles': []}", "tiles is malformed"),
        ("KIND, 'work': [1, 2], 'tiles': [[0, 1]]}", "work has a wrong length"),
        ("KIND, 'work': [-1], 'tiles': [[0, 1]]}", "work is out of range"),
        ("KIND, 'work': ['a'], 'tiles': [[0, 1]]}", "work is malformed"),
        ("KIND, 'tile': 24, 'tiles': [[0, 1]]}", "tile does not hold whole blocks"),
        ("KIND, 'tile': 8, 'tiles': [[0, 1]]}", "tile is too small"),
        ("KIND, 'seq_length': '32', 'tiles': [[0, 1]]}", "seq_length is not an int"),
    ],
)
def test_what_is_not_a_plan_is_refused(text, message):
    kind = '{"format": "blackwell_sparsek.distributed.Plan/1", "seq_length": 32, "tile": 16'
    work = "" if "'work'" in text else ', "work": [1.0]'
    text = text.replace("KIND", kind + work).replace("'", '"')
    with pytest.raises(bsk.InvalidInput, match=message):
        Plan.from_json(text)


SAVED = json.loads(Plan(48, 16, ((0, 2), (1,)), (1.0, 2.0)).to_json())


def assert_refused_or_used(content):
    """Whether this is a plan; if not, one short sentence says so."""
    try:
        plan = Plan.from_json(content)
    except bsk.InvalidInput as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
        return False
    assert plan.imbalance >= 1 and Plan.from_json(plan.to_json()) == plan
    assert sum(plan.lengths) == plan.seq_length == plan.join_index().numel()
    assert [plan.positions(rank).numel() for rank in range(plan.world_size)] == [*plan.lengths]
    return True


def test_any_wrong_value_is_refused_or_makes_a_plan():
    counts = [0, 0]
    for place in fuzzing.places(SAVED):
        for value in [*fuzzing.ODD, 2**30, 2**40, 1e308]:
            text = fuzzing.as_text(fuzzing.replaced(SAVED, place, value))
            try:
                counts[assert_refused_or_used(text)] += 1
            except Exception as error:
                raise AssertionError(f"{value!r} at {place}") from error
    assert min(counts) > 10


@settings(max_examples=200)
@given(
    content=st.binary(max_size=60)
    | fuzzing.values.map(lambda x: fuzzing.as_text(x).encode())
    | fuzzing.changed(SAVED).map(lambda x: fuzzing.as_text(x).encode())
)
def test_any_other_content_is_refused_or_makes_a_plan(content):
    assert_refused_or_used(content)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b'{"format": "\xff\xfe"}')
    with pytest.raises(bsk.InvalidInput, match="text is not JSON"):
        Plan.load(path)


@pytest.mark.parametrize("depth", [300, 100_000])
def test_deep_nesting_is_refused(depth):
    assert not assert_refused_or_used(fuzzing.nested(depth))


def test_a_short_file_that_claims_a_long_sequence_takes_no_memory():
    text = fuzzing.as_text({**SAVED, "seq_length": 2**40})
    tracemalloc.start()
    try:
        with pytest.raises(bsk.InvalidInput, match=r"not a partition; .* at fault \[3, 4, "):
            Plan.from_json(text)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()
    one = Plan(20, 2**40, ((0,),))
    assert one.positions(0).tolist() == list(range(20))
    assert one.blocks(0, 16).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, 2), {}, "mask is not a mask; expected BlockMask, Band or several, got int"),
        (([Band(None, 0), 3], 2), {"seq_length": 64}, "mask is not a mask; .* got int"),
        (([], 2), {}, "mask is not a mask"),
        ((Band(None, 0), 2), {}, "seq_length is missing"),
        ((Band(None, 0), 0), {"seq_length": 64}, "world_size is too small"),
        ((bsk.masks.causal((64, 128), 16), 2), {}, r"mask has wrong sizes; expected Sq = Sk"),
        ((bsk.masks.causal(64, 16), 2), {"seq_length": 65}, "expected Sq = Sk = 65"),
        ((bsk.masks.causal(64, 32), 2), {"tile": 48}, "tile does not hold whole blocks"),
        ((bsk.masks.causal(64, 32), 2), {"weights": [1, 2]}, "weights do not fit"),
        ((bsk.masks.causal(64, 32), 2), {"weights": [-1]}, "weights do not fit"),
        ((bsk.masks.causal(64, 32), 2), {"weights": 3.0}, "weights is malformed; expected 1 fin"),
        ((bsk.masks.causal(64, 32), 2), {"weights": ["all"]}, "weights is malformed"),
    ],
)
def test_errors_of_balance(arguments, options, message):
    with pytest.raises(bsk.InvalidInput, match=message):
        balance(*arguments, **options)


def test_errors_of_shards():
    plan = Plan.contiguous(64, 2)
    with pytest.raises(bsk.InvalidInput, match="x has a wrong shape; expected 64 elements along"):
        plan.shard(torch.zeros(2, 65), rank=0)
    with pytest.raises(bsk.InvalidInput, match="rank is out of range; expected 0 to 1, got 2"):
        plan.shard(torch.zeros(2, 64), rank=2)
    with pytest.raises(bsk.InvalidInput, match="shards has a wrong length"):
        plan.join([torch.zeros(2, 32)])
    with pytest.raises(bsk.InvalidInput, match=r"shards\[1\] has a wrong shape; expected 32"):
        plan.join([torch.zeros(2, 32), torch.zeros(2, 31)])
    with pytest.raises(bsk.InvalidType, match=r"Plan\.join: shards\[1\] is not a tensor"):
        plan.join([torch.zeros(2, 32), [[0.0] * 32] * 2])
    with pytest.raises(bsk.InvalidInput, match="group does not exist; expected"):
        plan.unshard(torch.zeros(2, 32))
    with pytest.raises(bsk.InvalidInput, match="shard: rank is unknown; expected a rank, or torch"):
        plan.shard(torch.zeros(2, 64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7,), "tiles is malformed; expected tiles of each rank, got int$"),
        (((),), "tiles is malformed; expected tiles of each rank, got none$"),
        (((0, 1),), r"tiles\[0\] is malformed; expected ints, got int"),
        ((((0,), (1,)), 5.0), "work is malformed; expected a number for each rank, got 5.0"),
        ((((0,), (1,)), ("a", "b")), "work is malformed"),
    ],
)
def test_malformed_plans_are_refused(arguments, message):
    with pytest.raises(bsk.InvalidType, match=message):
        Plan(32, 16, *arguments)


def test_shards_cut_in_inference_mode_first_have_gradients_later():
    plan = Plan.contiguous(176, 2)
    with torch.inference_mode():
        plan.shard(torch.zeros(1, 176), rank=0)
    x = torch.zeros(1, 176, requires_grad=True)
    plan.shard(x, rank=0).sum().backward()
    assert x.grad.sum() == plan.lengths[0]


# What the ranks see, against the element mask of the whole sequence.


def masks_of(length):
    generator = torch.Generator().manual_seed(length)
    visible = torch.rand(2, 2, length, length, generator=generator) < 0.3
    visible[:, :, length // 2 : length // 2 + 20] = False
    return {
        "none": None,
        "elements": bsk.BlockMask.from_element_mask(visible, 16),
        "blocks": bsk.masks.random(length, 0.4, (32, 16), heads=2, generator=generator),
    }


@pytest.mark.parametrize("name", ["none", "elements", "blocks"])
@pytest.mark.parametrize("length", [1, 63, 200])
@pytest.mark.parametrize("in_documents", [False, True])
def test_parts_show_what_the_whole_mask_shows(name, length, in_documents):
    mask = masks_of(length)[name]
    offsets = None
    if in_documents:
        offsets = torch.tensor([0, length // 3, length // 2, length], dtype=torch.int32)
    for band in (Band(None, None), Band(None, 0), Band(7, 0), Band(3, 30)):
        expected = torch.ones(1, 1, length, length, dtype=torch.bool)
        if in_documents:
            expected &= bsk.masks.documents(offsets, 16, window=tuple(band)).to_element_mask()
        else:
            at = torch.arange(length)
            distance = at - at[:, None]
            left, right = (2**30 if side is None else side for side in band)
            expected = expected & (distance >= -left) & (distance <= right)
        if mask is not None:
            expected = expected & mask.to_element_mask()
        plan = balance(Band(None, 0), 3, seq_length=length, tile=32)
        visible = Visible("test", plan, band, mask, offsets)
        needed = visible.needed()
        for rank, other in itertools.product(range(3), range(3)):
            columns = plan.blocks(other, visible.block[1])
            part = visible.part(visible.of_rank(rank), columns, rank)
            wanted = expected[:, :, plan.positions(rank)][..., plan.positions(other)]
            if part.is_empty:
                assert not wanted.any()
            elif part.mask is None:
                assert wanted.all()
            else:
                part.mask.validate()
                assert torch.equal(part.mask.to_element_mask().expand_as(wanted), wanted)
            seen = needed[rank].any(0).any(0)[columns]
            assert bool(seen.any()) == (not part.is_empty)


def test_bytes_of_masks_on_eight_ranks():
    """`needed` sends each block that a rank sees and does not own once; see also the ranks."""
    shapes = Shapes(1, 4, 4, 64, 64, torch.bfloat16)
    for mask, _ in (CASES["documents"], CASES["top-k"]):
        plan = balance(mask, 8)
        dense = mask.to_dense()[0]
        demanded = 0
        for tiles in plan.tiles:
            mine = torch.zeros(dense.shape[1], dtype=torch.bool)
            mine[list(tiles)] = True
            seen = dense[:, mine].any(1)[:, ~mine].sum()
            demanded += int(seen) * 128 * (64 + 64) * 2 * (4 // dense.shape[0])
        sent = sum(traffic(plan, "needed", shapes, block_mask=mask).forward)
        assert sent == demanded
        assert sent <= sum(traffic(plan, "allgather", shapes, block_mask=mask).forward)


def _planned():
    """Plans, their positions and traffic, of every case."""
    shapes = Shapes(1, 4, 4, 64, 64, torch.bfloat16)
    for mask, length in CASES.values():
        plan = balance(mask, 3, seq_length=length)
        options = {"window": tuple(mask)} if isinstance(mask, Band) else {"block_mask": mask}
        sent = [traffic(plan, method, shapes, **options) for method in ("needed", "allgather")]
        yield plan, plan.positions(1).tolist(), sent


def test_plans_are_made_on_the_cpu_whatever_the_default_device_is():
    expected = list(_planned())
    with torch.device("meta"):
        assert list(_planned()) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("length", "ranks"), [(100, 2), (300, 3), (1000, 5)])
def test_bytes_of_a_ring(length, ranks, dtype):
    """Shards are passed from rank to rank, the last of which is shorter."""
    plan, shapes = Plan.contiguous(length, ranks, tile=32), Shapes(2, 6, 3, 40, 24, dtype)
    assert len(set(plan.lengths)) > 1
    token = 2 * 3 * (40 + 24) * dtype.itemsize
    sent, holds = [0] * ranks, list(range(ranks))
    for _ in range(ranks - 1):
        for rank, shard in enumerate(holds):
            sent[rank] += token * plan.lengths[shard]
        holds = [holds[rank - 1] for rank in range(ranks)]
    # in the backward, sums in fp32 travel along once more, and on to the rank that they belong to
    sums = token // dtype.itemsize * 4 * sum(plan.lengths)
    said = traffic(plan, "ring", shapes)
    assert said.forward == tuple(sent)
    assert said.backward == tuple(x + sums for x in sent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("length", "ranks"), [(100, 2), (300, 3), (1000, 6)])
def test_bytes_of_an_exchange_of_heads(length, ranks, dtype):
    """Each rank has some tokens of all heads, and computes all tokens of a sixth, third or half."""
    plan, shapes = Plan.contiguous(length, ranks, tile=32), Shapes(2, 12, 6, 40, 24, dtype)
    assert len(set(plan.lengths)) > 1
    # bytes of one token, in the heads that one rank computes
    queries, keys, values, outputs = (
        2 * heads // ranks * dim * dtype.itemsize
        for heads, dim in ((12, 40), (6, 40), (6, 24), (12, 24))
    )
    forward, backward = [0] * ranks, [0] * ranks
    for source, here in enumerate(plan.lengths):
        for target, there in enumerate(plan.lengths):
            if source != target:
                forward[source] += here * (queries + keys + values) + there * outputs
                # the gradients go the other way
                backward[source] += here * outputs + there * (queries + keys + values)
    said = traffic(plan, "ulysses", shapes)
    assert (said.forward, said.backward) == (tuple(forward), tuple(backward))


def test_traffic_refuses_an_unknown_method():
    with pytest.raises(bsk.InvalidInput, match="method is unknown; expected one of 'allgather'"):
        traffic(Plan.contiguous(64, 2), "auto", Shapes(1, 1, 1, 8, 8, torch.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_mask": bsk.masks.causal(128, 16)}, "block_mask"),
        ({"block_mask": bsk.masks.causal(32, 16)}, "block_mask"),
        ({"block_mask": torch.ones(4, 4)}, "block_mask is not a block mask; expected BlockMask"),
        ({"cu_seqlens": [0, 64]}, "traffic: cu_seqlens is not a tensor"),
        ({"plan": None}, "plan has a wrong type; expected Plan, got NoneType"),
        ({"shapes": (1, 1, 1, 8, 8)}, "shapes has a wrong type; expected Shapes, got tuple"),
    ],
)
def test_traffic_refuses_what_does_not_fit(changes, message):
    shapes = Shapes(1, 1, 1, 8, 8, torch.float32)
    given = {"plan": Plan.contiguous(64, 2), "method": "needed", "shapes": shapes}
    with pytest.raises(bsk.InvalidInput, match=message):
        traffic(**{**given, **changes})


DEMANDS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 1024},
    "documents": {"cu_seqlens": DOCUMENTS[:5]},
    "top-k": {"block_mask": topk_mask(9000 // 128 * 128, 1, 8)},
}


@pytest.mark.parametrize("name", DEMANDS)
def test_needed_sends_little_more_than_single_tokens_would_be(name):
    """Bytes against the keys that some query of a rank sees, token by token, on eight ranks."""
    options = DEMANDS[name]
    mask = options.get("block_mask")
    length = 9000 if mask is None else mask.seq_lengths[0]
    at = torch.arange(length)
    if name == "documents":
        mask = bsk.masks.documents(options["cu_seqlens"], 128)
        document = torch.searchsorted(options["cu_seqlens"].long(), at, right=True)
    band = Band(options.get("window", 2**30) - 1, 0)
    plan = balance(band if mask is None else mask, 8, seq_length=length, tile=128)
    blocks = None if name != "top-k" else mask.to_dense()[0, 0]
    demanded = 0
    for rank in range(8):
        q = plan.positions(rank)
        if name == "documents":
            seen = torch.isin(document, document[q])
        elif name == "top-k":
            seen = blocks[q[::128] // 128].any(0).repeat_interleave(128)
        else:
            left = band.left
            # the union of [p - left, p] over the rank's positions
            change = torch.zeros(length + 1, dtype=torch.int64)
            change.index_add_(0, (q - left).clamp(min=0), torch.ones_like(q))
            change.index_add_(0, q + 1, -torch.ones_like(q))
            seen = change.cumsum(0)[:length] > 0
        seen[q] = False
        demanded += int(seen.sum())
    shapes = Shapes(1, 4, 2, 64, 64, torch.bfloat16)
    sent = sum(traffic(plan, "needed", shapes, **options).forward)
    assert demanded * shapes.kv_bytes <= sent <= 1.05 * demanded * shapes.kv_bytes
