"""Rounding to fp8 in plain PyTorch: scales from magnitudes, and the rounding itself."""

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The largest finite values.
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# Scales do not fall below this, so that their reciprocals are finite.
SMALLEST_SCALE = 2.0**-120


def finite_magnitude(x: torch.Tensor) -> torch.Tensor:
    """|x|, and 0 where x is infinite or NaN: scales follow the finite values."""
    return torch.where(x.isfinite(), x.abs(), 0.0)


def scales_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scales that bring magnitudes up to `largest`, fp32, to the largest value of `dtype`."""
    # divide by a tensor: on a GPU, torch replaces division by a number with its reciprocal
    limit = torch.full_like(largest, LARGEST[dtype])
    scales = (largest / limit).clamp_min(SMALLEST_SCALE)
    return torch.where(largest == 0, 1.0, scales)


def within_range(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scaled values that a cast to `dtype` rounds as the kernels do: saturated, NaN kept."""
    limit = LARGEST[dtype]
    # drop the sign of NaN, as the conversion instruction of the GPU does
    return torch.where(scaled.isnan(), torch.nan, scaled.clamp(-limit, limit))
