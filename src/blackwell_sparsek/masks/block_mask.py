"""BlockMask: which blocks of keys each block of queries sees, and which elements of them."""

from collections.abc import Sequence
from typing import Any

import torch

from ..core.checks import check_dtype, check_flag, check_tensor, message
from ..core.errors import InvalidInput
from ..core.torch_state import usable_in_training
from ..launch.launcher import cdiv
from . import algebra, from_bools
from . import bits as bit_masks
from .block_lists import BlockLists, entries_listed, transpose_lists
from .check import (
    IntPair,
    check_block_size,
    check_count,
    check_layout,
    check_lists,
    check_made_for,
    check_seq_lengths,
)
from .device_build import (
    MAX_TRANSPOSED_BLOCKS,
    kept_key,
    kernels_build,
    repeat_kept,
    transposed_lists,
)
from .flex import from_flex

# What copies consist of, besides the lists and the bits.
_SIZES = ("batch", "heads", "seq_lengths", "block_size")
# Lengths for which a mask that was made without any keeps what it derived.
_FITTED_LENGTHS = 32


class BlockMask:
    """A block-sparse attention mask over Sq queries and Sk keys.

    Block (r, c) covers the queries `r * bq ..` and the keys `c * bk ..`. It is absent (nothing
    visible), full (every existing element visible) or partial (a bit per element). Batch and heads
    may each be 1, which broadcasts.

    Create a mask with `from_dense`, `from_element_mask`, `from_function`, `from_flex` or
    `bsk.masks`. This constructor takes the index lists, copies and checks them, and waits for the
    device.

    Parameters
    ----------
    indptr : int32 `[rows + 1]`
        Row `(b * heads + h) * ceil(Sq / bq) + r` owns the entries `indptr[row] .. indptr[row + 1]`.
    indices : int32 `[nnz]`
        Block column of each entry: within a row the partial blocks ascending, then the full ones.
    seq_lengths : int or (Sq, Sk)
    block_size : int or (bq, bk)
        Sides among 16, 32, 64, 128, 256.
    batch, heads : int
        Number of masks along each; 1 broadcasts.
    partial_end : int32 `[rows]`, optional
        End of the partial entries of each row. None: all blocks are full.
    bits_id : int32 `[nnz]`, optional
        Row of `bits` for a partial block, -1 for a full one.
    bits : int32 `[pool, bq, ceil(bk / 32)]`, optional
        Bit `j % 32` of word `j // 32` of row `i`: element (i, j) is visible. Zero beyond Sq and Sk.

    Raises
    ------
    InvalidInput
        If the lists are malformed or a size is unsupported.

    Examples
    --------
    >>> indptr = torch.tensor([0, 1, 3], dtype=torch.int32)
    >>> indices = torch.tensor([0, 0, 1], dtype=torch.int32)
    >>> BlockMask(indptr, indices, seq_lengths=128, block_size=64).to_dense()[0, 0].int()
    tensor([[1, 0],
            [1, 1]], dtype=torch.int32)
    """

    _forward: BlockLists
    _transposed: BlockLists | None
    _exact: bool
    _bits: torch.Tensor
    _seq_lengths: IntPair
    _block_size: IntPair
    _batch: int
    _heads: int
    _launches: dict[Any, Any]
    _derived: dict[Any, Any] | None
    _version: int | None
    # made without lengths: for all that have as many blocks. Those it was used with so far.
    _any_length: bool = False
    _fitted: dict[IntPair, "BlockMask"]

    @usable_in_training
    def __init__(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        *,
        seq_lengths: int | IntPair,
        block_size: int | IntPair,
        batch: int = 1,
        heads: int = 1,
        partial_end: torch.Tensor | None = None,
        bits_id: torch.Tensor | None = None,
        bits: torch.Tensor | None = None,
    ) -> None:
        op = "BlockMask"
        seq = check_seq_lengths(op, seq_lengths)
        block = check_block_size(op, block_size)
        masks = check_count(op, "batch", batch) * check_count(op, "heads", heads)
        given = [x is not None for x in (partial_end, bits_id, bits)]
        if any(given) and not all(given):
            names = "partial_end, bits_id and bits"
            raise InvalidInput(message(op, names, "belong together", "all or none", given))
        if partial_end is None or bits_id is None or bits is None:
            _check_lists_are_tensors(op, indptr, indices)
            partial_end = indptr[:-1]
            bits_id = torch.full_like(indices, -1)
            bits = bit_masks.empty_pool(block, indices.device)
        lists = BlockLists(indptr, partial_end, indices, bits_id)
        check_lists(op, lists, bits, masks, seq, block)
        own = BlockLists(*(x.detach().clone(memory_format=torch.contiguous_format) for x in lists))
        pool = bits.detach().clone(memory_format=torch.contiguous_format)
        self._set(own, None, pool, batch, heads, seq, block)

    def _set(
        self,
        forward: BlockLists,
        transposed: BlockLists | None,
        bits: torch.Tensor,
        batch: int,
        heads: int,
        seq_lengths: IntPair,
        block_size: IntPair,
        exact: bool = True,
        any_length: bool = False,
    ) -> None:
        self._forward, self._transposed = forward, transposed
        # False: the lists were allocated before the number of blocks was known, and may have spare
        # entries after the last one that a row owns
        self._exact = exact
        self._bits = bits
        self._batch, self._heads = batch, heads
        self._seq_lengths, self._block_size = seq_lengths, block_size
        # recorded launches of attention with this mask, and derived lists that these need; the
        # operators fill both
        self._launches, self._derived = {}, {}
        # how often the lists had been written to when something was first derived from them
        self._version = None
        self._any_length, self._fitted = any_length, {}

    @classmethod
    def _from_parts(
        cls,
        forward: BlockLists,
        bits: torch.Tensor,
        batch: int,
        heads: int,
        seq_lengths: IntPair,
        block_size: IntPair,
        transposed: BlockLists | None = None,
        exact: bool = True,
        any_length: bool = False,
    ) -> "BlockMask":
        """A mask from tensors that the caller has just made, without checks or copies."""
        mask = cls.__new__(cls)
        sizes = (batch, heads, seq_lengths, block_size)
        mask._set(forward, transposed, bits, *sizes, exact, any_length)
        return mask

    @classmethod
    def _from_tensors(
        cls,
        tensors: Sequence[torch.Tensor],
        batch: int,
        heads: int,
        seq_lengths: Sequence[int],
        block_size: Sequence[int],
    ) -> "BlockMask":
        """The inverse of `tensors`, without checks or copies.

        Operators make such an object in every call, so it caches nothing: lists derived from the
        mask are found by its tensors (`derived_lists`).
        """
        *lists, bits = tensors
        forward, transposed = BlockLists(*lists[:4]), BlockLists(*lists[4:])
        (sq, sk), (bq, bk) = seq_lengths, block_size
        # row pointers have at least one element
        other = transposed if transposed.indptr.shape[0] > 0 else None
        mask = cls._from_parts(forward, bits, batch, heads, (sq, sk), (bq, bk), other)
        mask._exact, mask._derived = not _may_have_spare_entries(mask), None
        return mask

    @classmethod
    @usable_in_training
    def from_dense(
        cls,
        keep: torch.Tensor,
        block_size: int | IntPair,
        seq_lengths: int | IntPair | None = None,
    ) -> "BlockMask":
        """Create a mask from one bool per block.

        Parameters
        ----------
        keep : bool `[B or 1, H or 1, Mb, Nb]`
            Which blocks are visible; `[H, Mb, Nb]` and `[Mb, Nb]` broadcast.
        block_size : int or (bq, bk)
        seq_lengths : int or (Sq, Sk), optional
            With `ceil(Sq / bq) == Mb` and `ceil(Sk / bk) == Nb`. By default the mask fits every
            length with that many blocks, and shows whole ones.

        Notes
        -----
        Made on the device of `keep`. On a GPU the host does not wait for it, unless there are more
        than 2**26 blocks: the lists take 8 bytes for every block of `keep`, and the number of kept
        blocks is read when it is first needed (`forward`, `transposed`, `nnz_blocks`, printing).

        Examples
        --------
        >>> mask = BlockMask.from_dense(torch.eye(4, dtype=torch.bool), 64, seq_lengths=250)
        >>> mask.nnz_blocks, mask.density
        (4, 0.25)
        """
        key = kept_key(keep, block_size, seq_lengths)
        if (again := repeat_kept(key, keep)) is not None:
            lists, sizes = again
            return cls._from_parts(lists, *sizes, exact=False, any_length=seq_lengths is None)
        return from_bools.from_blocks(cls, keep, block_size, seq_lengths, key)

    @classmethod
    @usable_in_training
    def from_element_mask(cls, visible: torch.Tensor, block_size: int | IntPair) -> "BlockMask":
        """Create a mask from one bool per element; blocks become absent, partial or full.

        Parameters
        ----------
        visible : bool `[B or 1, H or 1, Sq, Sk]`
            True where query i sees key j; `[H, Sq, Sk]` and `[Sq, Sk]` broadcast.
        block_size : int or (bq, bk)

        Examples
        --------
        >>> mask = BlockMask.from_element_mask(torch.ones(40, 40).tril().bool(), 16)
        >>> mask.nnz_blocks
        6
        """
        return from_bools.from_elements(cls, visible, block_size)

    @classmethod
    @usable_in_training
    def from_flex(cls, flex_mask: Any) -> "BlockMask":
        """Convert a `torch.nn.attention.flex_attention.BlockMask`.

        Its `mask_mod` is evaluated once, on the partial blocks alone, with the batch and head index
        of the list that holds them: 0 where the mask broadcasts. Without a `mask_mod`, the listed
        blocks count as full.

        Examples
        --------
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> def causal(b, h, q, kv):
        ...     return q >= kv
        >>> flex = create_block_mask(causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
        >>> BlockMask.from_flex(flex).nnz_blocks
        10
        """
        return from_flex(cls, flex_mask)

    @classmethod
    @usable_in_training
    def from_function(
        cls,
        mask_mod: algebra.MaskMod,
        seq_lengths: int | IntPair,
        block_size: int | IntPair = 128,
        *,
        batch: int = 1,
        heads: int = 1,
        device: torch.device | str = "cpu",
    ) -> "BlockMask":
        """Create a mask from a `mask_mod` function as in FlexAttention.

        Parameters
        ----------
        mask_mod : function of (b, h, q, kv)
            Gets index tensors without dimensions and returns one bool; evaluated once, for every
            element of `batch * heads` masks, a part at a time.
        seq_lengths : int or (Sq, Sk)
        block_size : int or (bq, bk)
        batch, heads : int
            How many masks there are; 1 broadcasts.
        device : torch.device or str

        Examples
        --------
        >>> mask = BlockMask.from_function(lambda b, h, q, kv: q >= kv, 40, 16)
        >>> mask.nnz_blocks
        6
        """
        return algebra.from_function(cls, mask_mod, seq_lengths, block_size, batch, heads, device)

    def __and__(self, other: "BlockMask") -> "BlockMask":
        """Elements that both masks show; either may broadcast. Waits for the device."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        return algebra.combined(self, other, "&")

    def __or__(self, other: "BlockMask") -> "BlockMask":
        """Elements that one of the masks shows; either may broadcast. Waits for the device."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        return algebra.combined(self, other, "|")

    def __getitem__(self, index: Any) -> "BlockMask":
        """The masks of some batches and heads: `mask[b]`, `mask[b, h]`, `mask[:, 2:4]`.

        An int keeps its dimension, with size 1. A list of ints may name a mask more than once: one
        mask per KV head becomes one per query head by `mask[:, [h // group for h in range(Hq)]]`.
        Waits for the device.
        """
        return algebra.selected(self, index)

    # a mask is not a sequence, although it can be indexed
    __iter__ = None

    def to_svg(self, batch: int = 0, head: int = 0, *, pixels: int = 512) -> str:
        """Draw one mask as SVG: full blocks dark, partial blocks light.

        Examples
        --------
        >>> mask = BlockMask.from_function(lambda b, h, q, kv: q >= kv, 64, 16)
        >>> mask.to_svg().count("<rect")
        11
        """
        op = "BlockMask.to_svg"
        return algebra.to_svg(self, batch, head, check_count(op, "pixels", pixels, at_least=1))

    @property
    def forward(self) -> BlockLists:
        """Key blocks of each query block; read only. May wait for the device, once."""
        self._trim()
        return self._forward

    @property
    def transposed(self) -> BlockLists:
        """Query blocks of each key block, row `(b * heads + h) * Nb + c`; read only.

        Made on first use and kept, except inside a CUDA graph capture, whose memory must not be
        used outside the graph. May wait for the device, once.
        """
        self._trim()
        return self._listed_transposed

    @property
    def _listed(self) -> BlockLists:
        """`forward` as kernels take it: may have spare entries at the end; never waits."""
        return self._forward

    @property
    def _listed_transposed(self) -> BlockLists:
        """`transposed` as kernels take it: may have spare entries at the end; never waits."""
        if self._transposed is not None:
            return self._transposed
        self._check_unwritten()
        made = self._transpose_lists()
        traced = torch.compiler.is_compiling() or self.device.type != "cuda"
        if traced or not torch.cuda.is_current_stream_capturing():
            self._transposed = made
        return made

    def _transpose_lists(self) -> BlockLists:
        masks, (mb, nb), lists = self._batch * self._heads, self.grid, self._listed
        by_kernels = kernels_build(self.device, *lists)
        if by_kernels and lists.indices.numel() > 0 and masks * mb * nb <= MAX_TRANSPOSED_BLOCKS:
            return transposed_lists(lists, masks, (mb, nb), all_full=self._bits.shape[0] == 0)
        return transpose_lists(self.forward, masks, mb, nb)

    def _trim(self) -> None:
        """Drop the spare entries at the end of the lists; waits for the device."""
        if self._exact or torch.compiler.is_compiling():
            return
        self._check_unwritten()
        self._version = None
        self._forward = entries_listed(self._forward)
        if self._transposed is not None:
            self._transposed = entries_listed(self._transposed)
        self._exact = True

    def _check_unwritten(self) -> None:
        """Raise if a list was written in place after its first use.

        The lists of the transpose, the orders of work and the launches bound to them would be those
        of the mask before.
        """
        if torch.compiler.is_compiling():
            return
        indptr, partial_end, indices, bits_id = self._forward
        try:
            version = indptr._version + partial_end._version + indices._version
            version += bits_id._version + self._bits._version
        except RuntimeError:  # made in inference mode, where writes are not counted
            return
        if self._version is None:
            self._version = version
        elif self._version != version:
            raise InvalidInput(
                message(
                    "BlockMask",
                    "the lists",
                    "were written in place",
                    "read-only lists: make a new mask instead",
                    "lists that no longer agree with those derived from them",
                )
            )

    @property
    def bits(self) -> torch.Tensor:
        """Pool of the bit masks of partial blocks, int32 `[pool, bq, ceil(bk / 32)]`; read only."""
        return self._bits

    @property
    def seq_lengths(self) -> IntPair:
        """(Sq, Sk)."""
        return self._seq_lengths

    @property
    def block_size(self) -> IntPair:
        """(bq, bk)."""
        return self._block_size

    @property
    def batch(self) -> int:
        """Number of masks along the batch; 1 broadcasts."""
        return self._batch

    @property
    def heads(self) -> int:
        """Number of masks along the query heads; 1 broadcasts."""
        return self._heads

    @property
    def grid(self) -> IntPair:
        """(Mb, Nb): blocks of queries and of keys."""
        (sq, sk), (bq, bk) = self._seq_lengths, self._block_size
        return cdiv(sq, bq), cdiv(sk, bk)

    @property
    def device(self) -> torch.device:
        """Where the lists live."""
        return self._bits.device

    @property
    def nnz_blocks(self) -> int:
        """Number of visible blocks, partial and full, over batch and heads."""
        return self.forward.indices.numel()

    @property
    def density(self) -> float:
        """Visible blocks over all blocks; 0.0 for a mask without blocks."""
        mb, nb = self.grid
        total = self._batch * self._heads * mb * nb
        return self.nnz_blocks / total if total else 0.0

    @property
    @usable_in_training
    def T(self) -> "BlockMask":
        """The mask of the transposed problem, Sk queries over Sq keys, from the same lists."""
        (sq, sk), (bq, bk) = self._seq_lengths, self._block_size
        return BlockMask._from_parts(
            self.transposed,
            bit_masks.transpose(self._bits, bk),
            self._batch,
            self._heads,
            (sk, sq),
            (bk, bq),
            transposed=self.forward,
            any_length=self._any_length,
        )

    def tensors(self, *, for_gradients: bool = True) -> list[torch.Tensor]:
        """The nine tensors that operator schemas carry: forward, transposed, bits.

        Only gradients read the transposed lists; without `for_gradients` they are left empty unless
        they already exist.
        """
        self._check_unwritten()
        transposed = self._transposed
        if for_gradients:
            transposed = self._listed_transposed
        elif transposed is None:
            nothing = self._forward.indices.new_empty(0)
            transposed = BlockLists(nothing, nothing, nothing, nothing)
        return [*self._forward, *transposed, self._bits]

    @usable_in_training
    def to(self, device: torch.device | str) -> "BlockMask":
        """This mask on `device`; returns itself if it is already there."""
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        self._trim()
        made = self._transposed
        return BlockMask._from_parts(
            BlockLists(*(x.to(target) for x in self._forward)),
            self._bits.to(target),
            self._batch,
            self._heads,
            self._seq_lengths,
            self._block_size,
            None if made is None else BlockLists(*(x.to(target) for x in made)),
            any_length=self._any_length,
        )

    def to_dense(self) -> torch.Tensor:
        """Which blocks are visible, partly or fully: bool `[batch, heads, Mb, Nb]`."""
        mb, nb = self.grid
        keep = torch.zeros(self.batch * self.heads * mb, nb, dtype=torch.bool, device=self.device)
        keep[self.forward.row_indices(), self.forward.indices.long()] = True
        return keep.view(self.batch, self.heads, mb, nb)

    def to_element_mask(self) -> torch.Tensor:
        """Which elements are visible: bool `[batch, heads, Sq, Sk]`, in memory of that size."""
        (sq, sk), (bq, bk) = self.seq_lengths, self.block_size
        mb, nb = self.grid
        masks = self.batch * self.heads
        tiles = torch.zeros(masks * mb, nb, bq, bk, dtype=torch.bool, device=self.device)
        rows, cols = self.forward.row_indices(), self.forward.indices.long()
        partial = self.forward.bits_id >= 0
        tiles[rows[~partial], cols[~partial]] = True
        shown = bit_masks.unpack(self.bits[self.forward.bits_id[partial]], bk)
        tiles[rows[partial], cols[partial]] = shown
        elements = tiles.view(masks, mb, nb, bq, bk).transpose(2, 3)
        elements = elements.reshape(self.batch, self.heads, mb * bq, nb * bk)
        return elements[..., :sq, :sk].contiguous()

    def validate(self) -> None:
        """Check every invariant again, in both directions. Waits for the device."""
        masks = self._batch * self._heads
        check_lists(
            "BlockMask", self.forward, self._bits, masks, self._seq_lengths, self._block_size
        )
        if self._transposed is None:
            return
        expected = transpose_lists(self.forward, masks, *self.grid)
        if not all(map(torch.equal, expected, self.transposed)):
            raise InvalidInput("BlockMask: transposed lists do not agree with the forward lists")

    def check_problem(self, op: str, batch: int, heads: int, sq: int, sk: int) -> None:
        """Raise unless this mask was made for these sizes; host only."""
        check_made_for(op, (self._batch, self._heads, *self._seq_lengths), (batch, heads, sq, sk))

    def for_lengths(self, sq: int, sk: int) -> "BlockMask":
        """This mask, made by `from_dense` without lengths, for Sq queries and Sk keys.

        They must fill as many blocks as the mask has. Attention does this by itself; the result
        shares the lists and is kept, so that calls with the same lengths find it again.

        Examples
        --------
        >>> mask = BlockMask.from_dense(torch.eye(4, dtype=torch.bool), 64)
        >>> mask.for_lengths(250, 200).seq_lengths
        (250, 200)
        """
        op, lengths = "BlockMask.for_lengths", (sq, sk)
        if lengths == self._seq_lengths:
            return self
        if (kept := self._fitted.get(lengths)) is not None:
            return kept
        if not self._any_length:
            problem = "was made for given lengths"
            raise InvalidInput(message(op, "mask", problem, self._seq_lengths, lengths))
        seq, (bq, bk) = check_seq_lengths(op, lengths), self._block_size
        (rows, cols), (wanted_rows, wanted_cols) = self.grid, (cdiv(sq, bq), cdiv(sk, bk))
        if (rows, cols) != (wanted_rows, wanted_cols):
            expected = f"lengths of {rows} x {cols} blocks of {bq} x {bk}"
            problem = f"has another number of blocks than {wanted_rows} x {wanted_cols}"
            raise InvalidInput(message(op, "mask", problem, expected, lengths))
        sizes = (self._batch, self._heads, seq, self._block_size)
        mask = BlockMask._from_parts(
            self._forward, self._bits, *sizes, self._transposed, self._exact, any_length=True
        )
        if len(self._fitted) >= _FITTED_LENGTHS:
            # another thread may have dropped the oldest one too
            self._fitted.pop(next(iter(list(self._fitted))), None)
        self._fitted[lengths] = mask
        return mask

    def _fits(self, sq: int, sk: int) -> bool:
        """Whether the mask was made without lengths and has as many blocks as these."""
        bq, bk = self._block_size
        return self._any_length and self.grid == (cdiv(sq, bq), cdiv(sk, bk))

    def equals(self, other: "BlockMask") -> bool:
        """Whether both show the same elements through the same blocks. Waits for the device."""
        mine, theirs = ((x.seq_lengths, x.block_size, x.batch, x.heads) for x in (self, other))
        if mine != theirs:
            return False
        a, b = self.forward, other.forward
        if not all(map(torch.equal, a[:3], b[:3])):
            return False
        partial = a.bits_id >= 0
        return torch.equal(self.bits[a.bits_id[partial]], other.bits[b.bits_id[partial]])

    def __getstate__(self) -> dict[str, Any]:
        self._trim()
        sizes = {name: getattr(self, name) for name in _SIZES}
        lists = self._forward._asdict()
        return {**lists, "bits": self._bits, **sizes, "any_length": self._any_length}

    @usable_in_training
    def __setstate__(self, state: dict[str, Any]) -> None:
        op, names = "BlockMask", (*BlockLists._fields, "bits", *_SIZES, "any_length")
        if not isinstance(state, dict) or sorted(map(str, state)) != sorted(names):
            got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
            problem = "does not fit"
            raise InvalidInput(message(op, f"the state of a saved {op}", problem, names, got))
        lists, bits = BlockLists(*(state[name] for name in BlockLists._fields)), state["bits"]
        batch, heads = (
            check_count(op, name, state[name], at_most=2**31 - 1) for name in ("batch", "heads")
        )
        seq = check_seq_lengths(op, state["seq_lengths"])
        block = check_block_size(op, state["block_size"])
        check_flag(op, "any_length", state["any_length"])
        if isinstance(bits, torch.Tensor) and bits.is_meta:
            # real lists beside bits without data would be followed unchecked
            check_layout(op, lists, bits, batch * heads * cdiv(seq[0], block[0]), block)
        else:
            check_lists(op, lists, bits, batch * heads, seq, block)
        if bits.is_inference():
            lists, bits = BlockLists(*(x.clone() for x in lists)), bits.clone()
        self._set(lists, None, bits, batch, heads, seq, block, any_length=state["any_length"])

    def __copy__(self) -> "BlockMask":
        forward, transposed = self.forward, self._transposed
        sizes = (self._batch, self._heads, self._seq_lengths, self._block_size)
        any_length = self._any_length
        return BlockMask._from_parts(forward, self._bits, *sizes, transposed, any_length=any_length)

    def __repr__(self) -> str:
        sq, sk = self._seq_lengths
        bq, bk = self._block_size
        return (
            f"BlockMask(batch={self._batch}, heads={self._heads}, seq_lengths=({sq}, {sk}), "
            f"block_size=({bq}, {bk}), nnz_blocks={self.nnz_blocks}, density={self.density:.4f}, "
            f"device={str(self.device)!r})"
        )


# What `__setstate__` takes is plain data, and all of it is checked.
torch.serialization.add_safe_globals([BlockMask])


def _check_lists_are_tensors(op: str, indptr: Any, indices: Any) -> None:
    """Check the two lists from which the constructor derives the others."""
    for arg, x in (("indptr", indptr), ("indices", indices)):
        check_tensor(op, arg, x)
        check_dtype(op, arg, x, [torch.int32])
        if x.dim() != 1:
            raise InvalidInput(message(op, arg, "has a wrong rank", "[n]", list(x.shape)))


def _may_have_spare_entries(mask: "BlockMask") -> bool:
    """Whether lists that came as tensors may have entries that no row owns.

    `from_dense` allocates an entry for every block of the grid, so only lists of that length may.
    """
    indices, (mb, nb) = mask._listed.indices, mask.grid
    # Traced lists may have unknown sizes, but only kernels leave spare entries, and kernels are
    # never traced.
    plain = indices.is_cuda and not torch.compiler.is_compiling() and type(indices) is torch.Tensor
    return plain and indices.numel() == mask.batch * mask.heads * mb * nb
