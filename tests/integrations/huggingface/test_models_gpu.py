"""Models of transformers on a GPU: the real kernels, static caches, compiled steps."""

import copy
import os

import pytest
import torch

from blackwell_sparsek.testing.tolerance import assert_within_budget

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", minversion="5.17")

pytestmark = pytest.mark.gpu

LENGTH = 300


@pytest.fixture(scope="module")
def models():
    """A model with a window in bf16, and the same in fp64 with transformers' own attention."""
    from blackwell_sparsek.integrations.huggingface import register

    config = transformers.MistralConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=100,
        initializer_range=0.05,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM._from_config(config, attn_implementation="eager")
    model = model.eval().requires_grad_(False).cuda().bfloat16()
    exact = copy.deepcopy(model).double()
    # "eager" takes its softmax in fp32, where the lowest double is -inf: NaN for rows of padding
    exact.set_attn_implementation("sdpa")
    model.set_attn_implementation(register())
    return model, exact


@pytest.fixture(scope="module")
def ids():
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randint(1, 128, (2, LENGTH), device="cuda", generator=generator)


def judge(models, ids, **options):
    model, exact = models
    expected = exact(ids, **options).logits
    ours = model(ids, **options).logits
    model.set_attn_implementation("eager")
    plain = model(ids, **options).logits
    model.set_attn_implementation("blackwell_sparsek")
    mask = options.get("attention_mask")
    real = slice(None) if mask is None else mask.bool()
    assert_within_budget(ours[real], expected[real], plain[real])


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_logits(models, ids, side):
    options = {}
    if side is not None:
        options["attention_mask"] = mask = torch.ones_like(ids)
        mask[0, slice(None, 77) if side == "left" else slice(-77, None)] = 0
    judge(models, ids, **options)


def test_packed_sequences(models, ids):
    positions = torch.cat([torch.arange(130), torch.arange(LENGTH - 130)]).cuda()[None]
    judge(models, ids[:1], position_ids=positions, use_cache=False)


@pytest.mark.parametrize(
    ("cache", "padded"),
    [
        ("dynamic", False),
        ("dynamic", True),
        ("static", False),
        ("static", True),
        # compiled by transformers: one is enough, it takes half a minute
        ("compiled", True),
    ],
)
def test_generated_tokens(models, ids, padded, cache):
    """In fp32, where rounding does not decide between tokens."""
    model = copy.deepcopy(models[0]).float()
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    if cache == "static":
        options["disable_compile"] = True
    if padded:
        options["attention_mask"] = mask = torch.ones_like(ids)
        mask[0, :77] = 0
    found = []
    for name in ("sdpa", "blackwell_sparsek"):
        model.set_attn_implementation(name)
        # transformers' own attention need not be compiled again and again
        plain = {"disable_compile": True} if name == "sdpa" else {}
        found.append(model.generate(ids, max_new_tokens=8, do_sample=False, **{**options, **plain}))
    assert torch.equal(*found)


def test_a_step_in_a_cuda_graph(models, ids):
    """Replayed, it reads the length of the cache on the device."""
    model = copy.deepcopy(models[0]).float()
    model.set_attn_implementation("blackwell_sparsek")
    config = copy.deepcopy(model.config)
    config.sliding_window = None
    cache = transformers.StaticCache(config=config, max_cache_len=64)
    cache.early_initialization(2, 2, 64, torch.float32, torch.device("cuda"))
    token = ids[:, :1].clone()
    position = torch.zeros(2, 1, dtype=torch.long, device="cuda")

    def step():
        return model(token, past_key_values=cache, position_ids=position).logits

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for layer in cache.layers:
        layer.cumulative_length.zero_()
    found = []
    for i in range(10):
        token.copy_(ids[:, i : i + 1])
        position.fill_(i)
        graph.replay()
        found.append(logits[:, 0].clone())
    model.set_attn_implementation("eager")
    exact, plain = (each(ids[:, :10]).logits for each in (models[1], model))
    assert_within_budget(torch.stack(found, 1), exact, plain)


def test_torchs_flash_backend_is_ours_once_activated():
    from torch.nn.attention import (
        SDPBackend,
        activate_flash_attention_impl,
        current_flash_attention_impl,
        restore_flash_attention_impl,
        sdpa_kernel,
    )

    from blackwell_sparsek.integrations import torch_sdpa as flash
    from blackwell_sparsek.integrations.torch_sdpa import register_flash_attention

    calls = []
    original = flash._forward
    flash._forward = lambda *args: calls.append(1) or original(*args)
    q, k, v = (
        torch.randn(2, heads, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 4, 4)
    )
    results = []
    try:
        for ours in (False, True):
            if ours:
                activate_flash_attention_impl(register_flash_attention())
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    finally:
        flash._forward = original
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
    assert calls
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    exact = (out, *torch.autograd.grad(out.square().sum(), wide))
    for theirs, ours, expected in zip(*results, exact, strict=True):
        assert_within_budget(ours, expected, theirs)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert len(calls) == 1
