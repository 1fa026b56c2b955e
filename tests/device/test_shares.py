"""Equal shares: they cover the line of work once, and pieces know their owner."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from blackwell_sparsek.device.schedule import owner_of, share_of


@triton.jit
def _shares_kernel(spans_ptr, owners_ptr, total, programs):
    """The stretch of each program, and of each of its pieces the owner."""
    program = tl.program_id(0)
    begin, end = share_of(program, total, programs)
    tl.store(spans_ptr + 2 * program, begin)
    tl.store(spans_ptr + 2 * program + 1, end)
    for piece in range(begin, end):
        tl.store(owners_ptr + piece, owner_of(piece, total, programs))


@pytest.mark.parametrize("total", [0, 1, 2, 5, 6, 7, 12, 13, 40])
@pytest.mark.parametrize("programs", [1, 2, 6, 13])
def test_shares_cover_the_work_once(total, programs, device):
    spans = torch.full((programs, 2), -1, dtype=torch.int32, device=device)
    owners = torch.full((total + 1,), -1, dtype=torch.int32, device=device)
    _shares_kernel[(programs,)](spans, owners, total, programs)
    expected = 0
    for program, (begin, end) in enumerate(spans.tolist()):
        assert begin == expected and end - begin in (total // programs, -(-total // programs))
        assert owners[begin:end].eq(program).all()
        expected = end
    assert expected == total


def test_totals_near_the_end_of_int32(device):
    total, programs = 2**31 - 1, 264
    each, more = divmod(total, programs)

    @triton.jit
    def last_share_kernel(out_ptr, total, programs):
        """The stretch of the last program, and who owns its last piece."""
        begin, end = share_of(programs - 1, total, programs)
        tl.store(out_ptr, begin)
        tl.store(out_ptr + 1, end)
        tl.store(out_ptr + 2, owner_of(total - 1, total, programs))

    out = torch.zeros(3, dtype=torch.int32, device=device)
    last_share_kernel[(1,)](out, total, programs)
    assert out.tolist() == [total - each, total, programs - 1] and more < programs
