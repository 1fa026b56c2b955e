"""`VisibleKeys`, the keys that a layer sees, made through the mask interface of transformers."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ...attention.sdpa import may_wait
from ...core.checks import message
from ...core.errors import InvalidInput, Unsupported
from ...masks.band import EVERYTHING, Band
from ...masks.block_mask import BlockMask
from ...masks.segments import every_block, every_key_block, segments
from .dense import band_elements

OP = "huggingface"


def block_size_for(sq: int, sk: int) -> tuple[int, int]:
    """A block size that suits the kernels and wastes few rows and keys past the ends."""
    return _side(sq), max(_side(sk), 32)


def _side(length: int) -> int:
    return 128 if length >= 128 else 64 if length >= 64 else 16


class VisibleKeys:
    """The `attention_mask` that layers get from this integration.

    Query i of `q_length` sits at key slot `key_length - q_length + i`. It sees the keys that `band`
    and, if set, `block_mask` or `segments` all leave visible.

    transformers passes ready masks of rank four through, so this reports four dimensions. A model
    that computes with its mask gets the bool tensor `[B, 1, q_length, kv_length]` of what is
    visible, which is then made in memory of that size.

    Attributes
    ----------
    kv_length : int
        Slots of a layer's keys.
    key_length : int
        Slots up to that of the last query; a static cache may have more. Ignored if `lengths` is
        set.
    lengths : int32 `[B]` or None
        Key lengths on the device, for a single query.
    visible : bool `[B, kv_length]` or None
        The keys that a single query sees, if padding hides some. It includes the band.
    segments : pair of int `[B, q_length]`, `[B, key_length]` or None
        A query sees the keys that have its number.
    block_mask : BlockMask or None
        Ready made, over `key_length` keys.
    bias : float `[B or 1, H or 1, Sq or 1, kv_length]` or None
        Added to the scores.
    is_evaluated : bool
        Whether a mask function of the model was evaluated into `block_mask`, so that `band` does
        not tell its causality.
    """

    ndim: int = 4
    dtype: torch.dtype = torch.bool
    is_evaluated: bool = False

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
        bias: torch.Tensor | None = None,
        batch: int = 1,
        device: torch.device | str,
    ) -> None:
        self.device: torch.device = torch.device(device)
        self.bias = bias
        self.q_length: int = q_length
        self.kv_length: int = kv_length
        self.band = band
        self.key_length: int = kv_length if key_length is None else key_length
        self.lengths: torch.Tensor | None = lengths
        self.visible: torch.Tensor | None = visible
        self.segments = segments
        self.block_mask = block_mask
        self.batch = batch
        self._shared: dict[Any, Any] = {}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the mask that this replaces."""
        return (self.batch, 1, self.q_length, self.kv_length)

    def dim(self) -> int:
        """The rank of the mask that this replaces."""
        return self.ndim

    @property
    def elements(self) -> torch.Tensor:
        """Visible keys, bool `[B or 1, H or 1, q_length, kv_length]`. Waits for the device."""
        return self.shared("elements", self._elements)

    def _elements(self) -> torch.Tensor:
        if self.lengths is not None:
            return visible_to_one(self, self.band.left, self.kv_length)[:, None, None]
        visible = band_elements(self.band, self.q_length, self.key_length, self.device)
        if self.block_mask is not None:
            visible = visible & self.block_mask.to_element_mask()
        elif self.segments is not None:
            q_segment, k_segment = self.segments
            visible = visible & (q_segment[:, None, :, None] == k_segment[:, None, None])
        # slots past the last query are empty
        return torch.nn.functional.pad(visible, (0, self.kv_length - self.key_length))

    def limited_to(self, indices: torch.Tensor) -> "VisibleKeys":
        """These keys, as far as each query selected them: int `[B, q_length, n]`, -1 is empty."""
        batch, sq, _ = indices.shape
        selected = torch.zeros(
            batch, sq, self.kv_length + 1, dtype=torch.bool, device=indices.device
        )
        # empty slots go to an extra column that is cut off
        places = torch.where(indices < 0, self.kv_length, indices).long()
        selected = selected.scatter(2, places, True)[:, None, :, : self.kv_length]
        if self.lengths is None:
            return visible_elements(self.elements & selected)
        return VisibleKeys(
            *(1, self.kv_length),
            band=self.band,
            lengths=self.lengths,
            visible=(self.elements & selected)[:, 0, 0],
            batch=batch,
            device=self.device,
        )

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._as_tensor()[index]

    def __and__(self, other: Any) -> torch.Tensor:
        return self._as_tensor() & other

    def __or__(self, other: Any) -> torch.Tensor:
        return self._as_tensor() | other

    def __invert__(self) -> torch.Tensor:
        return ~self._as_tensor()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Functions of torch take this as the tensor that it stands for."""
        plain = [x._as_tensor() if isinstance(x, cls) else x for x in args]
        return func(*plain, **(kwargs or {}))

    def _as_tensor(self) -> torch.Tensor:
        visible = self.elements
        return visible.expand(self.batch, *visible.shape[1:])

    def __getattr__(self, name: str) -> Any:
        """Methods of tensors, as models call them on their mask; none that change it in place."""
        if name.startswith("_") or name.endswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._as_tensor(), name)

    def contiguous(self) -> "VisibleKeys":
        """Return itself; `generate` calls this on the masks that it makes."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """These keys on another device, or the tensor in another dtype.

        Hooks call this in every layer of a model that is placed on several devices; layers of one
        device share the result.
        """
        device = kwargs.get("device", args[0] if args else None)
        dtypes = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype | torch.Tensor)]
        if dtypes or not isinstance(device, str | int | torch.device):
            return self._as_tensor().to(*args, **kwargs)
        # with its index, which "cuda" leaves out
        target = torch.empty(0, device=device).device
        if target == self._placed_on():
            return self
        return self.shared(("to", target), lambda: self._moved(target))

    def _placed_on(self) -> torch.device:
        return torch.empty(0, device=self.device).device

    def _moved(self, device: torch.device) -> "VisibleKeys":
        def there(x: Any) -> Any:
            return None if x is None else x.to(device)

        made = VisibleKeys(
            *(self.q_length, self.kv_length),
            band=self.band,
            key_length=self.key_length,
            lengths=there(self.lengths),
            visible=there(self.visible),
            block_mask=there(self.block_mask),
            bias=there(self.bias),
            batch=self.batch,
            device=device,
        )
        if self.segments is not None:
            q_segment, k_segment = self.segments
            made.segments = (q_segment.to(device), k_segment.to(device))
        made.is_evaluated = self.is_evaluated
        return made

    def check_layer(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Raise unless this was made for a layer with such queries and keys."""
        got = (query.shape[2], key.shape[2])
        if got != (self.q_length, self.kv_length):
            expected = f"queries and keys {(self.q_length, self.kv_length)}"
            raise InvalidInput(message(OP, "attention_mask", "is of other sizes", expected, got))

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, made once for all layers that ask with the same key."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def mask_with(self, keep: torch.Tensor | None, block: tuple[int, int]) -> BlockMask | None:
        """The block mask, or None if the band suffices.

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
    """Slots of the visible keys of each sequence, int32 `[B, S]`, and their number.

    Slots past that number are 0. Does not wait for the device.
    """
    batch, length = visible.shape
    place = visible.cumsum(1) - 1
    slot = torch.arange(length, dtype=torch.int32, device=visible.device).expand(batch, -1)
    # hidden keys go to an extra column that is cut off
    tokens = torch.zeros(batch, length + 1, dtype=torch.int32, device=visible.device)
    tokens = tokens.scatter(1, torch.where(visible, place, length), slot)
    return tokens[:, :length], visible.sum(1, dtype=torch.int32)


def visible_elements(visible: torch.Tensor) -> VisibleKeys:
    """From a complete mask, bool `[B or 1, H or 1, Sq, Sk]`: no causality or window is added."""
    batch, _, sq, sk = visible.shape
    mask = mask_of_elements(visible)
    return VisibleKeys(
        sq, sk, band=EVERYTHING, block_mask=mask, batch=int(batch), device=visible.device
    )


def visible_to_one(plan: VisibleKeys, left: int | None, kv_length: int) -> torch.Tensor:
    """The keys that a single query at the end of each sequence sees, bool `[B, kv_length]`."""
    lengths = plan.lengths
    assert lengths is not None
    slot = torch.arange(kv_length, device=lengths.device)
    visible = slot < lengths[:, None]
    if left is not None:
        visible &= slot >= lengths[:, None] - 1 - left
    return visible if plan.visible is None else visible & plan.visible


def mask_of_elements(visible: torch.Tensor) -> BlockMask:
    """The block mask of a bool mask; does not wait where waiting is impossible."""
    block = block_size_for(*visible.shape[2:])
    if may_wait(visible.device):
        return BlockMask.from_element_mask(visible, block)
    return every_block(visible, block)


def visible_of_user(mask: Any, query: torch.Tensor, key: torch.Tensor) -> VisibleKeys:
    """From a ready mask of the user: 4-D bool, 4-D float, or FlexAttention's.

    Each layer converts its mask, but the last one is cached unless it is a bias.
    """
    sq, sk = query.shape[2], key.shape[2]
    if not isinstance(mask, torch.Tensor):
        block_mask = BlockMask.from_flex(mask)
        sizes, device = block_mask.seq_lengths, block_mask.device
        return VisibleKeys(*sizes, band=EVERYTHING, block_mask=block_mask, device=device)
    fits = mask.dim() == 4 and mask.shape[2] in (1, sq) and mask.shape[3] >= sk
    if not fits:
        shape = f"[{query.shape[0]}, 1 or {query.shape[1]}, {sq}, {sk}]"
        raise InvalidInput(
            message(OP, "attention_mask", "has a wrong shape", shape, list(mask.shape))
        )
    if torch.compiler.is_compiling():
        return visible_elements(_as_bool(mask)[..., :sk].expand(-1, -1, sq, -1))
    found = _last_user_mask.find(mask, sq, sk)
    if found is None and _is_bias(mask):
        batch, bias = query.shape[0], mask[..., :sk]
        # hidden keys have the lowest number, which needs no mask besides the bias
        return VisibleKeys(sq, sk, band=EVERYTHING, bias=bias, batch=batch, device=mask.device)
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
    if not may_wait(mask.device):
        torch._assert_async(
            _hides_or_shows(mask),
            f"{OP}: attention_mask is a bias with values other than 0 and -inf, which "
            "torch.compile and graph capture cannot find out; use attn_implementation='sdpa'",
        )
    return mask == 0


def _is_bias(mask: torch.Tensor) -> bool:
    """Whether a float mask does more than to hide keys. Waits for the device."""
    return mask.is_floating_point() and may_wait(mask.device) and not bool(_hides_or_shows(mask))


def _hides_or_shows(mask: torch.Tensor) -> torch.Tensor:
    # transformers marks hidden keys with the lowest number of the dtype
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return ((mask == 0) | hidden).all()


class _LastUserMask:
    """A cache of one mask, so that the layers of a forward pass convert it only once."""

    def __init__(self) -> None:
        # replaced as a whole: another thread must not see one mask with the result of another
        self._last: tuple[Any, Any, tuple[int, int], VisibleKeys] | None = None

    def find(self, mask: torch.Tensor, sq: int, sk: int) -> VisibleKeys | None:
        if self._last is None:
            return None
        kept, state, sizes, made = self._last
        same = kept() is mask and sizes == (sq, sk)
        return made if same and _has_state(mask, state) else None

    def keep(self, mask: torch.Tensor, sq: int, sk: int, made: VisibleKeys) -> None:
        import weakref

        self._last = (weakref.ref(mask, self._forget), _state(mask), (sq, sk), made)

    def _forget(self, kept: Any) -> None:
        """Free the memory of a mask that is gone."""
        if self._last is not None and self._last[0] is kept:
            self._last = None


def _state(x: torch.Tensor) -> int | torch.Tensor:
    """The version of a tensor, or a copy in inference mode, where torch counts no changes."""
    return x.clone() if x.is_inference() else x._version


def _has_state(x: torch.Tensor, state: int | torch.Tensor) -> bool:
    if isinstance(state, torch.Tensor):
        return may_wait(x.device) and torch.equal(x, state)
    return x._version == state


_last_user_mask = _LastUserMask()


# The mask interface: from transformers' description of a mask to `VisibleKeys`.

CAUSAL = Band(None, 0)


class Pattern(NamedTuple):
    """A mask function in terms of this package."""

    band: Band
    documents: torch.Tensor | None = None
    """Number of each token's document, int `[B, S]`, if several are packed."""


def make_visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    **options: Any,
) -> VisibleKeys | torch.Tensor | None:
    """The mask function that `register` gives to transformers, with transformers' arguments.

    Causality, windows, padding on either side and packed sequences are recognised; they take no
    memory of size Sq x Sk. Any other `mask_function` is evaluated element by element.

    With a 2-D `attention_mask` this waits for the device once per forward pass, except under
    `torch.compile` and CUDA graph capture. There, all blocks are listed with bits.

    Returns
    -------
    None if causality and the layer's own window suffice, and the model does not compute with its
    mask. The float mask of eager attention for models that support no other attention: they may add
    it to scores, or append columns to it.
    """
    if isinstance(attention_mask, VisibleKeys):
        # `generate` makes masks ahead of the forward pass, which then asks again
        return attention_mask
    sizes = (batch_size, q_length, kv_length)
    written_for = attentions_of(type(options.get("config")))
    if written_for == ():
        from transformers.masking_utils import eager_mask

        given: tuple[Any, ...] = (q_offset, kv_offset, mask_function, attention_mask)
        return eager_mask(*sizes, *given, **options)
    pattern = _traced_pattern(mask_function, options) if torch.compiler.is_compiling() else None
    if not torch.compiler.is_compiling() and not options.get("use_vmap", False):
        pattern = recognise(mask_function)
    bidirectional = pattern is not None and pattern.band.right != 0
    end: Any = kv_length if bidirectional else q_offset + q_length - kv_offset
    if isinstance(end, torch.Tensor) and q_length > 1 and may_wait(end.device):
        end = int(end)
    unplaced = isinstance(end, torch.Tensor) and q_length > 1
    if pattern is None or unplaced:
        arguments = (*sizes, q_offset, kv_offset, mask_function, attention_mask)
        return _evaluated(*arguments, **options)
    real = _real_keys(attention_mask, kv_length, kv_offset)
    if q_length == 1 and not bidirectional:
        return _of_one_query(sizes, end, pattern.band, real, options["device"])
    if real is not None:
        real = real[:, :end]
        # rows of padding see no padding either: generation goes on from them, losses may count them
        if may_wait(real.device) and bool(real.all()):
            real = None
    nothing = real is None and pattern.documents is None
    # without sdpa, a model need not tell its layers that they are causal: the mask alone does
    skip = options.get("allow_is_causal_skip", True) and "sdpa" in written_for
    if nothing and end == kv_length and pattern.band == CAUSAL and skip:
        return None
    plan = VisibleKeys(
        *(q_length, kv_length),
        band=pattern.band,
        key_length=end,
        batch=batch_size,
        device=options["device"],
    )
    if pattern.documents is not None:
        plan.segments = (pattern.documents, pattern.documents[:, :end])
    elif real is not None and may_wait(real.device):
        k_segment = real.int() - 1
        plan.segments = (k_segment.new_zeros(batch_size, q_length), k_segment)
    elif real is not None:
        plan.block_mask = every_key_block(real, q_length, block_size_for(q_length, end))
    return plan


@torch.compiler.assume_constant_result
def attentions_of(config: type) -> tuple[str, ...]:
    """Which attentions of transformers a model says it supports besides eager, by configuration.

    A configuration that is not that of a whole model is taken to support all.
    """
    from transformers import MODEL_MAPPING

    known: Any = MODEL_MAPPING
    model = known.get(config, None)
    names = ("sdpa", "flash_attn", "flex_attn")
    if not isinstance(model, type):
        return names
    return tuple(x for x in names if getattr(model, f"_supports_{x}", False))


def _of_one_query(
    sizes: tuple[int, int, int],
    end: int | torch.Tensor,
    band: Band,
    real: torch.Tensor | None,
    device: torch.device,
) -> VisibleKeys:
    """One query at slot `end - 1`, which may be known only on the device."""
    batch, _, kv_length = sizes
    lengths = torch.as_tensor(end, dtype=torch.int32, device=device).expand(batch).contiguous()
    plan = VisibleKeys(1, kv_length, band=band, lengths=lengths, batch=batch, device=device)
    if real is None:
        return plan
    visible = visible_to_one(plan, band.left, kv_length)
    if not may_wait(real.device) or bool((visible & ~real).any()):
        plan.visible = visible & real
    return plan


def _real_keys(
    attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int
) -> torch.Tensor | None:
    """The 2-D padding mask over the slots of the keys, bool `[B, kv_length]`."""
    if attention_mask is None:
        return None
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)


def _evaluated(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    mask_function: Any,
    attention_mask: torch.Tensor | None,
    *,
    device: Any = "cpu",
    use_vmap: bool = False,
    **unused: Any,
) -> VisibleKeys:
    from transformers.masking_utils import sdpa_mask

    visible = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    plan = visible_elements(visible)
    plan.is_evaluated = True
    return plan


def recognise(mask_function: Any) -> Pattern | None:
    """The `Pattern` of a mask function built from transformers' own parts; None for any other."""
    from transformers import masking_utils

    left: int | None = None
    right: int | None = None
    documents = None
    for part in _parts(mask_function):
        captured = _captured(part)
        if part is masking_utils.causal_mask_function:
            right = 0
        elif part is masking_utils.bidirectional_mask_function:
            pass
        elif _made_by(part, "sliding_window_overlay"):
            left = captured["sliding_window"] - 1
        elif _made_by(part, "sliding_window_bidirectional_overlay"):
            left = right = captured["sliding_window"]
        elif _made_by(part, "packed_sequence_mask_function") and documents is None:
            documents = captured["packed_sequence_mask"]
        else:
            return None
    return Pattern(Band(left, right), documents)


def _parts(mask_function: Any) -> Iterator[Any]:
    """The functions whose results are combined by "and"."""
    if _made_by(mask_function, "and_masks", "and_mask"):
        for part in _captured(mask_function)["mask_functions"]:
            yield from _parts(part)
    elif _made_by(mask_function, "remap_positions_for_packed_sequence"):
        # positions in a document in place of indices, from transformers 5.23 on: only beside the
        # mask of documents, within which both are equally far apart
        yield from _parts(_captured(mask_function)["mask_function"])
    else:
        yield mask_function


def _made_by(function: Any, maker: str, name: str = "inner_mask") -> bool:
    return (
        getattr(function, "__module__", None) == "transformers.masking_utils"
        and function.__qualname__ == f"{maker}.<locals>.{name}"
    )


def _captured(function: Any) -> dict[str, Any]:
    """The variables that a function captured in its closure."""
    cells = getattr(function, "__closure__", None) or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


def _traced_pattern(mask_function: Any, options: dict[str, Any]) -> Pattern | None:
    """The pattern of a function while `torch.compile` traces, when closures cannot be inspected.

    For packed sequences, chunks and functions of the user, transformers does not allow skipping the
    mask; if it does allow it, a local size is that of a sliding window.
    """
    # import names: while tracing, torch does not see the package of transformers as a module
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is causal_mask_function:
        return Pattern(CAUSAL)
    if mask_function is bidirectional_mask_function:
        return Pattern(Band(None, None))
    local = options.get("local_size")
    chunked = getattr(options.get("config"), "attention_chunk_size", None) is not None
    if local is not None and options.get("allow_is_causal_skip", False) and not chunked:
        return Pattern(Band(local - 1, 0))
    return None
