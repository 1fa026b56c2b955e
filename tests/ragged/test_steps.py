"""Which row of q belongs to which sequence; the same body runs interpreted."""

import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.ragged.steps import launch_steps
from blackwell_sparsek.testing.poison import poisoned_empty
from blackwell_sparsek.testing.ragged_cases import RaggedCase


def steps_of(call):
    with poisoned_empty():
        lengths, places = launch_steps(call)
    return lengths.tolist(), places.tolist()


@pytest.mark.parametrize("batch", [1, 31, 127, 128, 300])
@pytest.mark.parametrize("moved", [False, True])
def test_rows_find_their_sequences(batch, moved, device):
    """Sequences without a query at both ends and in between, and rows without a sequence."""
    rng = random.Random(batch)
    q_lens = tuple(rng.randint(0, 1) for _ in range(batch))
    kv_lens = tuple(rng.randint(0, 40) for _ in range(batch))
    case = RaggedCase(1, heads=(1, 1), q_lens=q_lens, kv_lens=kv_lens, padding=35, moved=moved)
    call = case.build(device)
    slabs = call.slabs.tolist() if moved else range(batch)
    having = [b for b in range(batch) if q_lens[b]]
    lengths, places = steps_of(call)
    assert lengths == [kv_lens[b] for b in having] + [0] * 35
    assert places == [slabs[b] for b in having] + [-1] * 35


CASE = RaggedCase(
    2, heads=(1, 1), q_lens=(1, 1, 0, 1), kv_lens=(7, 40, 3, 9), padding=2, moved=True
)


@pytest.mark.parametrize("changes, lengths", [
    # offsets that jump, fall, begin late, begin before the first row
    ({"cu_seqlens_q": [0, 1, 3, 3, 4]}, [7, -1, -1, 9, 0]),
    ({"cu_seqlens_q": [0, 1, 0, 1, 2]}, [-1, 9, 0, 0, 0]),
    ({"cu_seqlens_q": [1, 2, 3, 3, 4]}, [-1, 7, 40, 9, 0]),
    ({"cu_seqlens_q": [-1, 1, 2, 2, 3]}, [-1, 40, 9, 0, 0]),
    # lengths and rows of the cache
    ({"seqlens_k": [-1, 41, 3, 9]}, [-1, -1, 9, 0, 0]),
    ({"slabs": [-1, 0, 1, 10**6]}, [-1, 40, -1, 0, 0]),
])  # fmt: skip
def test_wrong_numbers(changes, lengths, device):
    """Length -1, which makes results NaN, and a place that exists."""
    call = CASE.build(device)
    for name, values in changes.items():
        wrong = torch.tensor(values, dtype=torch.int32, device=device)
        call = dataclasses.replace(call, **{name: wrong})
    found, places = steps_of(call)
    assert found == lengths
    for length, place in zip(found, places, strict=True):
        assert 0 <= place < call.k.shape[0] if length else place == -1
