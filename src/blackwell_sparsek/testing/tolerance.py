"""The error budget: how far a result may be from the exact one.

The budget is measured, not chosen: plain PyTorch at the precision of the result has some error
against fp64, and a result may have twice that. No test sets an `atol=1e-2`.
"""

import torch


def assert_within_budget(
    actual: torch.Tensor,
    exact: torch.Tensor,
    same_precision: torch.Tensor,
    *,
    factor: float = 2.0,
    roundings: float = 1.0,
    what: str = "",
) -> None:
    """Fail unless `actual` is as close to `exact` as plain PyTorch is, within `factor`.

    All three must hold, with e(x) = |x - exact| and eps that of the dtype of `actual`:

    - infinities are in the same places with the same signs, and `actual` has no NaN;
    - max e(actual) <= factor * max e(same_precision) + roundings * eps * max|exact|;
    - mean e(actual) <= 3/4 factor * mean e(same_precision) + roundings * eps * mean|exact|.

    Parameters
    ----------
    actual : the result under test, any float dtype
    exact : the fp64 oracle, same shape. A NaN in it is a defect of the test: nothing matches it.
    same_precision : plain PyTorch in the dtype of `actual`, same shape. Where it is not finite
        although `exact` is (a softmax over no keys, say), it grants no budget.
    factor, roundings : 2 and 1 unless an operation gives a reason for more
    what : names the result in the failure

    Examples
    --------
    >>> import torch
    >>> a, b = torch.randn(8, 8), torch.randn(8, 8)
    >>> assert_within_budget(a @ b, a.double() @ b.double(), a @ b)
    """
    label = what or "result"
    _check_shapes(label, actual, exact, same_precision)
    if exact.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    if actual.dtype == torch.float64:
        # the oracle rounds as often as an fp64 result does
        eps *= 8
    eps *= roundings
    exact = exact.detach().double()
    got = actual.detach().to(exact.device).double()
    plain = same_precision.detach().to(exact.device).double()

    _check_nonfinite(label, got, exact)
    finite = exact.isfinite()
    if not finite.any():
        return
    scale = exact.abs()[finite]
    plain_error = (plain - exact).abs()[finite & plain.isfinite()]
    error = torch.where(finite, (got - exact).abs(), 0.0)

    plain_max = plain_error.max().item() if plain_error.numel() else 0.0
    budget = factor * plain_max + eps * scale.max().item()
    if (worst := error.max().item()) > budget:
        at = _coordinate(error.argmax(), error.shape)
        raise AssertionError(
            f"{label}: error {worst:.4g} at {at} is over the budget {budget:.4g}: "
            f"got {got[at].item():.9g}, exact {exact[at].item():.9g}; plain PyTorch errs by "
            f"{plain_max:.4g} (x{factor:g}), eps*max|exact| gives {eps * scale.max().item():.4g}; "
            f"{int((error > budget).sum())} of {error.numel()} elements are over"
        )
    plain_mean = plain_error.mean().item() if plain_error.numel() else 0.0
    mean_budget = 0.75 * factor * plain_mean + eps * scale.mean().item()
    if (mean := error[finite].mean().item()) > mean_budget:
        at = _coordinate(error.argmax(), error.shape)
        raise AssertionError(
            f"{label}: mean error {mean:.4g} is over the budget {mean_budget:.4g}: plain PyTorch's "
            f"mean is {plain_mean:.4g}; the worst element, at {at}, is {got[at].item():.9g}, exact "
            f"{exact[at].item():.9g}"
        )


def roundings_of_exponents(out: torch.Tensor, exact_lse: torch.Tensor, has_softcap: bool) -> float:
    """The `roundings` of an output in fp32; 1 in other dtypes, whose own rounding is larger.

    A kernel rounds a score times log2(e), and the error of an exponent is a relative error of a
    weight: half an eps for each unit of the score, in the numerator and in the denominator. The
    largest scores of a row are about its lse. A softcap adds the 4 ulp of `device.softmax.tanh`.
    """
    finite = exact_lse[exact_lse.isfinite()]
    if out.dtype != torch.float32 or finite.numel() == 0:
        return 1.0
    return 1.0 + (5.0 if has_softcap else 1.0) * finite.abs().max().item()


def assert_lse_within_budget(
    lse: torch.Tensor, exact: torch.Tensor, same_precision: torch.Tensor, *, what: str = "lse"
) -> None:
    """Fail unless the logarithm of a softmax denominator is within its budget."""
    # tensor cores truncate their sums, where float32 on the CPU and in cuBLAS rounds
    factor = 4.0 if lse.is_cuda else 2.0
    # Base 2 rounds four more times, by half an eps each: log2(e) in the factor of scores, ln 2, and
    # the products with both. Plain PyTorch may be exact where a query sees one key.
    assert_within_budget(lse, exact, same_precision, factor=factor, roundings=3.0, what=what)


def _check_shapes(label: str, actual: torch.Tensor, *others: torch.Tensor) -> None:
    shapes = [tuple(x.shape) for x in (actual, *others)]
    if len(set(shapes)) > 1:
        names = ("actual", "exact", "same_precision")
        got = ", ".join(f"{n} {list(s)}" for n, s in zip(names, shapes, strict=True))
        raise AssertionError(f"{label}: shapes differ: {got}")
    if not actual.is_floating_point():
        raise AssertionError(f"{label}: a budget is for float results, got {actual.dtype}")


def _check_nonfinite(label: str, got: torch.Tensor, exact: torch.Tensor) -> None:
    if exact.isnan().any():
        at = _coordinate(exact.isnan().int().argmax(), exact.shape)
        raise AssertionError(f"{label}: the reference is NaN at {at}, so nothing can match it")
    infinite = torch.where(exact.isinf(), exact, 0.0)
    wrong = got.isnan() | (torch.where(got.isinf(), got, 0.0) != infinite)
    if wrong.any():
        at = _coordinate(wrong.int().argmax(), exact.shape)
        raise AssertionError(
            f"{label}: got {got[at].item()} at {at}, exact {exact[at].item():.9g} (budget: NaN "
            f"nowhere, inf where the reference has it); {int(wrong.sum())} of {wrong.numel()} "
            f"elements so"
        )


def _coordinate(flat: torch.Tensor, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(flat, shape))
