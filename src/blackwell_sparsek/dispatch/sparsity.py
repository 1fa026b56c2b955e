"""`bsk.sparsity_report(model)`: the blocks, parameters and bytes of a model, layer by layer."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..core.checks import message
from ..core.errors import InvalidInput, InvalidType
from .model_report import attention_layers


class LayerSparsity(NamedTuple):
    """One layer of a `SparsityReport`.

    Attributes
    ----------
    name : str
        The name of the module in its model.
    kind : str
        "linear" or "attention".
    pattern : str
        "dense", "blocks of 16 x 16", or what attention was configured with.
    kept, total : int
        Stored blocks of a weight (1 of 1 for a dense one), blocks or (query, key) pairs of a causal
        prompt that attention computes. `kept` is None if it follows from the values of a prompt.
    unit : str
        What is counted: "blocks" or "pairs".
    parameters : int
        Parameters that are stored in this layer; of attention those that no linear layer has.
    bytes : int
        Memory of these and of the layer's buffers, such as the indices of stored blocks.
    """

    name: str
    kind: str
    pattern: str
    kept: int | None
    total: int
    unit: str
    parameters: int
    bytes: int

    @property
    def is_sparse(self) -> bool:
        """Whether the layer has a pattern, even one that keeps everything."""
        return self.pattern != "dense"

    @property
    def density(self) -> float | None:
        """`kept` over `total`; None if it follows from the values of a prompt."""
        return None if self.kept is None else self.kept / max(1, self.total)

    def __str__(self) -> str:
        kept = f"{self.total} {self.unit}, kept by their values"
        if self.kept is not None:
            kept = f"{self.kept}/{self.total} {self.unit}  density {self.density:.3f}"
        stored = f"{self.parameters} parameters  {self.bytes} bytes"
        shown = f"  {kept}" if self.is_sparse else ""
        return f"{self.name}  {self.kind}, {self.pattern}{shown}  {stored}"


class SparsityReport(NamedTuple):
    """The result of `sparsity_report`; prints as a table.

    `layers` are the linear and attention layers in the order of the model, `tokens` the length of
    the prompt for which attention is counted. What none of these layers has, such as embeddings and
    norms, is `other_parameters` and `other_bytes`, so that all add up to what the model stores.
    """

    layers: tuple[LayerSparsity, ...]
    tokens: int
    other_parameters: int
    other_bytes: int

    @property
    def parameters(self) -> int:
        """Parameters that the model stores."""
        return self.other_parameters + sum(layer.parameters for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Memory of all parameters and buffers."""
        return self.other_bytes + sum(layer.bytes for layer in self.layers)

    def __str__(self) -> str:
        affected = sum(layer.is_sparse for layer in self.layers)
        other = f"others  {self.other_parameters} parameters  {self.other_bytes} bytes"
        last = (
            f"{affected} of {len(self.layers)} layers are sparse; "
            f"{self.parameters} parameters, {self.bytes} bytes"
        )
        return "\n".join([*map(str, self.layers), other, last])


def sparsity_report(model: torch.nn.Module, *, tokens: int = 4096) -> SparsityReport:
    """Count what each layer of a model keeps and stores.

    Linear layers, `bsk.nn.BSRLinear`, the attention layers of `bsk.nn`, and those of transformers
    under a name of `bsk.integrations.huggingface.register`. Nothing runs; `bsk.explain(model)`
    tells which implementation would.

    Parameters
    ----------
    model : torch.nn.Module
        On any device, also meta. A parameter that layers share counts in the first of them.
    tokens : int
        Length of the causal prompt for which the blocks or pairs of attention are counted.

    Returns
    -------
    SparsityReport
        `.layers`, a record for each layer; `.parameters` and `.bytes` of the model.

    Raises
    ------
    InvalidInput
        If `tokens` is below 1; `InvalidType` if `model` is no module.

    Examples
    --------
    >>> import torch, blackwell_sparsek as bsk
    >>> layers = bsk.nn.BSRLinear(64, 64, 16, sparsity=0.75, bias=False), torch.nn.Linear(64, 8)
    >>> report = bsk.sparsity_report(torch.nn.Sequential(*layers))
    >>> [(layer.density, layer.parameters) for layer in report.layers]
    [(0.25, 1024), (1.0, 520)]
    >>> attention = bsk.nn.IndexerAttention(32, heads=4, kv_heads=1, top_k=16)
    >>> print(bsk.sparsity_report(attention, tokens=64).layers[0])
    IndexerAttention  attention, best 16 keys  904/2080 pairs  density 0.435  0 parameters  0 bytes
    """
    op = "sparsity_report"
    if not isinstance(model, torch.nn.Module):
        got = type(model).__name__
        raise InvalidType(message(op, "model", "has a wrong type", "torch.nn.Module", got))
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        got = type(tokens).__name__
        raise InvalidType(message(op, "tokens", "is not an int", "int", got))
    if tokens < 1:
        raise InvalidInput(message(op, "tokens", "is too small", "at least 1", tokens))
    attending = dict(attention_layers(model))
    layers, counted = [], set[int]()
    for name, module in model.named_modules():
        found = _pattern_of(module, attending.get(module), tokens, module in attending)
        if found is not None:
            stored = _stored(module, counted)
            layers.append(LayerSparsity(name or type(module).__name__, *found, *stored))
    others = [_stored(module, counted) for module in model.modules()]
    return SparsityReport(
        tuple(layers), tokens, sum(n for n, _ in others), sum(size for _, size in others)
    )


def _pattern_of(
    module: Any, choice: Any, tokens: int, attends: bool
) -> tuple[str, str, int | None, int, str] | None:
    """Kind, pattern, and what is kept; None for modules that are neither linear nor attention."""
    if attends:
        if choice is None:
            pairs = tokens * (tokens + 1) // 2
            return "attention", "dense", pairs, pairs, "pairs"
        return "attention", choice.pattern, *choice.kept_of(tokens)
    if isinstance(getattr(module, "nnz_blocks", None), int):
        height, width = module.block_shape
        pattern = f"blocks of {height} x {width}"
        return "linear", pattern, module.nnz_blocks, module.blocks, "blocks"
    return ("linear", "dense", 1, 1, "blocks") if isinstance(module, torch.nn.Linear) else None


def _stored(module: torch.nn.Module, counted: set[int]) -> tuple[int, int]:
    """Parameters of a module's own, and bytes with its buffers; each tensor counts once."""
    parameters = list(_first_seen(module.parameters(recurse=False), counted))
    buffers = _first_seen(module.buffers(recurse=False), counted)
    size = sum(x.numel() * x.element_size() for x in (*parameters, *buffers))
    return sum(x.numel() for x in parameters), size


def _first_seen(tensors: Iterable[torch.Tensor], counted: set[int]) -> Iterable[torch.Tensor]:
    for tensor in tensors:
        if id(tensor) not in counted:
            counted.add(id(tensor))
            yield tensor
