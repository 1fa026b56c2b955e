import pytest
import torch

from blackwell_sparsek.attention.merge import merge_states
from blackwell_sparsek.core.errors import InvalidInput, InvalidType

OUT, LSE = torch.randn(2, 3, 4), torch.randn(2, 3)


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((OUT, LSE, OUT, None), InvalidType, r"lse_b is not a tensor"),
        ((OUT, LSE, OUT.half(), LSE), InvalidType, r"o_b has an unsupported dtype.*float32"),
        ((OUT, LSE.half(), OUT, LSE), InvalidType, r"lse_a has an unsupported dtype.*float32"),
        ((OUT, LSE, OUT[:1], LSE), InvalidInput, r"o_b has a wrong shape"),
        ((OUT, LSE, OUT, LSE[:, :2]), InvalidInput, r"lse_b has a wrong shape; expected \[2, 3\]"),
        ((OUT, LSE, OUT.to("meta"), LSE), InvalidInput, r"o_b on meta"),
    ],
)
def test_refusals(args, error, match):
    with pytest.raises(error, match="merge_states: .*" + match):
        merge_states(*args)


def test_half_precision_outputs_keep_fp32_lse():
    o, lse = merge_states(OUT.half(), LSE, OUT.half(), LSE)
    assert o.dtype == torch.float16 and lse.dtype == torch.float32
    assert o.equal(OUT.half())
    torch.testing.assert_close(lse, LSE + torch.tensor(2.0).log())
