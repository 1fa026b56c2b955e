"""Calls of torch's `scaled_dot_product_attention` through this package, on request."""

from .flash import FLASH_NAME, register_flash_attention
from .patch import patch_sdpa

__all__ = ["FLASH_NAME", "patch_sdpa", "register_flash_attention"]
