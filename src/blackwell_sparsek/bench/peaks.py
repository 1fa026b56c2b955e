"""What GPUs can do at best, dense fp16 and bf16, from their data sheets."""

from typing import NamedTuple


class Peak(NamedTuple):
    """TFLOP/s of the tensor cores and TB/s of the memory."""

    tflops: float
    terabytes: float


_PEAKS = {
    "H200": Peak(989.0, 4.8),
    "H100 PCIe": Peak(756.0, 2.0),
    "H100": Peak(989.0, 3.35),
    "GH200": Peak(989.0, 4.0),
    "B200": Peak(2250.0, 8.0),
    "A100": Peak(312.0, 2.04),
    "L40S": Peak(362.0, 0.864),
    "RTX 4090": Peak(165.0, 1.008),
}


def peak_of(device_name: str) -> Peak | None:
    """The peaks of a device by its name, or None.

    Examples
    --------
    >>> peak_of("NVIDIA H200")
    Peak(tflops=989.0, terabytes=4.8)
    """
    # the longest name that fits: GH200 is no H200
    fitting = [name for name in _PEAKS if name in device_name]
    return _PEAKS[max(fitting, key=len)] if fitting else None
