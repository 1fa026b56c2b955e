"""Generation with caches in fp8: against the same rounding in plain PyTorch and in fp64."""

import copy
import io

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers", minversion="5.17")

from blackwell_sparsek.core.errors import InvalidInput, InvalidType, Unsupported
from blackwell_sparsek.fp8.api import quantize
from blackwell_sparsek.integrations.huggingface import BlockSparse, Fp8, register
from blackwell_sparsek.integrations.huggingface.fp8 import attend_prompt
from blackwell_sparsek.testing.inputs import normal
from blackwell_sparsek.testing.tolerance import assert_within_budget

from .conftest import build

E4M3 = torch.float8_e4m3fn
SCALES = Fp8(k_scale=0.25, v_scale=2.0)


def plain_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """The formula on what stored keys and values stand for, in the dtype of the queries."""
    dtype, group = query.dtype, query.shape[1] // key.shape[1]
    if query.shape[2] > 1:
        query = quantize(query.float(), "block", impl="eager").dequantize().to(dtype)
    keys, values = key.to(dtype) * SCALES.k_scale, value.to(dtype) * SCALES.v_scale
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = query @ keys.mT * scaling
    out = scores.softmax(-1) @ values
    if attention_mask is not None:
        out = (scores + attention_mask.to(dtype)).softmax(-1) @ values
        # a row of padding sees nothing, and gives nothing to the scale of queries after it
        out = out.masked_fill((attention_mask < 0).all(-1, keepdim=True), 0)
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def names():
    """Names of attention over fp8 caches, ours and the formula."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register("fp8_formula", plain_attention)
    AttentionMaskInterface.register("fp8_formula", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    return register(fp8=SCALES, name="ours_in_fp8"), "fp8_formula"


def tokens(batch, length, seed):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, name, ids, padding, cache):
    """Logits of a prompt and of single tokens after it, all of them given."""
    model.set_attn_implementation(name)
    prompt, found = ids.shape[1] - 4, []
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
        given = {"attention_mask": padding[:, :end], "past_key_values": cache}
        found.append(model(ids[:, start:end], use_cache=True, **given).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("padded", [0, 3], ids=["whole", "padded"])
def test_prompts_and_single_tokens_keep_the_budget(names, family, padded):
    ours_name, plain_name = names
    model = build(family)
    ids = tokens(2, 23, seed=1)
    padding = torch.ones_like(ids)
    padding[1, :padded] = 0
    cache = SCALES.cache(model.config)
    ours = logits(model, ours_name, ids, padding, cache)
    assert all(layer.keys.dtype == layer.values.dtype == E4M3 for layer in cache.layers)
    plain = logits(model, plain_name, ids, padding, SCALES.cache(model.config))
    model = model.double()
    exact = logits(model, plain_name, ids, padding, SCALES.cache(model.config))
    seen = padding.bool()
    assert_within_budget(ours[seen], exact[seen], plain[seen])


def test_error_beside_that_of_bf16(names):
    """Of logits against fp64 without any rounding: that of e4m3 is 2^-4 to the 2^-9 of bf16."""
    ours_name, _ = names
    model, ids = build("Llama", initializer_range=0.1), tokens(2, 40, seed=2)
    padding = torch.ones_like(ids)
    ours = logits(model, ours_name, ids, padding, SCALES.cache(model.config))
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        rounded = model.bfloat16()(ids).logits.double()
        exact = build("Llama", initializer_range=0.1).double()(ids).logits
    error, of_bf16 = (float((x - exact).norm() / exact.norm()) for x in (ours, rounded))
    assert 0 < error < 2**-4 and error < 2**5 * of_bf16


def test_generation(names):
    ours_name, plain_name = names
    model, ids = build("Llama"), tokens(1, 17, seed=3)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    made = []
    for name in (ours_name, plain_name):
        model.set_attn_implementation(name)
        cache = SCALES.cache(model.config)
        made.append(model.generate(ids, past_key_values=cache, **options))
        assert cache.get_seq_length() == 28 and cache.layers[0].keys.element_size() == 1
    assert made[0].shape == (1, 29) and torch.equal(*made)


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
def test_copies_of_a_cache(names, family, copied):
    """As for a prompt that many requests share, or that is kept on disk."""
    model, ids = build(family), tokens(1, 12, seed=7)
    model.set_attn_implementation(names[0])
    cache = SCALES.cache(model.config)
    with torch.no_grad():
        model(ids[:, :9], past_key_values=cache)
        other = copied(cache)
        steps = [model(ids[:, 9:], past_key_values=x).logits for x in (cache, other)]
    assert torch.equal(*steps)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert type(mine) is type(theirs) and mine.keys.data_ptr() != theirs.keys.data_ptr()


def test_caches_in_16_bits_work_as_before(names):
    ours_name, _ = names
    model, ids = build("Llama"), tokens(2, 9, seed=4)
    with torch.no_grad():
        model.set_attn_implementation(register())
        expected = model(ids).logits
        model.set_attn_implementation(ours_name)
        assert torch.equal(model(ids).logits, expected)


def test_values_beyond_the_range_saturate():
    model = build("Llama")
    cache = Fp8(k_scale=0.5).cache(model.config)
    keys = torch.tensor([1000.0, -1000.0, 0.3, torch.nan]).view(1, 1, 1, 4)
    stored, values = cache.update(keys, keys, 0)
    assert stored.float().flatten()[:3].tolist() == [448.0, -448.0, 0.625]
    assert values.float().flatten()[:3].tolist() == [448.0, -448.0, 0.3125]
    assert stored.float().isnan().sum() == 1
    stored, _ = cache.update(keys, keys, 0)
    assert stored.shape == (1, 1, 2, 4)


def run(name, cache, **options):
    model = build("Llama")
    model.set_attn_implementation(name)
    with torch.no_grad():
        model(tokens(1, 5, seed=5), past_key_values=cache(model.config), **options)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: run(register(name="wide_only"), Fp8().cache),
            Unsupported,
            r"made by Fp8\(k_scale=1.0, v_scale=1.0\); use register\(fp8=\.\.\.\).* has None",
        ),
        (
            lambda: run(register(fp8=SCALES, name="others"), Fp8().cache),
            Unsupported,
            r"made by Fp8\(k_scale=1.0, v_scale=1.0\); .* has Fp8\(k_scale=0.25",
        ),
        (
            lambda: run(register(fp8=True, name="narrow"), Fp8().cache, output_attentions=True),
            Unsupported,
            "over a cache in fp8; use a cache in 16 bits",
        ),
        (lambda: register(BlockSparse(window=4), fp8=True), InvalidInput, "block_sparse"),
        (lambda: register(fp8=1.0), InvalidType, "expected Fp8 or bool, got float"),
        (lambda: Fp8(k_scale="1"), InvalidType, "k_scale is not a number"),
        (lambda: Fp8(v_scale=0.0), InvalidInput, "v_scale is out of range.*above 0"),
        (lambda: Fp8(k_scale=float("inf")), InvalidInput, "k_scale is out of range"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_gradients_of_a_prompt_are_refused_by_name(names):
    model = build("Llama")
    model.set_attn_implementation(names[0])
    with pytest.raises(Unsupported, match="gradients over a cache in fp8; use a cache in 16 bits"):
        model(tokens(1, 5, seed=5), past_key_values=SCALES.cache(model.config))


def test_a_prompt_on_any_device(device):
    """On a GPU, values are laid out as the Hopper kernel takes them."""
    shapes = ((2, 4, 70, 64), (2, 2, 90, 64), (2, 2, 90, 64))
    q, k, v = (normal(*shape, seed=i).to(device) for i, shape in enumerate(shapes))
    q, k, v = q.bfloat16(), (k * 4).to(E4M3), (v / 2).to(E4M3)
    got = attend_prompt(q, k, v, SCALES, causal=True)
    rounded = quantize(q.float(), "block", impl="eager").dequantize()
    keys, values = k.float() * SCALES.k_scale, v.float() * SCALES.v_scale

    def formula(dtype):
        scores = rounded.to(dtype) @ keys.to(dtype).repeat_interleave(2, 1).mT / 8
        hidden = torch.ones(70, 90, device=device).triu(21).bool()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        if dtype == torch.float32:
            # as the kernels round them: in e4m3, the largest is 2^8
            top = weights.amax(-1, keepdim=True)
            weights = (weights / top * 256).to(E4M3).float() / 256 * top
        return weights @ values.to(dtype).repeat_interleave(2, 1)

    assert_within_budget(got, formula(torch.float64), formula(torch.float32).to(q.dtype))


def test_a_traced_call_leaves_nothing_behind():
    """What it made are no numbers; later calls with the same scales got them."""
    fp8 = Fp8(0.37, 1.9)

    class Attention(torch.nn.Module):
        def forward(self, query, key):
            return attend_prompt(query, key, key, fp8, causal=True)

    query = normal(1, 4, 8, 16, seed=1, dtype=torch.bfloat16)
    key = normal(1, 2, 8, 16, seed=2).to(E4M3)
    exported = torch.export.export(Attention(), (query, key), strict=False)
    out = Attention()(query, key)
    assert type(out) is torch.Tensor and out.equal(exported.module()(query, key))
    # nor is anything of a real call mixed into a traced one
    with FakeTensorMode() as mode:
        Attention()(mode.from_tensor(query), mode.from_tensor(key))
