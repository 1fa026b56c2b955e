"""Seeded inputs for tests: the same seed gives the same values on every device."""

import torch


def normal(
    *shape: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    scale: float = 1.0,
) -> torch.Tensor:
    """Normal values of deviation `scale`, drawn on the CPU so that devices agree."""
    values = torch.randn(shape, generator=_generator(seed), dtype=torch.float32)
    return (values * scale).to(device=device, dtype=dtype)


def integers(
    *shape: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    bound: int = 3,
) -> torch.Tensor:
    """Whole numbers in [-bound, bound] as floats: sums of products are exact while they stay
    within the integers of the accumulator, so results are compared bit by bit.
    """
    values = torch.randint(-bound, bound + 1, shape, generator=_generator(seed))
    return values.to(device=device, dtype=dtype)


def qkv(
    batch: int,
    q_heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    *,
    seed: int,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [B, Hq, Sq, D], keys [B, Hkv, Sk, D] and values [B, Hkv, Sk, Dv]."""
    v_dim = head_dim if v_dim is None else v_dim
    q = normal(batch, q_heads, q_len, head_dim, seed=seed, dtype=dtype, device=device)
    k = normal(batch, kv_heads, kv_len, head_dim, seed=seed + 1, dtype=dtype, device=device)
    v = normal(batch, kv_heads, kv_len, v_dim, seed=seed + 2, dtype=dtype, device=device)
    return q, k, v


def block_pattern(
    *shape: int,
    density: float,
    seed: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """A random bool pattern of blocks [..., rows, cols].

    Rows have different numbers of blocks. If there is more than one row, row 0 is empty: the case
    that block-sparse code forgets.
    """
    keep = torch.rand(shape, generator=_generator(seed)) < density
    if shape[-2] > 1:
        keep[..., 0, :] = False
    return keep.to(device)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)
