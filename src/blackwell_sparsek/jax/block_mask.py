"""`BlockMask` for JAX: which blocks of keys each block of queries sees, as a pytree."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jax

from ..core.errors import InvalidInput, InvalidType
from ..core.messages import message
from .arrays import as_host, cdiv, check_pair
from .batching import fold_axis, fold_pool

WORD = 32


class Entries(NamedTuple):
    """The visible blocks of each mask, `[batch, heads, entries]` int32 each.

    Sorted by query block, partial blocks before full ones, then by key block. Masks with fewer
    blocks than the largest are filled up with entries whose query block is -1.
    """

    q_block: Any
    kv_block: Any
    bits_id: Any
    """Row of the pool of bit masks for a partial block, -1 for a full one."""


class KernelLists(NamedTuple):
    """What kernels read beside the entries, `[batch, heads, ...]` int32 each.

    Made once with the mask, so that a call of a kernel sorts and counts nothing. A row is a block
    of queries, a column a block of keys. The first entry of each is followed by the number of all
    entries: what fills up a list belongs to no row and to no column.
    """

    row_start: Any
    """First entry of each row, `Mb + 1` of them."""
    row_full: Any
    """First entry of each row that is a full block, and the number of all entries."""
    q_block: Any
    """The query block of each entry, sorted by column, partial blocks before full ones."""
    bits_id: Any
    """`Entries.bits_id` in that order."""
    column_start: Any
    """First entry of each column in that order, `Nb + 1` of them."""
    column_full: Any
    """First entry of each column that is a full block, and the number of all entries."""


@jax.tree_util.register_pytree_with_keys_class
class BlockMask:
    """Which blocks of keys each block of queries sees; the pytree twin of `bsk.BlockMask`.

    Make one with `from_dense`, `from_element_mask` or `from_torch`, outside of traced functions:
    how many blocks are visible decides what is compiled. Its arrays may then be traced, batched by
    `jax.vmap` (the batch is their first dimension) and sharded by `jax.shard_map` over batch and
    heads, with `mask.partition_spec(batch_axis, heads_axis)` as its specification.

    Attributes
    ----------
    entries : Entries
        The visible blocks, `[batch, heads, entries]`; batch and heads may be 1, which broadcasts.
    lists : KernelLists
        Where their rows begin, and the same blocks by columns.
    bits : uint32 `[pool, bq, ceil(bk / 32)]`
        Bit `j % 32` of word `j // 32` of row i says whether element (i, j) of a partial block is
        visible.
    seq_lengths : (Sq, Sk)
    block_size : (bq, bk)

    Examples
    --------
    >>> import numpy as np
    >>> mask = BlockMask.from_dense(np.tri(4, dtype=bool), 16)
    >>> mask
    BlockMask(batch=1, heads=1, seq_lengths=(64, 64), block_size=(16, 16), entries=10)
    """

    def __init__(
        self,
        entries: Entries,
        lists: KernelLists,
        bits: Any,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
    ):
        # also called by JAX with whatever a transformation puts in place of arrays
        self.entries = entries
        self.lists = lists
        self.bits = bits
        self.seq_lengths = seq_lengths
        self.block_size = block_size

    @classmethod
    def from_dense(
        cls, keep: Any, block_size: int | tuple[int, int], seq_lengths: Any = None
    ) -> "BlockMask":
        """Show the blocks marked in `keep`, all of each.

        Parameters
        ----------
        keep : bool `[Mb, Nb]`, `[H, Mb, Nb]` or `[B, H, Mb, Nb]`, of NumPy, JAX or torch
        block_size : int or (bq, bk)
        seq_lengths : (Sq, Sk), optional
            By default `(Mb * bq, Nb * bk)`; the last blocks may be cut.
        """
        op = "BlockMask.from_dense"
        block = _block_size(op, block_size)
        shown = _masks(op, "keep", keep)
        grid = shown.shape[2:]
        if seq_lengths is None:
            seq = (grid[0] * block[0], grid[1] * block[1])
        else:
            seq = check_pair(op, "seq_lengths", seq_lengths, 0)
        want = (cdiv(seq[0], block[0]), cdiv(seq[1], block[1]))
        if grid != want:
            expected = f"{want[0]} x {want[1]} blocks of {block[0]} x {block[1]}"
            got = f"{grid[0]} x {grid[1]}"
            raise InvalidInput(message(op, "keep", "has a wrong shape", expected, got))
        return cls._listed(shown, np.full(shown.shape, -1, np.int32), None, seq, block)

    @classmethod
    def from_element_mask(cls, visible: Any, block_size: int | tuple[int, int]) -> "BlockMask":
        """Show the elements marked in `visible`; blocks without any are never visited.

        Parameters
        ----------
        visible : bool `[Sq, Sk]`, `[H, Sq, Sk]` or `[B, H, Sq, Sk]`, of NumPy, JAX or torch
        block_size : int or (bq, bk)
        """
        op = "BlockMask.from_element_mask"
        block = _block_size(op, block_size)
        elements = _masks(op, "visible", visible)
        batch, heads, sq, sk = elements.shape
        mb, nb = cdiv(sq, block[0]), cdiv(sk, block[1])
        pad = ((0, 0), (0, 0), (0, mb * block[0] - sq), (0, nb * block[1] - sk))
        tiles = np.pad(elements, pad).reshape(batch, heads, mb, block[0], nb, block[1])
        tiles = tiles.swapaxes(3, 4)
        # a block is full if all of it that exists is visible
        exists = np.pad(np.ones((sq, sk), bool), pad[2:]).reshape(mb, block[0], nb, block[1])
        seen = np.asarray(tiles.any((4, 5)))
        full = (tiles >= exists.swapaxes(1, 2)).all((4, 5))
        partial = seen & ~full
        bits_id = np.full(seen.shape, -1, np.int32)
        bits_id[partial] = np.arange(partial.sum(), dtype=np.int32)
        return cls._listed(seen, bits_id, _packed(tiles[partial]), (sq, sk), block)

    @classmethod
    def from_torch(cls, mask: Any) -> "BlockMask":
        """The same mask as a `bsk.BlockMask`; its lists are copied to the host once."""
        op = "BlockMask.from_torch"
        if not hasattr(mask, "forward") or not hasattr(mask, "bits"):
            got = type(mask).__name__
            raise InvalidType(message(op, "mask", "is not a block mask", "bsk.BlockMask", got))
        (mb, nb), shape = mask.grid, (mask.batch, mask.heads, *mask.grid)
        lists = mask.forward
        indptr, indices, bits_id = (
            x.detach().cpu().numpy() for x in (lists.indptr, lists.indices, lists.bits_id)
        )
        rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        seen = np.zeros((shape[0] * shape[1] * mb, nb), bool)
        ids = np.full(seen.shape, -1, np.int32)
        seen[rows, indices], ids[rows, indices] = True, bits_id
        bits = mask.bits.detach().cpu().numpy().view(np.uint32)
        return cls._listed(
            seen.reshape(shape), ids.reshape(shape), bits, mask.seq_lengths, mask.block_size
        )

    @classmethod
    def _listed(
        cls,
        seen: np.ndarray,
        bits_id: np.ndarray,
        bits: np.ndarray | None,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
    ) -> "BlockMask":
        """List the blocks of `seen` [B, H, Mb, Nb]; `bits_id` is -1 where a block is full."""
        batch, heads, height, width = seen.shape
        room = int(seen.sum((2, 3)).max(initial=0))
        entries, sorted_by_column = (
            np.full((n, batch, heads, room), -1, np.int32) for n in (len(Entries._fields), 2)
        )
        row_starts, column_starts = (
            np.zeros((2, batch, heads, side + 1), np.int32) for side in (height, width)
        )
        for b, h in np.ndindex(batch, heads):
            rows, cols = np.nonzero(seen[b, h])
            ids = bits_id[b, h, rows, cols]
            order = np.lexsort((cols, ids < 0, rows))
            entries[:, b, h, : len(rows)] = rows[order], cols[order], ids[order]
            row_starts[:, b, h] = _starts(rows, ids, height)
            order = np.lexsort((rows, ids < 0, cols))
            sorted_by_column[:, b, h, : len(rows)] = rows[order], ids[order]
            column_starts[:, b, h] = _starts(cols, ids, width)
        if bits is None:
            bits = np.zeros((0, block_size[0], cdiv(block_size[1], WORD)), np.uint32)
        lists = (*row_starts, *sorted_by_column, *column_starts)
        return cls(
            Entries(*map(jnp.asarray, entries)),
            KernelLists(*map(jnp.asarray, lists)),
            jnp.array(bits),  # may be those of a mask of torch
            seq_lengths,
            block_size,
        )

    @property
    def batch(self) -> int:
        """Number of masks along the batch; 1 broadcasts. A shard counts its own."""
        return self.entries.q_block.shape[0]

    @property
    def heads(self) -> int:
        """Number of masks along the query heads; 1 broadcasts. A shard counts its own."""
        return self.entries.q_block.shape[1]

    @property
    def grid(self) -> tuple[int, int]:
        """(Mb, Nb): blocks of queries and of keys."""
        (sq, sk), (bq, bk) = self.seq_lengths, self.block_size
        return cdiv(sq, bq), cdiv(sk, bk)

    @property
    def density(self) -> jax.Array:
        """Visible blocks over all blocks, a scalar; 0 for a mask without blocks."""
        total = self.batch * self.heads * self.grid[0] * self.grid[1]
        return (self.entries.q_block >= 0).sum() / max(total, 1)

    def partition_spec(self, batch: Any = None, heads: Any = None) -> "BlockMask":
        """Specification of this mask for `jax.shard_map` and `NamedSharding`.

        Parameters
        ----------
        batch, heads : names of mesh axes, or None
            Axes over which the batch and the heads of q are sharded. Masks that broadcast along a
            dimension, and the pool of bit masks, are replicated.
        """
        spec = jax.sharding.PartitionSpec(
            batch if self.batch > 1 else None, heads if self.heads > 1 else None, None
        )
        whole = jax.sharding.PartitionSpec()
        entries, lists = Entries(spec, spec, spec), KernelLists(*[spec] * len(KernelLists._fields))
        return BlockMask(entries, lists, whole, self.seq_lengths, self.block_size)

    def to_element_mask(self) -> jax.Array:
        """Which elements are visible: bool `[batch, heads, Sq, Sk]`, in memory of that size."""
        (sq, sk), (bq, bk), (mb, nb) = self.seq_lengths, self.block_size, self.grid
        masks = self.batch * self.heads
        rows, cols, ids = (x.reshape(masks, -1) for x in self.entries)
        shown = unpack(self.bits, ids, bk, bq)
        mask = jnp.broadcast_to(jnp.arange(masks)[:, None], rows.shape)
        # entries that fill up a list would be the last block: their row is out of range
        rows = jnp.where(rows < 0, mb, rows)
        tiles = (
            jnp.zeros((masks, mb, nb, bq, bk), bool).at[mask, rows, cols].set(shown, mode="drop")
        )
        elements = tiles.swapaxes(2, 3).reshape(self.batch, self.heads, mb * bq, nb * bk)
        return elements[:, :, :sq, :sk]

    def folded(self, is_mapped: "BlockMask", size: int, batch: int) -> "BlockMask":
        """This mask with an axis of `jax.vmap` as part of its batch: see `batching`.

        `is_mapped` has a bool in place of each array; `batch` is that of the call without the axis.
        """
        (entries, lists), (mapped, lists_mapped) = ((x.entries, x.lists) for x in (self, is_mapped))
        bits, ids, moved = fold_pool(
            self.bits, entries.bits_id, is_mapped.bits, mapped.bits_id, size
        )
        _, ids_by_column, _ = fold_pool(
            self.bits, lists.bits_id, is_mapped.bits, lists_mapped.bits_id, size
        )
        entries, lists = entries._replace(bits_id=ids), lists._replace(bits_id=ids_by_column)
        mapped = mapped._replace(bits_id=moved)
        lists_mapped = lists_mapped._replace(bits_id=moved)
        # masks of the call are not copied for each entry, unless some of their arrays differ
        alike = not any(jax.tree.leaves((mapped, lists_mapped)))

        def fold(x: Any, is_mapped: bool) -> Any:
            return fold_axis(x, is_mapped, size, batch, broadcasts=alike)

        return BlockMask(
            Entries(*map(fold, entries, mapped)),
            KernelLists(*map(fold, lists, lists_mapped)),
            bits,
            self.seq_lengths,
            self.block_size,
        )

    def check_problem(self, op: str, batch: int, heads: int, sq: int, sk: int) -> None:
        """Raise unless this mask was made for these sizes."""
        if self.seq_lengths != (sq, sk):
            problem = "was made for other lengths"
            raise InvalidInput(message(op, "block_mask", problem, (sq, sk), self.seq_lengths))
        for name, have, want in (("batch", self.batch, batch), ("heads", self.heads, heads)):
            if have not in (1, want):
                problem = f"has a wrong number of masks along the {name}"
                raise InvalidInput(message(op, "block_mask", problem, f"1 or {want}", have))

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Arrays as children; lengths and block size are static."""
        key = jax.tree_util.GetAttrKey
        names = ("entries", "lists", "bits")
        children = tuple((key(name), getattr(self, name)) for name in names)
        return children, (self.seq_lengths, self.block_size)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "BlockMask":
        """The inverse of `tree_flatten_with_keys`."""
        return cls(*children, *static)

    def __repr__(self) -> str:
        shape = getattr(self.entries.q_block, "shape", None)
        if shape is None or len(shape) != 3:
            return f"BlockMask({self.entries}, {self.bits})"
        return (
            f"BlockMask(batch={shape[0]}, heads={shape[1]}, seq_lengths={self.seq_lengths}, "
            f"block_size={self.block_size}, entries={shape[2]})"
        )


def unpack(bits: jax.Array, bits_id: jax.Array, bk: int, bq: int) -> jax.Array:
    """Elements of blocks that are visible, bool `[..., bq, bk]`; all of those with id -1."""
    if bits.shape[0] == 0:
        return jnp.ones((*bits_id.shape, bq, bk), bool)
    words = bits[jnp.maximum(bits_id, 0)]
    lanes = (words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    lanes = lanes.reshape(*lanes.shape[:-2], -1)[..., :bk].astype(bool)
    return lanes | (bits_id < 0)[..., None, None]


def _starts(lines: np.ndarray, ids: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """First entry and first full entry of each row or column, and the number of all entries."""
    lengths, partial = (np.bincount(x, minlength=count) for x in (lines, lines[ids >= 0]))
    start = np.concatenate([[0], np.cumsum(lengths)])
    return start, start + np.append(partial, 0)


def _packed(tiles: np.ndarray) -> np.ndarray:
    """Pack bool `[pool, bq, bk]` into uint32 `[pool, bq, ceil(bk / 32)]`."""
    words = cdiv(tiles.shape[-1], WORD)
    padded = np.pad(tiles, ((0, 0), (0, 0), (0, words * WORD - tiles.shape[-1])))
    lanes = padded.reshape(*tiles.shape[:2], words, WORD).astype(np.uint32)
    return (lanes << np.arange(WORD, dtype=np.uint32)).sum(-1, dtype=np.uint32)


def _block_size(op: str, block_size: Any) -> tuple[int, int]:
    if isinstance(block_size, int) and not isinstance(block_size, bool):
        block_size = (block_size, block_size)
    return check_pair(op, "block_size", block_size, 1)


def _masks(op: str, arg: str, x: Any) -> np.ndarray:
    """A bool array of rank 2 to 4 as `[B, H, rows, columns]` on the host."""
    array = as_host(op, arg, x)
    if array.dtype != np.bool_:
        raise InvalidType(message(op, arg, "has a wrong dtype", "bool", array.dtype))
    if not 2 <= array.ndim <= 4:
        expected = "[rows, columns], [H, rows, columns] or [B, H, rows, columns]"
        raise InvalidInput(message(op, arg, "has a wrong rank", expected, list(array.shape)))
    return array[(None,) * (4 - array.ndim)]
