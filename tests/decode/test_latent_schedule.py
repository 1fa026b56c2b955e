"""Which programs take which keys and head tiles of a latent cache, alone and in pairs.

The producer's own search runs here, as plain Python on integers: what it imports is replaced.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from blackwell_sparsek.decode import sm90_producer
from blackwell_sparsek.decode.tuning import LatentConfig

TILE, SCAN = LatentConfig.TILE_N, sm90_producer.SCAN.value


def tiles_of(length):
    """An empty sequence has one, so that somebody writes its output."""
    return max(-(-length // TILE), 1)


def where(condition, a, b):
    return torch.where(condition, a, b) if torch.is_tensor(condition) else a if condition else b


@pytest.fixture
def splits_of(monkeypatch):
    """A function that returns the splits that a program publishes."""
    place = SimpleNamespace()

    def counts(keys, first, CFG):
        part = [tiles_of(n) for n in place.lengths[first : first + SCAN]]
        return torch.tensor(part + [0] * (SCAN - len(part)))

    def seen(keys, first_length, sequence):
        return place.lengths[sequence], 0, place.lengths[sequence]

    def fetch(shared, tables, split, number, step, kv_head, rank, CFG):
        place.found.append(split)
        return step + split.kv_end - split.kv_tile

    fake = SimpleNamespace(
        program_id=lambda axis: place.program,
        num_programs=lambda axis: place.programs,
        sum=lambda x, axis: int(x.sum()),
        max=lambda x, axis: int(x.max()),
        where=where,
        minimum=min,
        maximum=max,
        associative_scan=lambda x, axis, add: x.cumsum(axis),
        int32=torch.int32,
    )
    for name, value in {
        "gl": fake,
        "SCAN": SCAN,
        "WORTH": sm90_producer.WORTH.value,
        "SPLIT_COST": sm90_producer.SPLIT_COST.value,
        "find_range": sm90_producer.find_range.fn,
        "kv_head_of": sm90_producer.kv_head_of.fn,
        "_tiles_of_sequences": counts,
        "keys_of_sequence": seen,
        "keys_of_length": lambda keys, length: (length, 0, length),
        "visited_tiles": lambda lo, hi, *rest: (0, tiles_of(hi)),
        "_produce_placed": fetch,
        "publish": lambda channel, number, split: None,
        "cluster_barrier": lambda: None,
        "cluster_exit_barrier": lambda: None,
        "cluster_rank": lambda: place.program % 2,
    }.items():
        monkeypatch.setattr(sm90_producer, name, value)

    def splits_of(program, programs, lengths, q_tiles, config):
        place.program, place.programs, place.lengths, place.found = program, programs, lengths, []
        keys = SimpleNamespace(batch=len(lengths), q_len=1, num_blocks=0, capacity=max(lengths))
        heads = SimpleNamespace(kv=1, group=q_tiles * config.ROWS)
        shared = SimpleNamespace(
            keys=keys, first_length=lengths[0], heads=heads, splits=None, places_ptr=None
        )
        produce = SimpleNamespace(list_ptr=None, page_table_ptr=None, num_pages=0)
        produce.num_splits = programs // (len(lengths) * q_tiles)
        sm90_producer.produce_tiles.fn(produce, shared, config)
        return place.found

    return splits_of


LENGTHS = [[8192], [8192] * 16, [100] * 70, [5000, 1, 0, 64, 65, 9000, 300], [0, 3], [700] * 200]


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("q_tiles", [2, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{len(x)}x{x[0]}")
def test_every_key_meets_every_head_tile_once(lengths, q_tiles, paired, splits_of):
    config = LatentConfig(None, None, 40, PAIRED=paired)
    programs, pair = 132, config.pair
    covered, owners, taken = {}, {}, []
    for program in range(programs):
        splits = splits_of(program, programs, lengths, q_tiles, config)
        taken.append([split[:1] + split[2:5] for split in splits])
        # as the consumer numbers programs, so that parts of a pair lie apart
        own = program // pair + program % pair * (programs // pair)
        for split in splits:
            softmax = (int(split.sequence), int(split.head_tile))
            assert 0 <= split.kv_tile < split.kv_end
            covered.setdefault(softmax, []).extend(range(split.kv_tile, split.kv_end))
            begins = split.origin + split.softmax_start // split.range_tiles
            ends = split.origin + (split.softmax_start + split.count - 1) // split.range_tiles
            owners.setdefault(softmax, {})[own] = (begins, ends)
    for sequence, length in enumerate(lengths):
        for head_tile in range(q_tiles):
            tiles = covered.pop((sequence, head_tile), [])
            assert sorted(tiles) == list(range(tiles_of(length)))
    assert not covered
    slots = []
    for parts in owners.values():
        # whoever has a part is among those that are combined, and all agree on who these are
        [(begins, ends)] = set(parts.values())
        assert sorted(parts) == list(range(begins, ends + 1))
        if begins != ends:
            slots += [2 * own + (own == begins) for own in parts]
    assert len(set(slots)) == len(slots) and all(slot < 2 * programs for slot in slots)
    if paired:
        # both programs of a cluster go through the same keys, in step
        assert taken[::2] == taken[1::2]
