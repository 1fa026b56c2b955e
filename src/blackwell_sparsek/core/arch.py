"""Properties of a tensor's device that kernels depend on."""

from dataclasses import replace
from functools import cache

import torch

from .env import triton_interpreted
from .target import Arch as Arch


@cache
def _cuda_arch(index: int) -> Arch:
    props = torch.cuda.get_device_properties(index)
    smem = getattr(props, "shared_memory_per_block_optin", 0)
    return Arch("cuda", 10 * props.major + props.minor, props.multi_processor_count, smem, False)


def arch_of(device: torch.device) -> Arch:
    """Describe `device` without touching any other device."""
    if device.type == "cuda" and torch.version.hip is None:
        index = torch.cuda.current_device() if device.index is None else device.index
        arch = _cuda_arch(index)
        return replace(arch, interpreted=True) if triton_interpreted() else arch
    return Arch(device.type, 0, 1, 0, triton_interpreted())
