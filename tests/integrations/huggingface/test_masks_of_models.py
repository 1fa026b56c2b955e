"""Models that use their mask, their heads or their dtypes otherwise than a Llama does."""

import pytest
import torch

from blackwell_sparsek import Unsupported
from blackwell_sparsek.integrations.huggingface import BlockSparse, register
from blackwell_sparsek.integrations.huggingface.attention import attention_forward
from blackwell_sparsek.integrations.huggingface.dense import dense_attention
from blackwell_sparsek.integrations.huggingface.visible_keys import make_visible_keys

from .conftest import SIZES

transformers = pytest.importorskip("transformers", minversion="5.17")

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "init_std": 0.3,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Models without sdpa, whose decoder layers do not say that they are causal.
CAUSAL_BY_MASK = {
    "BigBirdPegasus": {"attention_type": "original_full"},
    "NllbMoe": {"num_experts": 4},
    "PegasusX": {},
}
COMPRESSED = {
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 6,
    "hc_mult": 2,
    "sliding_window": 6,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}


def build(kind, config):
    torch.manual_seed(0)
    made = getattr(transformers, kind)._from_config(config, attn_implementation="eager")
    for p in made.parameters():
        if not torch.isfinite(p).all() or (p.dim() > 1 and not p.any()):
            torch.nn.init.normal_(p, std=0.3)
    return made.eval()


@pytest.fixture
def compressed():
    config = transformers.DeepseekV4Config(**{**SIZES, **COMPRESSED})
    return build("DeepseekV4ForCausalLM", config)


@pytest.mark.parametrize("family", CAUSAL_BY_MASK)
@pytest.mark.parametrize("side", [None, "right"])
def test_causality_that_the_mask_alone_tells(family, side, both, ids, padding):
    config = getattr(transformers, f"{family}Config")(**SEQ2SEQ, **CAUSAL_BY_MASK[family])
    model = build(f"{family}ForConditionalGeneration", config)
    mask = None if side is None else padding[side]
    theirs, ours = both(
        model, lambda m: m(ids, attention_mask=mask, decoder_input_ids=ids[:, :7]).logits
    )
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("side", [None, "left"])
def test_a_mask_that_the_model_appends_to(side, compressed, both, ids, padding):
    ids, mask = torch.cat([ids, ids], 1), None
    if side is not None:
        mask = torch.cat([padding[side], torch.ones_like(padding[side])], 1)

    def run(model):
        logits = model(ids, attention_mask=mask).logits
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        return logits, model.generate(ids, attention_mask=mask, **options)

    theirs, ours = both(compressed, run)
    rows = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(ours[0][rows], theirs[0][rows], **TOLERANCE)
    assert torch.equal(ours[1], theirs[1])


def test_a_model_with_eager_attention_alone_is_not_sparse(compressed, ids):
    """Its complete mask would have been all there is, and the pattern ignored."""
    compressed.set_attn_implementation(register(BlockSparse(window=4), name="sparse"))
    with pytest.raises(Unsupported, match="block_sparse in a model that supports eager"):
        compressed(ids)


def test_one_graph_of_a_model_without_sdpa(make_model, ids):
    """Traced too, its attentions are looked up."""
    model = make_model("Gemma2", num_hidden_layers=1)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(ids).logits
        found = torch.compile(model, fullgraph=True, backend="eager")(ids).logits
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_pooling_head_that_repeats_its_mask(both, ids):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.Siglip2VisionConfig(
        num_hidden_layers=1, num_patches=16, patch_size=8, **sizes
    )
    visible = torch.ones(2, 16, dtype=torch.long)
    visible[1, 12:] = 0
    given = {
        "pixel_values": torch.randn(2, 16, 192, generator=torch.Generator().manual_seed(1)),
        "pixel_attention_mask": visible,
        "spatial_shapes": torch.tensor([[4, 4], [4, 3]]),
    }
    model = build("Siglip2VisionModel", config)
    theirs, ours = both(model, lambda m: m(**given).pooler_output, "sdpa")
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def plan_of(padding, queries=13):
    from transformers.masking_utils import causal_mask_function

    return make_visible_keys(
        2, queries, 13, 13 - queries, mask_function=causal_mask_function,
        attention_mask=padding.bool(), device="cpu",
    )  # fmt: skip


def test_methods_of_tensors(padding):
    plan = plan_of(padding["left"])
    expected = plan[:]
    assert torch.equal(plan.repeat(1, 2, 1, 1), expected.repeat(1, 2, 1, 1))
    assert torch.equal(plan.flip(-1), expected.flip(-1))
    assert plan.size(2) == 13
    assert torch.equal(plan.to(torch.float32), expected.float())
    assert torch.equal(plan.to("cpu", torch.float32), expected.float())
    for name in ("masked_fill_", "no_method"):
        with pytest.raises(AttributeError, match=name):
            getattr(plan, name)


@pytest.mark.parametrize("queries", [13, 1])
def test_layers_on_another_device(queries, padding):
    """Hooks of models that are placed on several devices move what layers get."""
    plan = plan_of(padding["left"], queries)
    assert plan.to("cpu") is plan
    moved = plan.to("meta", non_blocking=True)
    assert plan.to("meta") is moved
    assert (moved.shape, moved.band, moved.device.type) == (plan.shape, plan.band, "meta")
    tensors = [x for x in (moved.lengths, moved.visible, *(moved.segments or ())) if x is not None]
    assert tensors and all(x.device.type == "meta" for x in tensors)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("side", [None, "left"])
def test_generation_under_autocast(family, side, make_model, both, ids, padding):
    """Rotated keys stay in fp32 there and values are in bf16; sdpa casts both."""
    mask = torch.ones_like(ids) if side is None else padding[side]

    def generate(model):
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = model.generate(
                ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True,
                **options,
            )  # fmt: skip
        return made.logits[0].float()

    theirs, ours = both(make_model(family), generate, "sdpa")
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_large_heads(cache, make_model, both, ids, padding):
    """Heads beyond the kernels of prompts run in plain PyTorch, as Gemma 4's of 512."""
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    model = make_model("Llama", head_dim=272)
    for mask in (torch.ones_like(ids), padding["left"]):
        theirs, ours = both(
            model, lambda m, mask=mask: m.generate(ids, attention_mask=mask, **options), "sdpa"
        )
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("with_weights", [False, True])
def test_sinks_of_single_queries(with_weights):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 7, 16, generator=generator)
    sinks = torch.randn(2, 4, 7, 1, generator=generator)
    visible = torch.ones(7, 7).tril().bool()
    scores = (q @ k.mT * 0.25).masked_fill(~visible, -torch.inf)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    out, made = dense_attention(
        q, k, v, visible[None, None], scale=0.25, sinks=sinks, with_weights=with_weights
    )
    torch.testing.assert_close(out, weights @ v)
    if with_weights:
        torch.testing.assert_close(made, weights)
    found, _ = attention_forward(None, q, k, v, None, scaling=0.25, sinks=sinks, is_causal=True)
    torch.testing.assert_close(found.transpose(1, 2), weights @ v)
    with pytest.raises(Unsupported, match="sinks together with s_aux"):
        attention_forward(None, q, k, v, None, sinks=sinks, s_aux=torch.zeros(4))


def test_a_position_bias_over_all_slots_of_a_static_cache():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 9, 16, generator=generator)
    bias = torch.randn(1, 4, 5, 9, generator=generator)
    from transformers.masking_utils import causal_mask_function

    plan = make_visible_keys(1, 5, 9, mask_function=causal_mask_function, device="cpu")
    given = {"scaling": 0.25, "position_bias": bias}
    found, _ = attention_forward(None, q[:, :, :5], k, v, plan, **given)
    given["position_bias"] = bias[..., :5]
    first = (x[:, :, :5] for x in (q, k, v))
    expected, _ = attention_forward(None, *first, None, is_causal=True, **given)
    torch.testing.assert_close(found, expected)
