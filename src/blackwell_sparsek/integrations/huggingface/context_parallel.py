"""Models of transformers over sequences that are split among ranks."""

from typing import Any

import torch

from ...core.checks import check_choice, message
from ...core.errors import InvalidInput, InvalidType, Unsupported
from ...distributed.api import attention as distributed_attention
from ...distributed.call import METHODS
from ...distributed.group import members_of
from ...distributed.plan import Plan
from ...masks.band import Band
from ...masks.block_mask import BlockMask
from .attention import refuse
from .dense import why_dense
from .registration import check_name, interfaces
from .visible_keys import CAUSAL, VisibleKeys, attentions_of, recognise

OP = "register_context_parallel"
NAME = "blackwell_sparsek_context_parallel"


def register_context_parallel(
    plan: Plan,
    *,
    mesh: Any = None,
    group: Any = None,
    method: str = "auto",
    cu_seqlens: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    name: str = NAME,
) -> str:
    """Make models of transformers attend over the shards of all ranks.

    Each rank passes its own tokens and their positions: `plan.shard(ids)` as `input_ids` and
    `plan.positions()[None]` as `position_ids`; the logits are those of its tokens. Everything but
    attention works token by token and needs no change. Causal and bidirectional models, sliding
    windows, softcap and sinks work; padding, dropout on attention weights, `output_attentions` and
    keys from a cache are refused.

    A model shifts `labels` inside its shard, which is wrong at the cuts: shift the labels of the
    whole sequence, then `plan.shard` them. Each rank has the gradients of its own tokens' losses;
    sum them over ranks, as in data parallel training.

    Calling it again, such as for another length, replaces the registration of that name.

    Parameters
    ----------
    plan : Plan
        Which tokens each rank has.
    mesh, group, method : as in `bsk.distributed.attention`
    cu_seqlens : int32 `[documents + 1]`, optional
        Offsets of documents in the whole sequence; `position_ids` are then
        `plan.positions(cu_seqlens=cu_seqlens)[None]`.
    block_mask : BlockMask, optional
        For the whole sequence, in all layers.
    name : str
        Another name, to have several choices side by side.

    Returns
    -------
    str
        The name, for `attn_implementation`.

    Raises
    ------
    InvalidInput
        If `plan`, `method` or `name` is wrong.
    Unsupported
        In a forward pass, for what is refused above.

    Examples
    --------
    Under `torchrun --nproc-per-node 4`::

        plan = bsk.distributed.balance(bsk.distributed.Band(None, 0), 4, seq_length=S)
        model.set_attn_implementation(register_context_parallel(plan))
        logits = model(plan.shard(ids), position_ids=plan.positions()[None]).logits
    """
    if not isinstance(plan, Plan):
        raise InvalidType(message(OP, "plan", "is not a plan", "Plan", type(plan).__name__))
    check_choice(OP, "method", method, METHODS)
    if method == "heads":
        expected = "a method for shards of the sequence"
        raise InvalidInput(message(OP, "method", "splits by heads", expected, "'heads'"))
    check_name(OP, name)
    members = members_of(OP, mesh, group)
    plan.check_world(OP, members.size)
    attention, masks = interfaces(OP)
    positions = plan.positions(members.rank, cu_seqlens=cu_seqlens)
    options = {
        "plan": plan, "mesh": mesh, "group": group, "method": method, "cu_seqlens": cu_seqlens,
        "block_mask": block_mask,
    }  # fmt: skip
    shard = _Shard(positions, options)
    attention.register(name, shard.attention_forward)
    masks.register(name, shard.make_mask)
    return name


class _Shard:
    """Shared by the layers of one rank: its positions, and options of the distributed call."""

    def __init__(self, positions: torch.Tensor, options: dict[str, Any]) -> None:
        self._positions, self._options = positions, options
        self._checked: set[torch.device] = set()

    def make_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | torch.Tensor = 0,
        kv_offset: int = 0,
        mask_function: Any = None,
        attention_mask: Any = None,
        **options: Any,
    ) -> VisibleKeys | None:
        """The band of a layer, with transformers' arguments; None if it is causal."""
        if attention_mask is not None:
            expected = "None; pack sequences without padding and pass cu_seqlens"
            got = type(attention_mask).__name__
            raise Unsupported(
                message(OP, "attention_mask", "does not apply to shards", expected, got)
            )
        if q_length != kv_length:
            expected = "no cache; see bsk.distributed.attention_decode"
            got = f"{q_length} queries and {kv_length} keys"
            raise Unsupported(message(OP, "past_key_values", "hold keys", expected, got))
        pattern = recognise(mask_function)
        if pattern is None:
            expected = "causal, bidirectional or sliding windows; or a block_mask"
            raise Unsupported(
                message(OP, "the model's mask", "is made by a function", expected, mask_function)
            )
        if pattern.documents is not None:
            # where positions jump transformers sees another sequence; in a shard they do at cuts
            steps = self._positions.diff(prepend=self._positions[:1] - 1)
            jumps = (steps != 1).cumsum(0).to(pattern.documents.device)
            if pattern.documents.shape[1] != jumps.shape[0] or bool(
                (pattern.documents != jumps).any()
            ):
                raise self._other_positions("positions that jump elsewhere")
        # without sdpa, a model need not tell its layers that they are causal: the mask alone does
        if pattern.band == CAUSAL and "sdpa" in attentions_of(type(options.get("config"))):
            return None
        sizes = (q_length, kv_length)
        return VisibleKeys(*sizes, band=pattern.band, batch=batch_size, device=options["device"])

    def attention_forward(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        *,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        block_indices: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of one layer, with transformers' arguments; see `attention.attention_forward`.

        Returns `[B, own tokens, Hq, Dv]`, contiguous, and no weights.
        """
        refuse(kwargs)
        reason = why_dense(dropout, output_attentions, position_bias, None, sinks)
        if reason is not None:
            raise Unsupported(f"{OP}: {reason}, which shards do not support")
        for name, given in (("indices", indices), ("block_indices", block_indices)):
            if given is not None:
                expected = "a model that does not choose keys"
                raise Unsupported(message(OP, name, "are not available", expected, "indices"))
        if cu_seq_lens_q is not None:
            expected = f"cu_seqlens of {OP}, for the whole sequence"
            raise Unsupported(message(OP, "cu_seq_lens_q", "is of a shard", expected, "offsets"))
        self._check_positions(position_ids)
        if isinstance(attention_mask, VisibleKeys):
            band = attention_mask.band
        elif attention_mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            left = None if sliding_window is None else sliding_window - 1
            band = Band(left, 0 if causal else left)
        else:
            expected, got = "None", type(attention_mask).__name__
            raise Unsupported(
                message(OP, "attention_mask", "does not apply to shards", expected, got)
            )
        out = distributed_attention(
            query, key, value, window=(band.left, band.right), scale=scaling, softcap=softcap,
            sinks=s_aux, **self._options,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    def _check_positions(self, given: torch.Tensor | None) -> None:
        """Rotary embeddings at other positions would be wrong without any error.

        On a GPU this waits, so it is done once.
        """
        if given is None or given.device in self._checked:
            return
        expected = self._positions.to(given.device)
        if given.shape[-1:] != expected.shape or bool((given != expected).any()):
            raise self._other_positions(given.flatten()[:4].tolist())
        if given.device.type != "cpu":
            self._checked.add(given.device)

    def _other_positions(self, got: Any) -> InvalidInput:
        expected = "plan.positions()[None], with cu_seqlens if there are documents"
        problem = "are not those of this rank's tokens"
        return InvalidInput(message(OP, "position_ids", problem, expected, got))
