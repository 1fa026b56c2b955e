"""The order in which the Hopper kernel takes softmaxes; the same body runs interpreted."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.ragged.order import launch_order
from blackwell_sparsek.ragged.plan import RaggedWorkspace, kernel_records, launch_plan
from blackwell_sparsek.ragged.tuning import LIGHT_UNITS, SOFTMAX_COST, TILE_UNITS
from blackwell_sparsek.testing.ragged_cases import RaggedCase, draw_ragged_case

TILE_M, TILE_N, LIGHT_ROWS = 32, 16, 16


def plan_of(call, programs):
    """The workspace after `launch_order`; it held nothing of use before."""
    group = call.q.shape[1] // call.kv_heads
    num_tiles = call.q.shape[0] * group // TILE_M + call.batch + 1
    lengths = (num_tiles, num_tiles, num_tiles + 1)
    memory = [torch.full((n,), -(10**6), dtype=torch.int32, device=call.q.device) for n in lengths]
    workspace = RaggedWorkspace(memory[0], memory[0], *memory)
    launch_order(call, kernel_records(call), workspace, programs, (TILE_M, TILE_N), LIGHT_ROWS)
    return workspace


def units_of(workspace):
    """Units of each query tile."""
    return workspace.ends.diff(prepend=workspace.ends.new_zeros(1)).tolist()


def is_light(units, call, q_tile):
    """Whether a query tile has few rows, by its place in its sequence."""
    group = call.q.shape[1] // call.kv_heads
    sequence = next(
        b
        for b in reversed(range(call.batch + 1))
        if int(call.cu_seqlens_q[b]) * group // TILE_M + b <= q_tile
    )
    begin = int(call.cu_seqlens_q[sequence])
    last = sequence == call.batch
    end = call.q.shape[0] if last else int(call.cu_seqlens_q[sequence + 1])
    first_row = (q_tile - begin * group // TILE_M - sequence) * TILE_M
    return (end - begin) * group - first_row <= LIGHT_ROWS


@pytest.mark.parametrize("seed", range(12))
def test_every_softmax_is_listed_once_and_long_ones_first(seed, device):
    case = draw_ragged_case(seed, dtypes=(torch.float32,), longest=(50, 200)[seed % 2])
    call = dataclasses.replace(case, block_size=None, batch_invariant=True).build(device)
    workspace = plan_of(call, 3)
    units = units_of(workspace)
    live = [i for i, count in enumerate(units) if count > 0]
    assert int(workspace.order[-1]) == len(live)
    order = workspace.order[: len(live)].tolist()
    assert sorted(order) == live
    for light in (False, True):
        kind = [i for i in order if is_light(units, call, i) == light]
        assert kind == sorted(kind, key=lambda i: (-units[i], i))


@pytest.mark.parametrize("seed", range(4))
def test_the_rest_of_the_plan_is_that_of_equal_ranges(seed, device):
    case = draw_ragged_case(seed, dtypes=(torch.float32,), longest=200)
    call = dataclasses.replace(case, block_size=None).build(device)
    workspace = plan_of(call, 3)
    plan = [torch.zeros_like(workspace.ends) for _ in range(2)]
    expected = RaggedWorkspace(plan[0], plan[0], *plan)
    launch_plan(call, kernel_records(call), expected, TILE_M, TILE_N, LIGHT_ROWS)
    assert workspace.ends.equal(expected.ends) and workspace.owners.equal(expected.owners)


def test_decoding_steps_lie_between_the_long_tiles_of_prompts(device):
    """32 rows of the prompt are a tile: 8 of them, and 4 decoding steps with 2 rows each."""
    case = RaggedCase(
        1, torch.float32, q_lens=(1, 1, 128, 1, 1), kv_lens=(90, 50, 128, 70, 90), heads=(2, 1)
    )
    call = case.build(device)
    order = plan_of(call, 1).order.tolist()
    # tiles of the prompt begin at 2 * 2 // 32 + 2
    prompt = list(range(9, 1, -1))
    assert [i for i in order[:12] if i in prompt] == prompt
    assert "".join("p" if i in prompt else "d" for i in order[:12]) == "dpdpdpdppppp"


@pytest.mark.parametrize("heads, programs, claimed", [(1, 1, False), (2, 1, True), (4, 4, False)])
def test_equal_ranges_where_a_softmax_is_long(heads, programs, claimed, device):
    """A program must have four times the longest one to do: 84 units, of the 66 of each head."""
    case = RaggedCase(
        2, torch.float32, q_lens=(64,), kv_lens=(64,), heads=(2 * heads, heads),
        layout="contiguous",
    )  # fmt: skip
    call = case.build(device)
    workspace = plan_of(call, programs)
    units = [count for count in units_of(workspace) if count]
    # 32 rows are 16 queries, of which the last sees as many tiles of 16 keys as there are before
    assert units == [n * TILE_UNITS + SOFTMAX_COST * TILE_UNITS for n in (1, 2, 3, 4)]
    assert int(workspace.order[-1]) == (4 if claimed else -1)


def test_decoding_steps_alone_have_equal_ranges(device):
    case = RaggedCase(3, torch.float32, q_lens=(1,) * 20, kv_lens=(40,) * 20, heads=(2, 1))
    workspace = plan_of(case.build(device), 1)
    assert int(workspace.order[-1]) == -1
    assert units_of(workspace)[0] == 3 * LIGHT_UNITS + SOFTMAX_COST * TILE_UNITS
