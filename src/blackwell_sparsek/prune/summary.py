"""What `sparsify_` did."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ..nn.bsr_linear import BSRLinear


def _bytes_of(module: nn.Module) -> int:
    """Parameters, and the metadata of a block-sparse layer."""
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    return sum(x.numel() * x.element_size() for x in tensors)


@dataclass(frozen=True)
class SparsifiedLayer:
    """One replaced layer: its blocks and its memory, metadata included."""

    name: str
    shape: tuple[int, int]
    blocks: int
    nnz_blocks: int
    bytes_before: int
    bytes_after: int

    @classmethod
    def of(cls, name: str, linear: nn.Linear, layer: BSRLinear) -> "SparsifiedLayer":
        """Compare a layer with what replaced it."""
        shape = (linear.out_features, linear.in_features)
        sizes = (_bytes_of(linear), _bytes_of(layer))
        return cls(name, shape, layer.blocks, layer.nnz_blocks, *sizes)

    @property
    def density(self) -> float:
        """Kept blocks over all blocks."""
        return self.nnz_blocks / max(1, self.blocks)


@dataclass(frozen=True)
class SparsifySummary:
    """The replaced layers, and the reason for each skipped one. Prints as a table."""

    layers: tuple[SparsifiedLayer, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Kept blocks over all blocks of the replaced layers."""
        blocks = sum(layer.blocks for layer in self.layers)
        return sum(layer.nnz_blocks for layer in self.layers) / max(1, blocks)

    @property
    def bytes_before(self) -> int:
        """Memory of the replaced layers before."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Memory of the replaced layers now."""
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers], default=0)
        lines = [
            f"{layer.name:<{width}}  {layer.shape[0]} x {layer.shape[1]}  "
            f"{layer.nnz_blocks}/{layer.blocks} blocks  density {layer.density:.3f}"
            for layer in self.layers
        ]
        lines += [f"{name}: skipped, {reason}" for name, reason in self.skipped.items()]
        lines.append(
            f"{len(self.layers)} layers, density {self.density:.3f}, "
            f"{self.bytes_before / 2**20:.2f} MiB -> {self.bytes_after / 2**20:.2f} MiB"
        )
        return "\n".join(lines)
