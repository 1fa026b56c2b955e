"""What a layer's queries may see, made once per forward pass and handed to every layer."""

from collections.abc import Callable
from typing import Any

import torch

from ...attention.sdpa import may_wait
from ...core.checks import message
from ...core.errors import InvalidInput, Unsupported
from ...masks.band import EVERYTHING, Band
from ...masks.block_mask import BlockMask
from ...masks.segments import every_block, segments

OP = "huggingface"


def block_size_for(sq: int, sk: int) -> tuple[int, int]:
    """Blocks that kernels like, without many rows or keys that do not exist."""
    return _side(sq), max(_side(sk), 32)


def _side(length: int) -> int:
    return 128 if length >= 128 else 64 if length >= 64 else 16


class VisibleKeys:
    """The `attention_mask` that layers get from this integration.

    Query i of `q_length` sits at key slot `key_length - q_length + i`. What it sees is what `band`,
    and `block_mask` or `segments` where there are any, leave visible together.

    transformers passes ready masks through by their rank, so this says that it has four.

    Attributes
    ----------
    kv_length : int
        Slots that the keys of a layer have.
    key_length : int
        Slots up to the last query's; a static cache may have more. Ignored where `lengths` is set.
    lengths : int32 `[B]` or None
        The same on the device, for one query.
    visible : bool `[B, kv_length]` or None
        Which keys that one query sees, where padding hides some. It includes the band.
    segments : pair of int `[B, q_length]`, `[B, key_length]` or None
        A query sees the keys with its own number.
    block_mask : BlockMask or None
        Ready made, over `key_length` keys.
    """

    ndim = 4

    def __init__(
        self,
        q_length: int,
        kv_length: int,
        *,
        band: Band,
        key_length: int | None = None,
        lengths: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
        segments: tuple[torch.Tensor, torch.Tensor] | None = None,
        block_mask: BlockMask | None = None,
        batch: int = 1,
    ) -> None:
        self.q_length, self.kv_length = q_length, kv_length
        self.band = band
        self.key_length = kv_length if key_length is None else key_length
        self.lengths, self.visible = lengths, visible
        self.segments = segments
        self.block_mask = block_mask
        self.batch = batch
        self._shared: dict[Any, Any] = {}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of the mask which this stands for."""
        return (self.batch, 1, self.q_length, self.kv_length)

    def contiguous(self) -> "VisibleKeys":
        """Itself; `generate` asks masks that it makes for this."""
        return self

    def check_layer(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Raise unless this was made for a layer with such queries and keys."""
        got = (query.shape[2], key.shape[2])
        if got != (self.q_length, self.kv_length):
            expected = f"queries and keys {(self.q_length, self.kv_length)}"
            raise InvalidInput(message(OP, "attention_mask", "is of other sizes", expected, got))

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, once for all layers that ask with the same key."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def mask_with(self, keep: torch.Tensor | None, block: tuple[int, int]) -> BlockMask | None:
        """The block mask, or None where the band says it all.

        `keep`, bool `[B or 1, H or 1, Mb, Nb]`, limits what segments show. Waits for the device.
        """
        if self.block_mask is not None:
            if keep is not None:
                raise Unsupported(
                    f"{OP}: block_sparse together with a mask of single elements; "
                    "leave out one of the two"
                )
            return self.block_mask
        if self.segments is not None:
            if keep is not None:
                return segments(*self.segments, block, band=self.band, keep=keep)
            q_segment, k_segment = self.segments
            return self.shared(
                "segments", lambda: segments(q_segment, k_segment, block, band=self.band)
            )
        return None


def listed_tokens(visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the visible keys of each sequence, int32 `[B, S]`, and how many these are.

    Slots past that number are 0. Does not wait for the device.
    """
    batch, length = visible.shape
    place = visible.cumsum(1) - 1
    slot = torch.arange(length, dtype=torch.int32, device=visible.device).expand(batch, -1)
    # what is hidden falls into a column that is cut off
    tokens = torch.zeros(batch, length + 1, dtype=torch.int32, device=visible.device)
    tokens = tokens.scatter(1, torch.where(visible, place, length), slot)
    return tokens[:, :length], visible.sum(1, dtype=torch.int32)


def visible_elements(visible: torch.Tensor) -> VisibleKeys:
    """From a complete mask, bool `[B or 1, H or 1, Sq, Sk]`: no causality or window is added."""
    batch, _, sq, sk = visible.shape
    return VisibleKeys(
        sq, sk, band=EVERYTHING, block_mask=mask_of_elements(visible), batch=int(batch)
    )


def mask_of_elements(visible: torch.Tensor) -> BlockMask:
    """The block mask of a bool mask, without waiting where that cannot be done."""
    block = block_size_for(*visible.shape[2:])
    if may_wait(visible.device):
        return BlockMask.from_element_mask(visible, block)
    return every_block(visible, block)


def visible_of_user(mask: Any, query: torch.Tensor, key: torch.Tensor) -> VisibleKeys:
    """From a ready mask of the user: 4-D bool, 4-D float of 0 and -inf, or FlexAttention's.

    Converted at each layer, except that the last one is remembered.
    """
    sq, sk = query.shape[2], key.shape[2]
    if not isinstance(mask, torch.Tensor):
        block_mask = BlockMask.from_flex(mask)
        return VisibleKeys(*block_mask.seq_lengths, band=EVERYTHING, block_mask=block_mask)
    fits = mask.dim() == 4 and mask.shape[2] in (1, sq) and mask.shape[3] >= sk
    if not fits:
        shape = f"[{query.shape[0]}, 1 or {query.shape[1]}, {sq}, {sk}]"
        raise InvalidInput(
            message(OP, "attention_mask", "has a wrong shape", shape, list(mask.shape))
        )
    if torch.compiler.is_compiling():
        return visible_elements(_as_bool(mask)[..., :sk].expand(-1, -1, sq, -1))
    found = _last_user_mask.find(mask, sq, sk)
    if found is None:
        found = visible_elements(_as_bool(mask)[..., :sk].expand(-1, -1, sq, -1))
        _last_user_mask.keep(mask, sq, sk, found)
    return found


def _as_bool(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise Unsupported(
            message(OP, "attention_mask", "has an unsupported dtype", "bool or float", mask.dtype)
        )
    visible = mask == 0
    if may_wait(mask.device):
        # transformers writes the lowest number of the dtype for what is hidden
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((visible | hidden).all()):
            raise Unsupported(
                f"{OP}: attention_mask is a bias with values other than 0 and -inf; "
                "use attn_implementation='sdpa' for this model"
            )
        return visible
    torch._assert_async(
        (visible | (mask <= torch.finfo(mask.dtype).min / 2)).all(),
        f"{OP}: attention_mask is a bias with values other than 0 and -inf",
    )
    return visible


class _LastUserMask:
    """One mask, so that the layers of a forward pass convert it once."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._mask: Any = None
        self._made: VisibleKeys | None = None

    def find(self, mask: torch.Tensor, sq: int, sk: int) -> VisibleKeys | None:
        same = self._mask is not None and self._mask() is mask
        return self._made if same and self._key == (_version(mask), sq, sk) else None

    def keep(self, mask: torch.Tensor, sq: int, sk: int, made: VisibleKeys) -> None:
        import weakref

        self._mask, self._key, self._made = weakref.ref(mask), (_version(mask), sq, sk), made


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version


_last_user_mask = _LastUserMask()
