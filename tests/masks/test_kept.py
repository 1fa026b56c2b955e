import pytest
import torch

from blackwell_sparsek.masks.topk import kept_blocks


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (40, 100), (64, 64), (33, 17)])
@pytest.mark.parametrize("block", [(16, 16), (16, 32)])
def test_elements(sq, sk, block):
    mb, nb = -(-sq // block[0]), -(-sk // block[1])
    keep = torch.rand(2, 3, mb, nb, generator=torch.Generator().manual_seed(0)) < 0.4
    most = int(keep.sum(-1).max())
    expected = keep.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    for room in (most, most + 1, nb + 5):
        mask = kept_blocks(keep, room, block, (sq, sk))
        mask.validate()
        assert torch.equal(mask.to_element_mask(), expected[:, :, :sq, :sk])
        assert mask.nnz_blocks == 6 * mb * min(room, nb)


def test_fillers_come_from_the_end():
    keep = torch.zeros(1, 1, 1, 8, dtype=torch.bool)
    keep[..., 2] = True
    mask = kept_blocks(keep, 3, (16, 16), (16, 128))
    assert mask.forward.indices.tolist() == [6, 7, 2]
    assert mask.forward.bits_id.tolist() == [0, 0, -1]


def test_no_wait_under_compile():
    keep = torch.rand(1, 2, 4, 5) < 0.4

    def build(keep):
        return kept_blocks(keep, 5, (16, 16), (64, 80)).tensors(for_gradients=False)

    found = torch.compile(build, fullgraph=True, backend="eager")(keep)
    assert all(map(torch.equal, found, build(keep)))
