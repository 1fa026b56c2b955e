"""`bsk.explain(model)`: which layers are sparse, and what they run."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..core.fp8 import E4M3

# Numbers of tokens for which a report names the implementation of a layer: one that decodes, and a
# prompt.
TOKENS = (1, 4096)
# By the name of an attention implementation of transformers: what a layer does, or None if it is
# dense. `integrations.huggingface.register` fills it.
ATTENTION: dict[str, Callable[[Any], object]] = {}


class SparseLayer(NamedTuple):
    """A block-sparse layer: sizes, stored blocks, and the implementation by number of tokens."""

    name: str
    shape: tuple[int, int]
    block_shape: tuple[int, int]
    nnz_blocks: int
    blocks: int
    chosen: dict[int, str | None]

    @property
    def density(self) -> float:
        """Stored blocks over all blocks."""
        return self.nnz_blocks / max(1, self.blocks)

    def __str__(self) -> str:
        (rows, cols), (bh, bw) = self.shape, self.block_shape
        runs = "".join(f"  {_count(n, 'token')}: {impl}" for n, impl in self.chosen.items())
        return (
            f"{self.name}  {rows} x {cols} in {bh} x {bw}  {self.nnz_blocks}/{self.blocks} blocks  "
            f"density {self.density:.3f}{runs}"
        )


class ModelReport(NamedTuple):
    """The sparse layers of a model, how many linear ones are dense, and what attention does.

    `attention` maps the index of a layer to its sparse attention, None if it is dense; it is empty
    for models that do not use this package's attention through transformers. `choosing` maps the
    names of attention layers of `bsk.nn` to how they choose keys. Prints as a table.
    """

    layers: tuple[SparseLayer, ...]
    dense_layers: int
    attention: dict[int, object]
    choosing: Mapping[str, str] = MappingProxyType({})

    @property
    def density(self) -> float:
        """Stored blocks over all blocks of the sparse layers."""
        blocks = sum(layer.blocks for layer in self.layers)
        return sum(layer.nnz_blocks for layer in self.layers) / max(1, blocks)

    def __str__(self) -> str:
        dense = _count(self.dense_layers, "dense linear layer")
        last = f"no block-sparse layer; {dense}"
        if self.layers:
            count = _count(len(self.layers), "block-sparse layer")
            last = f"{count}, density {self.density:.3f}; {dense}"
        by_choice: dict[str, list[int]] = {}
        for layer, choice in self.attention.items():
            by_choice.setdefault("dense" if choice is None else str(choice), []).append(layer)
        attention = [f"attention of {_runs(at)}: {what}" for what, at in by_choice.items()]
        attention += [f"{name}  attention, {pattern}" for name, pattern in self.choosing.items()]
        return "\n".join([*map(str, self.layers), *attention, last])


def report(model: torch.nn.Module, explain: Callable[..., Any]) -> ModelReport:
    """Look through a model; `explain` tells what a call of a layer would run."""
    layers, dense = [], 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            dense += 1
        elif isinstance(getattr(module, "nnz_blocks", None), int):
            layers.append(_sparse_layer(name or type(module).__name__, module, explain))
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    attention, choosing = {}, {}
    for module, choice in attention_layers(model):
        if choice is module:
            choosing[names[module]] = choice.pattern
        else:
            attention[module.layer_idx] = choice
    return ModelReport(tuple(layers), dense, attention, choosing)


def _sparse_layer(name: str, module: Any, explain: Callable[..., Any]) -> SparseLayer:
    values = module.values
    # a layer in fp8 rounds what it is given
    dtype = torch.bfloat16 if values.dtype == E4M3 else values.dtype
    chosen = {}
    if not values.is_meta:
        for tokens in TOKENS:
            x = torch.empty(tokens, module.in_features, dtype=dtype, device=values.device)
            # of a layer that is split among ranks, the part that this one computes
            chosen[tokens] = explain(getattr(module, "_product", module), x).chosen
    shape = (module.out_features, module.in_features)
    return SparseLayer(name, shape, module.block_shape, module.nnz_blocks, module.blocks, chosen)


def attention_layers(model: Any) -> Iterator[tuple[Any, Any]]:
    """Modules that attend, each with what makes it sparse, None if it is dense.

    Layers of transformers under a registered name, and layers of `bsk.nn`, which choose their keys
    themselves. Both say what they show by `pattern` and `kept_of(tokens)`.
    """
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    choose = ATTENTION.get(name) if isinstance(name, str) else None
    for module in model.modules():
        # the modules that attend, not those that hold them
        attends = "Attention" in type(module).__name__
        if hasattr(module, "kept_of"):
            yield module, module
        elif choose is not None and attends and isinstance(getattr(module, "layer_idx", None), int):
            yield module, choose(module)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _runs(layers: list[int]) -> str:
    """Indices of layers in words, neighbours joined: "layers 0-3, 5"."""
    members = set(layers)
    firsts = sorted(layer for layer in members if layer - 1 not in members)
    lasts = sorted(layer for layer in members if layer + 1 not in members)
    words = (f"{a}" if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))
    return f"layer{'' if len(members) == 1 else 's'} {', '.join(words)}"
