"""`Arch`, the device that a kernel is planned for; imports neither torch nor JAX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """The properties of a device that dispatch and tiles depend on.

    `sm` is 0 for anything that is not a CUDA GPU.
    """

    kind: str
    sm: int
    num_sms: int
    smem_bytes: int
    interpreted: bool

    def __str__(self) -> str:
        return f"sm_{self.sm}" if self.sm else self.kind
