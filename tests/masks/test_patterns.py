"""Mask patterns against their definitions, written out element by element or block by block."""

import itertools
import time

import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported
from blackwell_sparsek.masks import patterns as masks
from blackwell_sparsek.masks.band import Band, band_of
from blackwell_sparsek.masks.block_mask import BlockMask

LENGTHS = [(0, 5), (5, 0), (1, 1), (1, 70), (40, 40), (17, 65), (65, 17), (64, 64), (33, 100)]
BLOCKS = [(16, 16), (32, 16), (16, 64)]
CASES = list(itertools.product(LENGTHS, BLOCKS))


def band_elements(band: Band, sq: int, sk: int) -> torch.Tensor:
    left, right = band.scalars()
    position = torch.arange(sq).unsqueeze(1) + sk - sq
    key = torch.arange(sk)
    return (key >= position - left) & (key <= position + right)


def picture(mask: BlockMask) -> list[str]:
    """One line a query block: `#` full, `+` partial, `.` absent."""
    mb, nb = mask.grid
    lines = [["."] * nb for _ in range(mb)]
    f = mask.forward
    for row, col, bits in zip(f.row_indices(), f.indices, f.bits_id, strict=True):
        lines[row][col] = "#" if bits < 0 else "+"
    return ["".join(line) for line in lines]


def blocks_by_definition(seq, block, rule) -> torch.Tensor:
    """Blocks with `rule(own_first, own_last, column)`, own_* being the blocks at its positions."""
    (sq, sk), (bq, bk) = seq, block
    keep = torch.zeros(-(-sq // bq), -(-sk // bk), dtype=torch.bool)
    for r, c in itertools.product(*map(range, keep.shape)):
        first, last = r * bq + sk - sq, min(r * bq + bq, sq) - 1 + sk - sq
        keep[r, c] = rule(first // bk, last // bk, c)
    return keep


def elements_of(keep, seq, block, causal) -> torch.Tensor:
    elements = keep.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    elements = elements[..., : seq[0], : seq[1]]
    return elements & band_elements(Band(None, 0), *seq) if causal else elements


# a block size of 16; `#` full, `+` partial, `.` absent
GOLDEN = {
    "causal 64": (
        lambda: masks.causal(64, 16),
        """
        +...
        #+..
        ##+.
        ###+""",
    ),
    "causal, 32 queries over 64 keys": (
        lambda: masks.causal((32, 64), 16),
        """
        ##+.
        ###+""",
    ),
    "causal, 64 queries over 32 keys": (
        lambda: masks.causal((64, 32), 16),
        """
        ..
        ..
        +.
        #+""",
    ),
    "causal, off the grid by one": (
        lambda: masks.causal((33, 49), 16),
        """
        #+..
        ##+.
        ####""",
    ),
    "window of 16, causal": (
        lambda: masks.sliding_window(64, 16, 16, causal=True),
        """
        +...
        ++..
        .++.
        ..++""",
    ),
    "window of 17, causal": (
        lambda: masks.sliding_window(64, 17, 16, causal=True),
        """
        +...
        ++..
        .++.
        ..++""",
    ),
    "window of 18, causal": (
        lambda: masks.sliding_window(64, 18, 16, causal=True),
        """
        +...
        ++..
        +++.
        .+++""",
    ),
    "window of 31 before and after": (
        lambda: masks.sliding_window(96, 32, 16),
        """
        ##+...
        ###+..
        +###+.
        .+###+
        ..+###
        ...+##""",
    ),
    "window of one": (
        lambda: masks.sliding_window(48, 1, 16),
        """
        +..
        .+.
        ..+""",
    ),
    "strided": (
        lambda: masks.strided(96, 3, 16),
        """
        #..#..
        .#..#.
        ..#..#
        #..#..
        .#..#.
        ..#..#""",
    ),
    "strided, wider, causal": (
        lambda: masks.strided(96, 4, 16, local_blocks=2, causal=True),
        """
        +.....
        #+....
        .#+...
        ..#+..
        #..#+.
        .#..#+""",
    ),
    "global and local": (
        lambda: masks.global_local(96, 16, global_blocks=1, local_blocks=2),
        """
        ######
        ###...
        ####..
        #.###.
        #..###
        #...##""",
    ),
    "global and local, causal": (
        lambda: masks.global_local(96, 16, global_blocks=2, local_blocks=1, causal=True),
        """
        +.....
        #+....
        ##+...
        ##.+..
        ##..+.
        ##...+""",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_pictures(name):
    build, expected = GOLDEN[name]
    assert picture(build()) == expected.split()


@pytest.mark.parametrize(("seq", "block"), CASES)
def test_causal_is_exact(seq, block):
    mask = masks.causal(seq, block)
    mask.validate()
    expected = band_elements(Band(None, 0), *seq)
    assert mask.equals(BlockMask.from_element_mask(expected, block))


WINDOWS = [(True, 1), (True, 5), (True, 33), (False, 1), (False, 20), (False, (None, 3))]
WINDOWS += [(False, (20, 0)), (False, (0, 40)), (False, (3, None)), (False, (15, 16))]


@pytest.mark.parametrize(("seq", "block"), CASES)
@pytest.mark.parametrize(("causal", "window"), WINDOWS)
def test_sliding_window_is_exact(seq, block, causal, window):
    mask = masks.sliding_window(seq, window, block, causal=causal)
    mask.validate()
    expected = band_elements(band_of("op", causal, window), *seq)
    assert mask.equals(BlockMask.from_element_mask(expected, block))


@pytest.mark.parametrize(("seq", "block"), CASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("stride", "near"), [(1, 0), (3, 1), (2, 2), (50, 0)])
def test_strided_follows_its_definition(seq, block, causal, stride, near):
    def rule(own_first, own_last, c):
        return (own_first - near < c < own_last + near and near > 0) or (own_last - c) % stride == 0

    keep = blocks_by_definition(seq, block, rule)
    mask = masks.strided(seq, stride, block, local_blocks=near, causal=causal)
    mask.validate()
    expected = elements_of(keep, seq, block, causal)
    assert mask.equals(BlockMask.from_element_mask(expected, block))


@pytest.mark.parametrize(("seq", "block"), CASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("everywhere", "near"), [(0, 0), (1, 1), (2, 2), (50, 1), (0, 3)])
def test_global_local_follows_its_definition(seq, block, causal, everywhere, near):
    def rule(own_first, own_last, c):
        local = near > 0 and own_first - near < c < own_last + near
        global_row = own_first < everywhere and own_last >= 0
        return local or c < everywhere or global_row

    keep = blocks_by_definition(seq, block, rule)
    mask = masks.global_local(
        seq, block, global_blocks=everywhere, local_blocks=near, causal=causal
    )
    mask.validate()
    expected = elements_of(keep, seq, block, causal)
    assert mask.equals(BlockMask.from_element_mask(expected, block))


@pytest.mark.parametrize(("seq", "block"), CASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.8, 1.0])
def test_random_keeps_the_same_share_of_every_row(seq, block, causal, density):
    generator = torch.Generator().manual_seed(3)
    mask = masks.random(seq, density, block, batch=2, heads=3, causal=causal, generator=generator)
    mask.validate()
    assert (mask.batch, mask.heads) == (2, 3)
    band = band_elements(Band(None, 0 if causal else None), *seq)
    visible = BlockMask.from_element_mask(band, block).to_dense()[0, 0].sum(-1)
    counts = (visible * density).round().long()
    if density > 0:
        counts = counts.maximum(visible.clamp(max=1))
    keep = mask.to_dense()
    assert torch.equal(keep.sum(-1), counts.expand(2, 3, -1))
    assert torch.equal(mask.to_element_mask(), elements_of(keep, seq, block, causal))


def test_random_depends_on_the_generator_alone():
    def draw(seed):
        return masks.random(512, 0.2, 16, generator=torch.Generator().manual_seed(seed))

    assert draw(1).equals(draw(1))
    assert not draw(1).equals(draw(2))
    torch.manual_seed(5)
    first = masks.random(512, 0.2, 16)
    torch.manual_seed(5)
    assert masks.random(512, 0.2, 16).equals(first)


MILLION = 1 << 20
LONG = {
    "window": lambda: masks.sliding_window(MILLION, 2048, 128, causal=True),
    "two-sided window": lambda: masks.sliding_window(MILLION, 1024, 128),
    "global and local": lambda: masks.global_local(
        MILLION, 128, global_blocks=2, local_blocks=16, causal=True
    ),
    "random": lambda: masks.random(MILLION, 0.002, 128),
}


@pytest.mark.parametrize("name", LONG)
def test_a_million_tokens_take_little_time_and_memory(name, largest_tensor):
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        mask = LONG[name]()
        seconds.append(time.perf_counter() - start)
    with largest_tensor as largest:
        LONG[name]()
    assert 8192 <= mask.nnz_blocks < 8192 * 40
    assert mask.bits.shape[0] <= 8
    # at most a few times eight bytes for each block, where all blocks are 67 million
    assert largest.bytes <= 4 * 8 * mask.nnz_blocks
    assert min(seconds) < 1.0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: masks.causal(-1), InvalidInput, r"masks.causal: seq_lengths is out of range"),
        (lambda: masks.causal(64, 20), InvalidInput, r"masks.causal: block_size is unsupported"),
        (
            lambda: masks.sliding_window(64, 0),
            InvalidInput,
            r"window sees no key",
        ),
        (lambda: masks.sliding_window(64, 2.0), InvalidType, r"window is malformed"),
        (
            lambda: masks.strided(64, 0),
            InvalidInput,
            r"stride is too small; .*got 0$",
        ),
        (lambda: masks.strided(64, 1.5), InvalidType, r"stride is not an int"),
        (lambda: masks.strided(64, 2, local_blocks=-1), InvalidInput, r"local_blocks is too small"),
        (
            lambda: masks.strided(64, 2, causal=1),
            InvalidType,
            r"causal is not a bool",
        ),
        (
            lambda: masks.global_local(64, global_blocks=-1),
            InvalidInput,
            r"global_blocks is too",
        ),
        (lambda: masks.random(64, 1.01), InvalidInput, r"density is out of range; .*got 1.01$"),
        (lambda: masks.random(64, -0.01), InvalidInput, r"density is out of range"),
        (lambda: masks.random(64, float("nan")), InvalidInput, r"density is out of range"),
        (lambda: masks.random(64, "0.5"), InvalidType, r"density is not a number; .*got str$"),
        (lambda: masks.random(64, 0.5, heads=-1), InvalidInput, r"heads is too small"),
    ],
)
def test_refuses(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_device_argument():
    assert masks.causal(64, 16, device="meta").device.type == "meta"
    assert masks.causal(64, 16).device.type == "cpu"
    with torch.device("meta"):
        assert masks.sliding_window(64, 8, 16).device.type == "meta"


@pytest.mark.parametrize(
    "build",
    [
        lambda: masks.causal(40, 16),
        lambda: masks.sliding_window(40, 5, 16),
        lambda: masks.strided(40, 2, 16, causal=True),
        lambda: masks.global_local(40, 16, causal=True),
        lambda: masks.random(40, 0.5, 16, causal=True),
        lambda: masks.topk(torch.ones(3, 3), 2, 16, causal=True),
        lambda: masks.documents(torch.tensor([0, 4, 40], dtype=torch.int32), 16),
    ],
)
def test_masks_made_in_inference_serve_training(build):
    with torch.inference_mode():
        mask = build()
    assert not any(x.is_inference() for x in mask.tensors())
    mask.validate()


@pytest.mark.parametrize(
    "make",
    [
        lambda length: masks.causal(length),
        lambda length: masks.random(length, 0.2),
        lambda length: masks.strided(length, 2),
        lambda length: masks.global_local(length, global_blocks=10**5),
    ],
)
def test_more_blocks_than_can_be_listed_are_refused_before_they_take_memory(make):
    with pytest.raises(Unsupported, match=r"at most 2\*\*31 - 1 can be listed"):
        make(10**8)


# Sampling of blocks: counts, ranges and uniformity.


@pytest.mark.parametrize("seed", range(4))
def test_every_row_gets_its_count_within_its_limit(seed):
    generator = torch.Generator().manual_seed(seed)
    limits = torch.randint(0, 40, (50,), generator=generator)
    counts = (limits * torch.rand(50, generator=generator)).round().long()
    rows, cols = masks._sample_blocks(limits, counts, 40, generator)
    assert torch.equal(torch.bincount(rows, minlength=50), counts)
    assert bool((cols >= 0).all()) and bool((cols < limits[rows]).all())
    keys = rows * 40 + cols
    assert bool((keys[1:] > keys[:-1]).all())


@pytest.mark.parametrize(("limit", "count"), [(6, 1), (6, 2), (6, 3), (6, 4), (6, 5)])
def test_all_sets_are_equally_likely(limit, count):
    trials = 20_000
    full = torch.full((trials,), limit)
    rows, cols = masks._sample_blocks(
        full, torch.full((trials,), count), limit, torch.Generator().manual_seed(0)
    )
    chosen = torch.zeros(trials, limit, dtype=torch.int64)
    chosen[rows, cols] = 1
    codes = (chosen << torch.arange(limit)).sum(1)
    seen = torch.bincount(codes, minlength=1 << limit)
    sets = int((seen > 0).sum())
    assert sets == len(list(torch.combinations(torch.arange(limit), count)))
    expected = trials / sets
    # five standard deviations of a binomial count
    assert (seen[seen > 0] - expected).abs().max() < 5 * expected**0.5


def test_nothing_to_draw():
    none = torch.empty(0, dtype=torch.int64)
    for limits, counts, width in [
        (none, none, 0),
        (torch.zeros(3).long(), torch.zeros(3).long(), 0),
    ]:
        rows, cols = masks._sample_blocks(limits, counts, width, None)
        assert rows.numel() == cols.numel() == 0
