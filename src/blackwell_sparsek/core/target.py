"""What a kernel is planned for; needs no framework."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """A device as kernels see it. `sm` is 0 for anything that is not a CUDA GPU."""

    kind: str
    sm: int
    num_sms: int
    smem_bytes: int
    interpreted: bool

    def __str__(self) -> str:
        return f"sm_{self.sm}" if self.sm else self.kind
