"""Stray writes around workspaces and results are found, and the library's kernels make none."""

import pytest
import torch

pytest.importorskip("triton")

from blackwell_sparsek.launch import templates, workspace
from blackwell_sparsek.launch.recording import Recording
from blackwell_sparsek.launch.workspace import scratch, self_resetting_counters
from blackwell_sparsek.testing.attention_cases import AttnCase
from blackwell_sparsek.testing.canaries import CANARY, GUARD_BYTES, canaries
from blackwell_sparsek.testing.fixed_calls import fixed_calls, supported

CPU = torch.device("cpu")
# Calls whose kernels have workspaces, small enough for the interpreter.
WITH_WORKSPACES = ("topk_pages/", "attention_decode/several-queries", "sddmm/32x16", "matmul/fp32")


def beside(x, elements):
    """A view of the elements after the end of `x`, or before its start if negative."""
    flat = x.flatten()
    begin = flat.numel() if elements > 0 else elements
    return flat.as_strided((abs(elements),), (1,), flat.storage_offset() + begin)


@pytest.mark.parametrize("elements", [1, -1, 700, -700])
@pytest.mark.parametrize("make", ["empty", "zeros"])
def test_stray_writes_are_found(elements, make):
    side = "after" if elements > 0 else "before"
    with pytest.raises(AssertionError, match=f"bytes {side} memory from"), canaries():
        beside(getattr(torch, make)(5), elements).fill_(3.0)


def test_the_nearest_byte_is_told():
    with canaries() as watched:
        x = torch.zeros(4, dtype=torch.int32)
        beside(x, 3)[2:].fill_(-1)
        with pytest.raises(AssertionError, match=r"4 bytes after .* at byte \+8 from its end"):
            watched.check()
        watched.regions.clear()


def test_the_workspace_that_was_overrun_is_named():
    with canaries() as watched:
        beside(scratch((3, 3), torch.float32, CPU), 1).zero_()
        with pytest.raises(AssertionError, match=r"launch.workspace:\d+ \(scratch\)"):
            watched.check()
        watched.regions.clear()


def test_writes_inside_are_not_reported():
    with canaries() as watched:
        made = [
            torch.empty(7),
            torch.zeros(3, 5).to(torch.float16),
            torch.empty_like(torch.ones(2)),
        ]
        made += [torch.ones(3).new_empty(4), torch.empty_strided((2, 3), (7, 1))]
        made += [scratch((9,), torch.float32, CPU), self_resetting_counters(5, CPU)]
        for x in made:
            x.fill_(1.0)
        assert len(watched.regions) >= 12


def test_memory_is_as_it_was_asked_for():
    with canaries():
        assert torch.zeros(3).tolist() == [0.0] * 3
        assert torch.empty(2, dtype=torch.float16).isnan().all()
        assert torch.empty_strided((2, 3), (7, 1)).stride() == (7, 1)
        assert torch.empty(0).shape == (0,)
        assert torch.zeros(1 << 10).data_ptr() % 16 == 0
        assert torch.ones(2, requires_grad=True).new_empty(2).requires_grad is False


def test_replayed_calls_have_gaps_between_their_parts():
    record = Recording(scratch=[torch.empty(100), torch.empty(3)])
    with canaries() as watched:
        replayed = templates.RecordedLaunches([], record, CPU)
        memory = replayed._memory(0, False)
        first, second = replayed._offsets
        assert second - first >= 400 + GUARD_BYTES
        assert (memory[first + 400 : first + 400 + GUARD_BYTES] == CANARY).all()
        memory[second : second + 12] = 0
        watched.check()
        memory[second + 12] = 0
        with pytest.raises(AssertionError, match="part 1 of a replayed call's scratch"):
            watched.check()
        watched.regions.clear()
    assert workspace.gap_bytes == 0
    # without canaries the parts follow each other
    assert templates.RecordedLaunches([], record, CPU)._offsets == [0, 512]


@pytest.mark.parametrize("name", WITH_WORKSPACES)
def test_kernels_stay_inside(name, interpreted):
    calls = [c for c in fixed_calls(torch.device("cuda")) if c.name.startswith(name)]
    call = next(c for c in calls if c.name.endswith("/triton"))
    with canaries() as watched:
        call.make(CPU)()
        watched.check()
        assert any(x.where.startswith("blackwell_sparsek.") for x in watched.regions)


def test_the_backward_kernels_stay_inside(interpreted):
    from blackwell_sparsek.attention.api import attention

    q, k, v, _ = AttnCase(1, torch.float32, heads=(2, 1), lengths=((9, 20),)).build(CPU)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with canaries() as watched:
        out = attention(*inputs, impl="triton")
        torch.autograd.grad(out.sum(), inputs)
        watched.check()
        assert any("(scratch)" in x.where for x in watched.regions)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(12))
def test_every_kernel_and_its_replay_stay_inside(part):
    device = torch.device("cuda", torch.cuda.current_device())
    for call in fixed_calls(device)[part::12]:
        with canaries() as watched:
            if supported(call, device) is None:
                run = call.make(device)
                for _ in range(3):
                    run()
                    watched.check()
