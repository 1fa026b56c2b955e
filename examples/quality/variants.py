"""Kinds of attention, as attention implementations of transformers, and the keys a query sees.

Windows, blocks and FP8 come from `register`, as for any user. Selecting keys per token and SparseK
are short functions below, which transformers calls for every layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

import blackwell_sparsek as bsk
from blackwell_sparsek.integrations.huggingface import BlockSparse, Fp8, register

FP8 = Fp8()


@dataclass(frozen=True)
class Variant:
    """One way to attend.

    `visible(q, k)` is a bool tensor `[..., S, S]` of what queries see, before causality; None if
    that follows from the hidden states. `prepare(model)` adds what a variant has to learn.
    """

    family: str
    name: str
    register: Callable[[], str]
    visible: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    prepare: Callable[[Any], None] | None = None
    learns: bool = True
    cache: Callable[[Any], Any] | None = None

    def logits_of(self, model):
        """A function from tokens `[B, S]` to the logits of `model` under this variant."""

        def logits_of(tokens):
            if self.cache is None:
                return model(input_ids=tokens, use_cache=False).logits
            return model(input_ids=tokens, past_key_values=self.cache(model.config)).logits

        return logits_of


def dense():
    """What torch computes."""
    return Variant("dense", "dense", lambda: "sdpa", everything)


def everything(q, k):
    """All keys."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)


def window(tokens):
    """The latest keys."""
    name = f"window {tokens}"

    def visible(q, k):
        back = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        return back < tokens

    sparse = BlockSparse(window=tokens)
    return Variant("window", name, lambda: register(sparse, name=f"quality {name}"), visible)


def blocks(top_k, block_size=16):
    """The best blocks for each block of queries, by products of means, and their own."""
    sparse = BlockSparse(top_k=top_k, block_size=block_size)
    return _of_blocks("blocks", f"best {top_k} blocks of {block_size}", sparse)


def blocks_and_window(number, block_size):
    """About so many blocks: half of them the latest, the first, and the best of the others."""
    half = max(number // 2, 1)
    sparse = BlockSparse(
        window=half * block_size, global_blocks=1, top_k=half, block_size=block_size
    )
    name = f"first, best {half} and latest {half} blocks of {block_size}"
    return _of_blocks("window and blocks", name, sparse)


def _of_blocks(family, name, sparse):
    def visible(q, k):
        return sparse.mask(q, k).to_element_mask()

    return Variant(family, name, lambda: register(sparse, name=f"quality {name}"), visible)


def tokens(top_k):
    """The best keys for each query token, by its own scores; the latest always among them."""
    name = f"best {top_k} keys"

    def chosen(q, k):
        return bsk.select_keys(q.detach(), k.detach(), granularity=1, top_k=top_k, force_last=1)

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        out = bsk.sparse_attention(query, key, value, chosen(query, key), scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    def visible(q, k):
        return chosen(q, k).to_dense()

    return Variant("keys per token", name, _registered(f"quality {name}", attend), visible)


def sparsek(keep):
    """SparseK: scores of tokens, learned, decide how long later queries see them."""
    name = f"SparseK {keep}"

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        u = module.sparsek.made
        gate = (u, bsk.sparsek_causal(u, float(keep)))
        module.sparsek.visible = u.detach()[:, :, None] > gate[1].detach()[..., None]
        out = bsk.attention(query, key, value, causal=True, key_gate=gate, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    return Variant("SparseK", name, _registered(f"quality {name}", attend), None, add_scores)


def fp8():
    """Queries, keys and values rounded to e4m3; all keys are seen."""
    return Variant(
        "FP8",
        "FP8",
        lambda: register(fp8=FP8, name="quality fp8"),
        everything,
        learns=False,
        cache=FP8.cache,
    )


def _registered(name, attend):
    def register_it():
        # without a mask function transformers makes no mask: the functions above are causal
        AttentionInterface.register(name, attend)
        return name

    return register_it


class Scores(nn.Module):
    """Scores `[B, Hkv, S]` of the hidden states that an attention layer gets; 0 at first."""

    def __init__(self, hidden, kv_heads):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(kv_heads, hidden))
        self.made = self.visible = None

    def forward(self, hidden_states):
        """Keep the scores for the attention function, which does not get the hidden states."""
        self.made = (hidden_states @ self.weight.mT).transpose(1, 2).contiguous()


def attention_layers(model):
    """The modules that attend, in order."""
    found = (m for m in model.modules() if "Attention" in type(m).__name__)
    return [module for module in found if hasattr(module, "layer_idx")]


def add_scores(model):
    """Give every attention layer scores, computed before it runs."""

    def before(module, args, kwargs):
        module.sparsek(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    config = model.config
    for module in attention_layers(model):
        module.sparsek = Scores(config.hidden_size, config.num_key_value_heads)
        module.register_forward_pre_hook(before, with_kwargs=True)


def density(variant, model, length):
    """The share of the causal (query, key) pairs that are seen, in sequences of this length."""
    if variant.visible is None:
        seen = [module.sparsek.visible for module in attention_layers(model)]
    else:
        config = model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        generator = torch.Generator().manual_seed(0)
        # how many keys are seen does not depend on their values
        q = torch.randn(1, config.num_attention_heads, length, size, generator=generator)
        k = torch.randn(1, config.num_key_value_heads, length, size, generator=generator)
        seen = [variant.visible(q, k)]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    shares = [(x & causal).float().sum((-1, -2)).mean() / causal.sum() for x in seen]
    return (sum(shares) / len(shares)).item()
