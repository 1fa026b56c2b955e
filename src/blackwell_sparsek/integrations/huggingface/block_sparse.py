"""Sparse attention for existing models, set by configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ...core.checks import message
from ...core.errors import InvalidInput, InvalidType
from ...core.kept_part import KeptPart
from ...launch.launcher import cdiv
from ...masks.band import Band
from ...masks.block_mask import BlockMask
from ...masks.check import BLOCK_SIZES
from ...masks.segments import selected_blocks
from ...masks.topk import kept_blocks

OP = "BlockSparse"


@dataclass(frozen=True)
class BlockSparse:
    """Which blocks of keys the queries of a causal layer see: the union of the parts that are set.

    Parameters
    ----------
    window : int, optional
        The latest keys, in tokens; every block that holds one of them is visible. Without any other
        part, the window is exact to the token.
    global_blocks : int
        The first blocks of the sequence ("sink" tokens).
    stride : int, optional
        Every `stride`-th block, counted back from the query's own.
    top_k : int, optional
        The most promising blocks, chosen for each block of queries and each head by products of
        mean queries and mean keys. For prompts only: single queries see what the other parts show,
        or everything if there is no other part.
    block_size : int
        Keys per block, and queries that share a choice.

    Raises
    ------
    InvalidInput
        If a number is too small, or no part is given.

    Examples
    --------
    >>> BlockSparse(window=256, global_blocks=1, block_size=64).blocks(512, 512)[0, 0, -1].int()
    tensor([1, 0, 0, 1, 1, 1, 1, 1], dtype=torch.int32)
    """

    window: int | None = None
    global_blocks: int = 0
    stride: int | None = None
    top_k: int | None = None
    block_size: int = 128

    def __post_init__(self) -> None:
        parts = {"window": 1, "global_blocks": 0, "stride": 1, "top_k": 1}
        for name, least in parts.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                got = type(value).__name__
                raise InvalidType(message(OP, name, "is not an int", "int or None", got))
            if value < least:
                raise InvalidInput(message(OP, name, "is too small", f"at least {least}", value))
        if self.block_size not in BLOCK_SIZES:
            raise InvalidInput(
                message(OP, "block_size", "is unsupported", BLOCK_SIZES, self.block_size)
            )
        if not any(getattr(self, name) for name in parts):
            raise InvalidInput(f"{OP}: shows no key; set window, global_blocks, stride or top_k")

    @property
    def is_window(self) -> bool:
        """Whether this is a sliding window and nothing else."""
        return self.window is not None and not (self.global_blocks or self.stride or self.top_k)

    @property
    def is_fixed(self) -> bool:
        """Whether some part does not depend on queries and keys."""
        return bool(self.window or self.global_blocks or self.stride)

    @property
    def pattern(self) -> str:
        """The name of the pattern in `bsk.sparsity_report`."""
        return str(self)

    def kept_of(self, tokens: int) -> KeptPart:
        """How many of the causal blocks of a prompt the queries of a head see."""
        rows = self.blocks(tokens, tokens)[0, 0].sum(1)
        causal = torch.arange(1, len(rows) + 1)
        rows = rows + (causal - rows).clamp(max=self.top_k or 0)
        return KeptPart(int(rows.sum()), int(causal.sum()), "blocks")

    def band(self, band: Band) -> Band:
        """`band`, limited to the window if there is no other part."""
        if not self.is_window or self.window is None:
            return band
        left = self.window - 1
        return Band(left if band.left is None else min(left, band.left), band.right)

    def blocks(self, sq: int, sk: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The fixed parts: bool `[1, 1, Mb, Nb]`, with the last query at the last key."""
        first = torch.arange(cdiv(sq, self.block_size), device=device) * self.block_size + sk - sq
        last = (first + self.block_size).clamp(max=sk) - 1
        return self._fixed(first[:, None], last[:, None], cdiv(sk, self.block_size))[None, None]

    def keys(self, lengths: torch.Tensor, kv_length: int) -> torch.Tensor:
        """Keys that the last query of each sequence sees: bool `[B, kv_length]`, without waiting.

        lengths : int32 `[B]`
        """
        blocks = self._blocks_at_the_end(lengths, kv_length)
        slot = torch.arange(kv_length, device=lengths.device)
        return blocks[:, slot // self.block_size] & (slot < lengths[:, None])

    def kv_blocks(self, lengths: torch.Tensor, kv_length: int) -> torch.Tensor:
        """`keys` as a list of blocks, int32 `[B, n]` with -1 in empty slots."""
        blocks = self._blocks_at_the_end(lengths, kv_length)
        nb = blocks.shape[1]
        most = self._most(nb, 1)
        column = torch.arange(nb, dtype=torch.int32, device=lengths.device)
        listed = torch.where(blocks, column, -1).sort(dim=1, descending=True).values
        return listed[:, : min(most, nb)]

    def _most(self, nb: int, own: int) -> int:
        """Bound on the blocks (of `nb`) that fixed parts show; `own` of them hold the queries."""
        most = self.global_blocks + own
        most += 0 if self.window is None else cdiv(self.window, self.block_size) + 1
        most += 0 if self.stride is None else cdiv(nb, self.stride)
        return min(most, nb)

    def mask(self, query: torch.Tensor, key: torch.Tensor) -> BlockMask:
        """The mask of all parts, without causality and without waiting for the device."""
        sq, sk, size = query.shape[2], key.shape[2], self.block_size
        if self.top_k is None and not torch.compiler.is_compiling():
            return _fixed_mask(self, sq, sk, query.device)
        nb = cdiv(sk, size)
        # a block of queries spans two blocks of keys if the cache does not end at a block boundary
        most = self._most(nb, 2) + (self.top_k or 0)
        return kept_blocks(self.keep(query, key), most, (size, size), (sq, sk))

    def _blocks_at_the_end(self, lengths: torch.Tensor, kv_length: int) -> torch.Tensor:
        position = lengths[:, None] - 1
        # as in a prompt, the queries within one block of keys see the same blocks
        first = position // self.block_size * self.block_size
        return self._fixed(first, position, cdiv(kv_length, self.block_size))

    def _fixed(self, first: torch.Tensor, last: torch.Tensor, nb: int) -> torch.Tensor:
        """For queries at positions first .. last, `[rows, 1]`: which of `nb` blocks they see."""
        size = self.block_size
        column = torch.arange(nb, device=first.device)
        seen = column < self.global_blocks
        if self.window is not None:
            seen = seen | (column * size + size > first - self.window + 1)
        if self.stride is not None:
            seen = seen | ((last // size - column) % self.stride == 0)
        # a query always sees its own block
        seen = seen | (column * size + size > first)
        return seen & (column * size <= last)

    def keep(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """All parts: bool `[1, 1, Mb, Nb]`, or `[B, Hq, Mb, Nb]` if `top_k` is set."""
        sq, sk = query.shape[2], key.shape[2]
        fixed = self.blocks(sq, sk, query.device)
        if self.top_k is None:
            return fixed
        scores = self._scores(query.detach(), key.detach())
        first = torch.arange(scores.shape[2], device=query.device) * self.block_size + sk - sq
        last = (first + self.block_size).clamp(max=sk) - 1
        column = torch.arange(scores.shape[3], device=query.device)
        future = column * self.block_size > last[:, None]
        # blocks that are visible anyway are not chosen again
        scores = scores.masked_fill(future | fixed, float("-inf"))
        best = scores.topk(min(self.top_k, scores.shape[3]), dim=-1)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(-1, best.indices, best.values > float("-inf"))
        return chosen | fixed

    def _scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Products of the means of blocks, fp32 `[B, Hq, Mb, Nb]`."""
        q, k = self._means(query), self._means(key)
        group = query.shape[1] // key.shape[1]
        grouped = q.unflatten(1, (-1, group)) @ k.unsqueeze(2).mT
        return grouped.flatten(1, 2)

    def _means(self, x: torch.Tensor) -> torch.Tensor:
        """Mean of each block of tokens: `[B, H, S, D]` to fp32 `[B, H, blocks, D]`."""
        size, length = self.block_size, x.shape[2]
        whole = length // size
        means = x[:, :, : whole * size].unflatten(2, (whole, size)).mean(3, dtype=torch.float32)
        if whole * size == length:
            return means
        rest = x[:, :, whole * size :].mean(2, keepdim=True, dtype=torch.float32)
        return torch.cat([means, rest], 2)


@lru_cache(maxsize=8)
def _fixed_mask(sparse: BlockSparse, sq: int, sk: int, device: torch.device) -> BlockMask:
    """The mask of the fixed parts, cached because all layers and later prompts use the same."""
    keep = sparse.blocks(sq, sk, device)
    return BlockMask.from_dense(keep, (sparse.block_size,) * 2, (sq, sk))


PerLayer = BlockSparse | Mapping[int, BlockSparse | None] | Callable[[int], BlockSparse | None]


def layer_choice(block_sparse: PerLayer | None) -> Callable[[Any], BlockSparse | None]:
    """A function from a layer's module to the `BlockSparse` that it uses, or None."""
    if block_sparse is None:
        return lambda module: None
    if isinstance(block_sparse, BlockSparse):
        return lambda module: block_sparse
    if isinstance(block_sparse, Mapping):
        for layer, choice in block_sparse.items():
            if not isinstance(layer, int) or isinstance(layer, bool):
                problem, expected = "names a layer by something else", "indices of layers"
                raise InvalidType(message("register", "block_sparse", problem, expected, layer))
            if layer < 0:
                problem, expected = "names a layer below zero", "indices of layers"
                raise InvalidInput(message("register", "block_sparse", problem, expected, layer))
            _check_choice(layer, choice)
        return lambda module: _of_layer(block_sparse, module)
    if callable(block_sparse):
        return lambda module: _check_choice(module.layer_idx, block_sparse(module.layer_idx))
    expected = "None, BlockSparse, a dict or a function of the layer's index"
    got = type(block_sparse).__name__
    raise InvalidType(message("register", "block_sparse", "is of a wrong type", expected, got))


def _of_layer(block_sparse: Mapping[int, BlockSparse | None], module: Any) -> BlockSparse | None:
    """The choice for a layer; raises if there are choices for layers that its model lacks."""
    config = getattr(module, "config", None)
    sizes = ("num_hidden_layers", "encoder_layers", "decoder_layers")
    layers = max((getattr(config, size, None) or 0 for size in sizes), default=0)
    missing = [layer for layer in block_sparse if layer >= layers]
    if layers and missing:
        problem, expected = "names layers that the model does not have", f"layers 0 to {layers - 1}"
        raise InvalidInput(message("register", "block_sparse", problem, expected, missing))
    return block_sparse.get(module.layer_idx)


def _check_choice(layer: int, choice: Any) -> BlockSparse | None:
    if choice is not None and not isinstance(choice, BlockSparse):
        problem = f"gives layer {layer} something else"
        got = type(choice).__name__
        raise InvalidType(message("register", "block_sparse", problem, "BlockSparse or None", got))
    return choice


def mask_of_selection(
    block_indices: torch.Tensor,
    block_size: int,
    query: torch.Tensor,
    sk: int,
    visible_keys: torch.Tensor | None,
) -> BlockMask:
    """The mask of MiniMax-M3's `block_indices`, int `[B, Hkv, Sq, n]` with -1 for empty slots.

    `visible_keys`, bool `[B, Sk]`, hides padding. Waits for the device.
    """
    heads_q, sq = query.shape[1:3]
    nb = cdiv(sk, block_size)
    batch, heads, rows, _ = block_indices.shape
    if rows != sq or heads_q % heads:
        expected = f"[{query.shape[0]}, a divisor of {heads_q}, {sq}, n]"
        raise InvalidInput(
            message(
                "huggingface",
                "block_indices",
                "is of other sizes",
                expected,
                list(block_indices.shape),
            )
        )
    selected = torch.zeros(batch, heads, sq, nb + 1, dtype=torch.bool, device=query.device)
    # empty slots go to an extra column that is cut off
    selected.scatter_(3, torch.where(block_indices < 0, nb, block_indices).long(), True)
    selected = selected[..., :nb].repeat_interleave(heads_q // heads, 1)
    side = 64 if sq >= 64 else 16
    return selected_blocks(selected, (side, block_size), (sq, sk), visible_keys=visible_keys)
