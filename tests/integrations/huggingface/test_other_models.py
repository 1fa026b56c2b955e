"""Encoders, cross attention and chunks: masks that decoders with windows do not have."""

import pytest
import torch

from .conftest import SIZES

transformers = pytest.importorskip("transformers", minversion="5.17")

BART = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "init_std": 0.3,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
MODELS = {
    "BertModel": ("BertConfig", {}),
    # windows that look both ways
    "ModernBertModel": ("ModernBertConfig", {"local_attention": 6, "cls_token_id": 1}),
    "BartForConditionalGeneration": ("BartConfig", BART),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 64, "n_layer": 1, "n_head": 4, "attn_pdrop": 0}),
    # chunks are no band, so their mask is evaluated
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": 5,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_outputs(kind, side, both, ids, padding):
    config, options = MODELS[kind]
    torch.manual_seed(0)
    sizes = {**SIZES, "initializer_range": 0.3, **options}
    model = getattr(transformers, kind)._from_config(
        getattr(transformers, config)(**sizes), attn_implementation="eager"
    )
    mask = None if side is None else padding[side]

    def run(model):
        out = model(ids, attention_mask=mask)
        return out.logits if "logits" in out else out.last_hidden_state

    theirs, ours = both(model.eval(), run)
    # Bart's mask is about its encoder, and all outputs of the decoder count
    everything = mask is None or kind.startswith("Bart")
    real = torch.ones_like(ids).bool() if everything else mask.bool()
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-3, atol=1e-3)
