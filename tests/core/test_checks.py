import re

import pytest
import torch

from blackwell_sparsek.core import checks
from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported

X = torch.zeros(2, 3)


def refused(error, text, check, *args):
    """The check raises exactly this type with exactly this message."""
    with pytest.raises(error, match=f"^{re.escape(text)}$") as caught:
        check(*args)
    assert caught.type is error


def test_the_grammar():
    assert checks.message("op", "x", "is odd", "an even one", 3) == (
        "op: x is odd; expected an even one, got 3"
    )


def test_tensor():
    checks.check_tensor("op", "x", X)
    checks.check_tensor("op", "x", torch.nn.Parameter(X))
    text = "op: x is not a tensor; expected torch.Tensor, got list"
    refused(InvalidType, text, checks.check_tensor, "op", "x", [1.0])
    text = "op: x has a sparse layout; expected torch.strided, got torch.sparse_coo"
    refused(InvalidType, text, checks.check_tensor, "op", "x", X.to_sparse())
    nested = torch.nested.nested_tensor([X], layout=torch.jagged)
    text = "op: x is a tensor subclass; expected a plain tensor, got nested tensor"
    refused(Unsupported, text, checks.check_tensor, "op", "x", nested)


def test_dtype():
    checks.check_dtype("op", "x", X, (torch.float16, torch.float32))
    text = (
        "op: x has an unsupported dtype; expected one of torch.float16, torch.bfloat16, "
        "got torch.float32"
    )
    refused(InvalidType, text, checks.check_dtype, "op", "x", X, (torch.float16, torch.bfloat16))


def test_rank():
    checks.check_rank("op", "x", X, "[M, K]")
    checks.check_rank("op", "x", X[0], "[K]")
    text = "op: x has a wrong rank; expected [B, M, K], got [2, 3]"
    refused(InvalidInput, text, checks.check_rank, "op", "x", X, "[B, M, K]")
    refused(
        InvalidInput,
        "op: x has a wrong rank; expected [K], got [2, 3]",
        checks.check_rank,
        *("op", "x", X, "[K]"),
    )


def test_shape():
    checks.check_shape("op", "x", X, [2, 3])
    checks.check_shape("op", "x", torch.zeros(()), ())
    text = "op: x has a wrong shape; expected [2, 4], got [2, 3]"
    refused(InvalidInput, text, checks.check_shape, "op", "x", X, (2, 4))
    text = "op: x has a wrong shape; expected [2], got [2, 3]"
    refused(InvalidInput, text, checks.check_shape, "op", "x", X, (2,))


def test_same_device():
    checks.check_same_device("op", {"a": X, "b": X, "c": None})
    checks.check_same_device("op", {"a": None})
    text = "op: arguments are on different devices; expected one, got a on cpu, b on meta"
    tensors = {"a": X, "b": X.to("meta"), "c": None}
    refused(InvalidInput, text, checks.check_same_device, "op", tensors)


def test_same_dtype():
    checks.check_same_dtype("op", {"a": X, "b": X})
    text = (
        "op: a/b have different dtypes; expected one dtype (cast them, or run under "
        "torch.autocast), got a torch.float32, b torch.float16"
    )
    refused(InvalidType, text, checks.check_same_dtype, "op", {"a": X, "b": X.half()})


def test_last_dim_contiguous():
    check = checks.check_last_dim_contiguous
    check("op", "x", X)
    check("op", "x", torch.zeros(3, 8)[:, :5])
    # strides of dimensions of one or no element mean nothing
    check("op", "x", torch.zeros(1, 3).T)
    check("op", "x", torch.zeros(3, 0, 2).transpose(0, 2))
    text = (
        "op: x is not contiguous in its last dimension; expected stride 1 there (call "
        ".contiguous()), got strides (1, 3)"
    )
    refused(InvalidInput, text, check, "op", "x", X.T)
    refused(InvalidInput, text.replace("(1, 3)", "(3, 2)"), check, "op", "x", X[:, ::2])


@pytest.mark.parametrize(
    ("shape", "strides", "shared"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (1, 2), False),
        ((2, 3), (8, 2), False),
        ((2, 3), (2, 1), True),
        ((2, 3), (1, 1), True),
        ((2, 3), (0, 1), True),
        ((2, 2, 3), (6, 3, 1), False),
        ((2, 2, 3), (5, 3, 1), True),
        # strides of dimensions of one or no element mean nothing
        ((1, 3), (0, 1), False),
        ((0, 3), (0, 0), False),
        ((), (), False),
    ],
)
def test_elements_at_one_address(shape, strides, shared):
    x = torch.zeros(40).as_strided(shape, strides)
    assert checks.shares_elements(x) is shared


def test_no_data():
    checks.check_has_data("op", "x", X)
    text = (
        "op: x is on the meta device; expected a tensor with data (make it on another device, then "
        "call .to('meta')), got no data"
    )
    refused(Unsupported, text, checks.check_has_data, "op", "x", X.to("meta"))


@pytest.mark.parametrize("value", [1, None, "True"])
def test_flag(value):
    checks.check_flag("op", "causal", True)
    checks.check_flag("op", "causal", False)
    text = f"op: causal is not a bool; expected bool, got {type(value).__name__}"
    refused(InvalidType, text, checks.check_flag, "op", "causal", value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_finite(value):
    for good in (0.0, -1e30, 3):
        checks.check_finite("op", "scale", good)
    text = f"op: scale must be finite; expected a finite number, got {value}"
    refused(InvalidInput, text, checks.check_finite, "op", "scale", value)


def test_choice():
    checks.check_choice("op", "act", None, (None, "relu"))
    checks.check_choice("op", "act", "relu", (None, "relu"))
    text = "op: act is unknown; expected one of None, 'relu', got 'tanh'"
    refused(InvalidInput, text, checks.check_choice, "op", "act", "tanh", (None, "relu"))
