import os

import pytest
import torch

from blackwell_sparsek.integrations.huggingface import register

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # wide enough that attention decides about the tokens
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 6
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3": {},
    "Gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 16,
    },
    "Phi3": {"sliding_window": WINDOW},
    "GptOss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def build(family, **changes):
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    if family == "GptOss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model.eval()


@pytest.fixture
def continuous_batching():
    """Skip where transformers lets no other implementation take part in it."""
    import transformers

    major, minor = map(int, transformers.__version__.split(".")[:2])
    if (major, minor) >= (5, 22):
        pytest.skip("transformers 5.22 and newer take only their own attention")


@pytest.fixture(scope="session")
def name():
    return register()


@pytest.fixture(scope="session")
def make_model(name):
    """Two-layer models by family, with random weights; call with changes to the configuration."""
    made = {}

    def make(family="Llama", **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            made[key] = build(family, **changes)
        made[key].set_attn_implementation(name)
        made[key].zero_grad()
        return made[key].eval()

    return make


@pytest.fixture
def both(name):
    """Run something on a model with transformers' own attention and with ours."""

    def run(model, function, theirs="eager"):
        results = []
        for implementation in (theirs, name):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                results.append(function(model))
        return results

    return run


@pytest.fixture
def ids():
    return torch.randint(3, 64, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def padding():
    """2-D masks of padding on the left, on the right, and in the middle."""
    masks = torch.ones(3, 2, 13, dtype=torch.long)
    masks[0, 0, :5] = 0
    masks[1, 1, -4:] = 0
    masks[2, 0, 4:7] = 0
    return dict(zip(("left", "right", "hole"), masks, strict=True))
