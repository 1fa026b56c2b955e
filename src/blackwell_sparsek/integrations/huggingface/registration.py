"""Registers this package as an attention implementation of transformers."""

from functools import partial, wraps
from typing import Any

from ...core.checks import message
from ...core.errors import InvalidInput, InvalidType, Unsupported
from ...dispatch.model_report import ATTENTION
from .attention import attention_forward, paged_attention_forward, refuse_paged
from .block_sparse import PerLayer, layer_choice
from .fp8 import Fp8
from .visible_keys import make_visible_keys

NAME = "blackwell_sparsek"
# Parts of a name that make transformers choose its own code, or ask the hub.
SPECIAL = ("flash", "sdpa", "flex", "eager", "paged", "/", "|", ":")


def register(
    block_sparse: PerLayer | None = None, *, fp8: Fp8 | bool = False, name: str = NAME
) -> str:
    """Make `attn_implementation="blackwell_sparsek"` work for models of transformers.

    Works for every model that uses transformers' attention interface, in training and generation,
    with padding on either side, sliding windows, softcap, sinks, sequences packed by
    `position_ids` or `cu_seq_lens_q`, dynamic and static caches, continuous batching (as
    `"paged|blackwell_sparsek"`; transformers 5.22 and newer allow only their own attention there),
    and under `torch.compile`. Dropout on attention weights, `output_attentions` and additive biases
    run in plain PyTorch, with a warning.

    Calling it again replaces the registration of that name.

    Parameters
    ----------
    block_sparse : BlockSparse, dict, function or None
        Sparse attention in causal layers: the same for all, or by the index of the layer, with
        None for layers that stay as they are.
    fp8 : Fp8 or bool
        Attend to caches in e4m3 that `Fp8.cache` has made, without a copy in 16 bits; True is
        `Fp8()`. Queries of prompts are rounded too, those of single tokens are not. Caches in 16
        bits work as before. Not together with `block_sparse`.
    name : str
        Another name, to have several choices side by side.

    Returns
    -------
    str
        The name, for `attn_implementation`.

    Raises
    ------
    InvalidInput
        If an argument has a wrong type, or in a forward pass a layer does not exist.

    Examples
    --------
    >>> import pytest; _ = pytest.importorskip("transformers")  # doctest: +SKIP
    >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
    >>> from blackwell_sparsek.integrations.huggingface import BlockSparse, register
    >>> sparse = BlockSparse(window=4096, global_blocks=1)
    >>> name = register(sparse, name="windowed")  # doctest: +SKIP
    >>> model = LlamaForCausalLM(LlamaConfig())  # doctest: +SKIP
    >>> model.set_attn_implementation(name)  # doctest: +SKIP
    """
    check_name("register", name)
    if not isinstance(fp8, bool | Fp8):
        got = type(fp8).__name__
        raise InvalidType(message("register", "fp8", "has a wrong type", "Fp8 or bool", got))
    if fp8 and block_sparse is not None:
        expected = "one of the two"
        raise InvalidInput(
            message("register", "fp8", "is not available with block_sparse", expected, "both")
        )
    scales = Fp8() if fp8 is True else fp8 or None
    attention, masks = interfaces("register")
    choose = layer_choice(block_sparse)

    if scales is not None:
        forward: Any = wraps(attention_forward)(partial(attention_forward, fp8=scales))
    elif block_sparse is None:
        forward = attention_forward
    else:

        @wraps(attention_forward)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            return attention_forward(module, *args, block_sparse=choose(module), **kwargs)

    attention.register(name, forward)
    masks.register(name, make_visible_keys)
    # without a mask function transformers makes no mask; the offsets of the requests suffice
    paged = paged_attention_forward if block_sparse is None else refuse_paged
    attention.register(f"paged|{name}", paged)
    ATTENTION[name] = choose
    return name


def check_name(op: str, name: Any) -> None:
    """A name that transformers hands through."""
    if not isinstance(name, str):
        raise InvalidType(message(op, "name", "is not a str", "str", type(name).__name__))
    if found := [word for word in SPECIAL if word in name]:
        raise InvalidInput(
            message(op, "name", "means something else to transformers", "other words", found)
        )


def interfaces(op: str) -> tuple[Any, Any]:
    """The registries of attention and of mask functions."""
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise Unsupported(
            f"{op}: needs transformers 5.17 or newer; pip install 'blackwell-sparsek[hf]'"
        ) from error
    return AttentionInterface, AttentionMaskInterface
