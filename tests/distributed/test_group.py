"""What ranks have agreed on is known to all of a group or to none."""

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import decode, group
from blackwell_sparsek.distributed.group import Members


class Group:
    """Stands for a process group."""


@pytest.fixture
def asked(monkeypatch):
    """The groups whose ranks were asked to agree, as if they talked by a GPU."""
    found = []

    def agree(op, members, text, failure, device):
        found.append(type(members.group).__name__)
        return [text] * members.size

    monkeypatch.setattr(group, "talking_device", lambda members: torch.device("cuda", 0))
    monkeypatch.setattr(group, "agree", agree)
    return found


def compare(of_group, batch=1):
    q, v = torch.zeros(batch, 2, 1, 8), torch.zeros(batch, 2, 4, 8)
    decode._agree(Members(of_group, 0, 2), None, q, v, ("sequence", True))


def test_a_group_agrees_once(asked):
    one = Group()
    for batch in (1, 2, 1, 2):
        compare(one, batch)
    assert len(asked) == 2


def test_a_group_at_the_place_of_an_earlier_one_agrees_anew(asked):
    """On other ranks the new one may be elsewhere, and they would wait for this one."""
    for _ in range(4):
        compare(Group())
    assert len(asked) == 4


def test_other_groups_drop_nothing_of_a_group(asked, monkeypatch):
    """Its other ranks are not in them, and go on without asking."""
    monkeypatch.setattr(group, "MOST_AGREED", 2)
    one, other = Group(), Group()
    compare(one)
    for batch in range(1, 5):
        compare(other, batch)
    compare(one)
    assert len(asked) == 5


def test_little_is_kept_of_a_group_and_nothing_after_it(asked, monkeypatch):
    monkeypatch.setattr(group, "MOST_AGREED", 2)
    before, one = len(group._AGREED), Group()
    for batch in range(1, 5):
        compare(one, batch)
    assert len(group._AGREED[one]) == 2
    del one
    gc.collect()
    assert len(group._AGREED) == before


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 512, 770, group.TEXT_BYTES])
def test_descriptions_arrive_whole_up_to_their_limit(size, monkeypatch):
    def all_gather(everyone, mine, group):
        for received in everyone:
            received.copy_(mine)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    text = ("description " * size)[:size]
    said = group.agree("test", Members(Group(), 0, 2), text, None, torch.device("cpu"))
    assert said == [text[: group.TEXT_BYTES - 3]] * 2


@pytest.mark.parametrize(
    ("impl", "reads"), [("eager", True), ("reference", True), ("triton", False)]
)
def test_lengths_are_checked_by_what_reads_them_anyway(impl, reads):
    """Reading them waits for a GPU, which kernels do not: a wrong one makes their result NaN."""
    pytest.importorskip("triton")
    q, cache = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 32, 16)
    names = ("page_table", "kv_blocks", "kv_block_size", "scale", "softcap", "k_scale", "v_scale")
    options = {**dict.fromkeys(names), "impl": impl}
    lengths = torch.tensor([33], dtype=torch.int32)
    local = decode._Local(
        Members(None, 0, 2), q, cache, cache, {**options, "cache_seqlens": lengths}
    )
    text = r"cache_seqlens\[0\] is out of range; expected 0 to 32, .*, got 33$"
    with pytest.raises(bsk.InvalidInput, match=text) if reads else nullcontext():
        local.check("sequence", True, None, None)
    lengths[0] = 32
    local.check("sequence", True, None, None)
