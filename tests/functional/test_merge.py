import pytest
import torch

from blackwell_sparsek.core.errors import InvalidInput, InvalidType
from blackwell_sparsek.functional.merge import merge_states

O, LSE = torch.randn(2, 3, 4), torch.randn(2, 3)


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((O, LSE, O, None), InvalidType, r"lse_b is not a tensor"),
        ((O, LSE, O.half(), LSE), InvalidType, r"o_b has an unsupported dtype.*float32"),
        ((O, LSE.half(), O, LSE), InvalidType, r"lse_a has an unsupported dtype.*float32"),
        ((O, LSE, O[:1], LSE), InvalidInput, r"o_b has a wrong shape"),
        ((O, LSE, O, LSE[:, :2]), InvalidInput, r"lse_b has a wrong shape; expected \[2, 3\]"),
        ((O, LSE, O.to("meta"), LSE), InvalidInput, r"o_b on meta"),
    ],
)
def test_refusals(args, error, match):
    with pytest.raises(error, match="merge_states: .*" + match):
        merge_states(*args)


def test_half_precision_outputs_keep_fp32_lse():
    o, lse = merge_states(O.half(), LSE, O.half(), LSE)
    assert o.dtype == torch.float16 and lse.dtype == torch.float32
    torch.testing.assert_close(o.float(), O.half().float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, LSE + torch.tensor(2.0).log())
