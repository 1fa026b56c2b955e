"""Llama 3.1 8B with random weights, and attention functions to compare with."""

import torch
import transformers

LLAMA_31_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
SMALL = LLAMA_31_8B | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def build(settings, device, dtype, window):
    """A Llama, and a Mistral with a window that shares its weights."""
    llama_config = transformers.LlamaConfig(**settings)
    mistral_config = transformers.MistralConfig(**settings, sliding_window=window)
    models = []
    for kind, config in (("Llama", llama_config), ("Mistral", mistral_config)):
        config.dtype = dtype
        with torch.device("meta"):
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
        models.append(model.to(dtype))
    llama, mistral = (model.eval().requires_grad_(False) for model in models)
    llama.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in llama.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    mistral.load_state_dict(llama.state_dict(), assign=True)
    for model in (llama, mistral):
        # its buffers are computed, not stored
        with device:
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return {None: llama, window: mistral}


def tokens(settings, batch, length, device):
    generator = torch.Generator(device).manual_seed(length)
    return torch.randint(
        0, settings["vocab_size"], (batch, length), device=device, generator=generator
    )


def filled_cache(model, batch, length, room, device, dtype):
    """A static cache as if `length` tokens had been read, of random keys and values."""
    config = model.config
    cache = transformers.StaticCache(config=config, max_cache_len=length + room)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, dtype, device)
    generator = torch.Generator(device).manual_seed(1)
    for layer in cache.layers:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    return cache


def rewind(cache, length):
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)


def wide_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """What the others are judged by: the same layer with attention in a wider dtype."""
    wide = torch.float64 if query.dtype == torch.float32 else torch.float32
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.to(wide) for x in (query, key, value)),
        is_causal=True,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def cropped_sdpa(length):
    """The best that SDPA could do in a step: without a mask, told the length beforehand."""

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        keys, values = (x[:, :, :length] for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("sdpa_cropped", attend)


def kv_memory(settings):
    """Bytes of keys and values for each token, as configured and with as many heads as queries."""
    layers, dim = settings["num_hidden_layers"], settings["head_dim"]
    return {
        f"{kind} ({heads} heads)": {
            "bytes_per_token": 2 * layers * heads * dim * 2,
            **{
                f"gib_at_{n}": 2 * layers * heads * dim * 2 * n / 2**30
                for n in (8192, 32768, 131072)
            },
        }
        for kind, heads in (
            ("GQA", settings["num_key_value_heads"]),
            ("MHA", settings["num_attention_heads"]),
        )
    }
