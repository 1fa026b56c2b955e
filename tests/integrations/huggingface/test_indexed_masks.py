"""Models that compute with their mask, as with a tensor, and select keys on their own."""

import pytest
import torch

from blackwell_sparsek import Unsupported
from blackwell_sparsek.integrations.huggingface import BlockSparse, register
from blackwell_sparsek.integrations.huggingface.visible_keys import make_visible_keys

from .conftest import SIZES

transformers = pytest.importorskip("transformers", minversion="5.17")

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
LATENT = {
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
}
MODELS = {
    "DeepseekV32": LATENT,
    "GlmMoeDsa": LATENT,
    "Doge": {"keep_window_size": 8},
    "MiniMax": {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
}


@pytest.fixture(scope="module")
def models():
    made = {}
    for family, options in MODELS.items():
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
        torch.manual_seed(0)
        made[family] = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return made


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("side", [None, "left", "right", "hole"])
def test_logits(family, side, models, both, ids, padding):
    mask = None if side is None else padding[side]
    theirs, ours = both(models[family], lambda m: m(ids, attention_mask=mask).logits, "sdpa")
    # two equal scores decide about a key where padding is all that a row of padding sees
    rows = slice(None) if mask is None or family == "MiniMax" else mask.bool()
    torch.testing.assert_close(ours[rows], theirs[rows], **TOLERANCE)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 2}])
def test_generated_tokens(family, side, options, models, both, ids, padding):
    mask = torch.ones_like(ids) if side is None else padding[side]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **options}
    theirs, ours = both(
        models[family], lambda m: m.generate(ids, attention_mask=mask, **options), "sdpa"
    )
    assert torch.equal(ours, theirs)


def test_gradients_through_selected_keys(models, name, ids):
    gradients, model = [], models["DeepseekV32"]
    for implementation in ("sdpa", name):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_b_proj.weight.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], **TOLERANCE)


def plan(padding=None, queries=13, keys=13, offset=0, window=None):
    from transformers.masking_utils import (
        causal_mask_function,
        sdpa_mask,
        sliding_window_causal_mask_function,
    )

    function = causal_mask_function
    if window is not None:
        function = sliding_window_causal_mask_function(window)
    sizes = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": offset}
    options = {"mask_function": function, "attention_mask": padding, "device": "cpu"}
    expected = sdpa_mask(**sizes, **options, allow_is_causal_skip=False)
    return make_visible_keys(**sizes, **options, allow_is_causal_skip=False), expected


@pytest.mark.parametrize("side", [None, "left", "right", "hole"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(13, 13, 0), (5, 13, 8), (1, 13, 12)])
def test_a_mask_as_a_tensor(side, window, queries, keys, offset, padding):
    """It behaves as the bool tensor that sdpa gets."""
    real = None if side is None else padding[side].bool()
    mask, expected = plan(real, queries, keys, offset, window)
    expected = expected.expand(2, 1, queries, keys)
    assert mask.dtype == torch.bool and mask.device == expected.device
    assert mask.shape == expected.shape and mask.dim() == 4
    assert torch.equal(mask[:, 0, :, :], expected[:, 0])
    assert torch.equal(mask[:, :, :, :3], expected[..., :3])
    assert torch.equal(~mask, ~expected)
    other = torch.rand(2, 1, queries, keys) < 0.5
    assert torch.equal(mask & other, expected & other)
    assert torch.equal(other & mask, expected & other)
    assert torch.equal(torch.where(mask, 1.0, 2.0), torch.where(expected, 1.0, 2.0))


def test_a_static_cache_shows_no_slot_past_the_last_query():
    mask, expected = plan(queries=5, keys=20, offset=3)
    assert torch.equal(mask[:, 0], expected.expand(2, 1, 5, 20)[:, 0])
    assert not mask[..., 8:].any()


def test_selected_keys_of_packed_sequences(models, name, ids):
    model, offsets = models["DeepseekV32"], torch.tensor([0, 5, 13], dtype=torch.int32)
    model.set_attn_implementation(name)
    with pytest.raises(Unsupported, match="cu_seq_lens_q together with indices"):
        model(ids[:1], cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, use_cache=False)


def test_selected_keys_and_block_sparse(models, ids):
    """A pattern of blocks would be ignored: the layer's own choice has no band left."""
    model = models["DeepseekV32"]
    model.set_attn_implementation(register(BlockSparse(window=4), name="sparse"))
    with pytest.raises(Unsupported, match="block_sparse in a layer that selects its keys"):
        model(ids[:1])
