"""What has no contents cannot be checked or counted, and a mask belongs beside its matrix."""

import pytest
import torch

from blackwell_sparsek import BlockMask, BSRMatrix, InvalidInput, Unsupported, masks

META = torch.device("meta")
X = torch.randn(8, 8)
KEEP = torch.ones(2, 2, dtype=torch.bool)
VISIBLE = torch.ones(32, 32, dtype=torch.bool)
INDPTR = torch.tensor([0, 1, 2], dtype=torch.int32)
INDICES = torch.tensor([0, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arg", "make"),
    [
        ("x", lambda: BSRMatrix.from_dense(X.to(META), (4, 4))),
        ("block_keep", lambda: BSRMatrix.from_mask(X.to(META), KEEP.to(META))),
        ("mask", lambda: BSRMatrix.from_element_mask(X.to(META), (X > 0).to(META), (4, 4))),
        (
            "indptr",
            lambda: BSRMatrix(
                torch.ones(2, 4, 4, device=META), INDICES.to(META), INDPTR.to(META), (8, 8)
            ),
        ),
        ("keep", lambda: BlockMask.from_dense(KEEP.to(META), 16)),
        ("visible", lambda: BlockMask.from_element_mask(VISIBLE.to(META), 16)),
        ("mask", lambda: BlockMask.from_function(lambda b, h, q, kv: q >= kv, 32, 16, device=META)),
        ("cu_seqlens", lambda: masks.documents(INDPTR.to(META), 16)),
        (
            "indptr",
            lambda: BlockMask(
                INDPTR.to(META), INDICES.to(META), seq_lengths=(32, 32), block_size=16
            ),
        ),
    ],
)
def test_without_data_nothing_is_made(arg, make):
    with pytest.raises(Unsupported, match=f"{arg} is on the meta device; expected a tensor with"):
        make()


def test_what_was_made_elsewhere_can_go_there():
    assert BSRMatrix.from_mask(X, KEEP).to(META).device == META
    assert BlockMask.from_dense(KEEP, 16).to(META).device == META


@pytest.mark.parametrize(
    "make",
    [
        lambda: BSRMatrix.from_mask(X, KEEP.to(META)),
        lambda: BSRMatrix.from_element_mask(X, (X > 0).to(META), (4, 4)),
    ],
)
def test_a_mask_on_another_device_is_refused(make):
    with pytest.raises(InvalidInput, match="are on different devices; expected one, got x on cpu"):
        make()
