"""Sparse attention by configuration, against dense attention with the mask written out."""

import copy
import re

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek import InvalidInput, InvalidType, Unsupported
from blackwell_sparsek.integrations.huggingface import BlockSparse, register
from blackwell_sparsek.integrations.huggingface.attention import attention_forward
from blackwell_sparsek.integrations.huggingface.visible_keys import make_visible_keys

pytest.importorskip("transformers", minversion="5.17")

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
LENGTH = 75
FIXED = {
    "window": BlockSparse(window=20, block_size=16),
    "sinks": BlockSparse(window=20, global_blocks=1, block_size=16),
    "stride": BlockSparse(stride=3, block_size=16),
    "all": BlockSparse(window=5, global_blocks=1, stride=3, block_size=16),
}


@pytest.fixture
def long_ids():
    return torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def visible(sparse, sq, sk):
    """Element by element, from the description in words."""
    q, k = torch.arange(sk - sq, sk)[:, None], torch.arange(sk)
    if sparse.is_window:
        return (k <= q) & (k > q - sparse.window)
    size = sparse.block_size
    first = (q - (sk - sq)) // size * size + sk - sq
    last = (first + size - 1).clamp(max=sk - 1)
    seen = (k // size < sparse.global_blocks) | ((k // size + 1) * size > first)
    if sparse.window:
        seen = seen | ((k // size + 1) * size > first - sparse.window + 1)
    if sparse.stride:
        seen = seen | ((last // size - k // size) % sparse.stride == 0)
    return seen & (k <= q)


@pytest.mark.parametrize("kind", FIXED)
def test_prompt(kind, make_model, long_ids):
    """In fp64: large weights multiply what the first layer rounds, by luck more or less."""
    model, sparse = copy.deepcopy(make_model()).double(), FIXED[kind]
    model.set_attn_implementation(register(sparse, name="sparse"))
    ours = model(long_ids).logits
    model.set_attn_implementation("sdpa")
    mask = visible(sparse, LENGTH, LENGTH)[None, None]
    assert not mask.equal(torch.ones_like(mask).tril())
    theirs = model(long_ids, attention_mask=mask.expand(2, -1, -1, -1)).logits
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", FIXED)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_sees_the_same_blocks(kind, cache, make_model, long_ids):
    """Reading one token after another gives what reading them together gives."""
    import transformers

    model, sparse = make_model(), FIXED[kind]
    model.set_attn_implementation(register(sparse, name="sparse"))
    # to a multiple of the block: a block of queries then is a block of keys
    whole = LENGTH // 16 * 16
    model_cache = transformers.DynamicCache(config=model.config)
    if cache == "static":
        model_cache = transformers.StaticCache(config=model.config, max_cache_len=100)
    with torch.no_grad():
        expected = model(long_ids[:, :whole]).logits
        model(long_ids[:, :32], past_key_values=model_cache)
        steps = [
            model(long_ids[:, i : i + 1], past_key_values=model_cache).logits
            for i in range(32, whole)
        ]
    torch.testing.assert_close(torch.cat(steps, 1), expected[:, 32:], **TOLERANCE)


def test_padding_and_sparsity_together(make_model, long_ids):
    model, sparse = make_model(), FIXED["sinks"]
    register(sparse, name="sparse")
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[0, :21] = 0
    mask = visible(sparse, LENGTH, LENGTH)[None, None] & padding.bool()[:, None, None]
    positions = (padding.cumsum(1) - 1).clamp(min=0)
    ours = _with(model, "sparse", long_ids, attention_mask=padding, position_ids=positions)
    theirs = _with(model, "sdpa", long_ids, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(ours[padding.bool()], theirs[padding.bool()], **TOLERANCE)


def _with(model, name, ids, **options):
    model.set_attn_implementation(name)
    return model(ids, **options).logits


def test_layers_choose(make_model, long_ids):
    model, sparse = make_model(), BlockSparse(window=4)
    found = [
        _with(model, register(choice, name="sparse"), long_ids)
        for choice in (sparse, {0: sparse, 1: sparse}, lambda layer: sparse)
    ]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    dense = _with(model, register(), long_ids)
    only_first = _with(model, register({0: sparse}, name="sparse"), long_ids)
    assert not torch.allclose(only_first, dense, atol=1e-2)
    assert not torch.allclose(only_first, found[0], atol=1e-2)


def test_dense_and_sparse_layers_share_padding(make_model, long_ids):
    model = make_model()
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[0, :21] = 0
    everything = BlockSparse(window=20, stride=1, block_size=16)
    dense = _with(model, register(), long_ids, attention_mask=padding)
    mixed = register({1: everything}, name="sparse")
    found = _with(model, mixed, long_ids, attention_mask=padding)
    torch.testing.assert_close(found, dense, **TOLERANCE)
    options = {"attention_mask": padding, "max_new_tokens": 3, "do_sample": False}
    tokens = [
        (model.set_attn_implementation(name), model.generate(long_ids, **options))[1]
        for name in ("sdpa", mixed)
    ]
    assert torch.equal(*tokens)


class TestTopK:
    def test_enough_blocks_are_dense(self, make_model, long_ids):
        model = make_model()
        dense = _with(model, register(), long_ids)
        sparse = register(BlockSparse(top_k=5, block_size=16), name="sparse")
        torch.testing.assert_close(_with(model, sparse, long_ids), dense, **TOLERANCE)

    def test_the_best_blocks_are_taken(self):
        q, k = torch.zeros(1, 2, 32, 4), torch.zeros(1, 1, 80, 4)
        q[:, 0, :, 0] = q[:, 1, :, 1] = 1.0
        k[:, :, 16:32, 0] = k[:, :, 32:48, 1] = 1.0
        keep = BlockSparse(top_k=1, block_size=16).keep(q, k)
        # queries 0 .. 15 are at positions 48 .. 63, block 3
        assert keep[0, :, 0].int().tolist() == [[0, 1, 0, 1, 0], [0, 0, 1, 1, 0]]
        assert keep[0, :, 1].int().tolist() == [[0, 1, 0, 0, 1], [0, 0, 1, 0, 1]]

    def test_what_is_seen_anyway_does_not_count(self):
        q = torch.randn(1, 1, 80, 4, generator=torch.Generator().manual_seed(0))
        sparse = BlockSparse(top_k=2, global_blocks=1, block_size=16)
        assert sparse.keep(q, q)[0, 0].sum(-1).tolist() == [1, 2, 3, 4, 4]

    def test_generation(self, make_model, long_ids):
        model = make_model()
        model.set_attn_implementation(register(BlockSparse(top_k=1, block_size=16), name="sparse"))
        out = model.generate(long_ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert out.shape == (2, LENGTH + 3)

    def test_gradients_flow(self, make_model, long_ids):
        model = make_model().train()
        model.set_attn_implementation(register(BlockSparse(top_k=1, block_size=16), name="sparse"))
        model(long_ids, labels=long_ids).loss.backward()
        assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


class TestSelection:
    """`block_indices` of MiniMax-M3: each query's own blocks of keys, by KV head."""

    @pytest.mark.parametrize(("sq", "sk"), [(70, 70), (1, 70), (5, 33)])
    def test_against_the_mask_written_out(self, sq, sk):
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(2, 4, sq, 8, generator=generator)
        k, v = torch.randn(2, 2, 2, sk, 8, generator=generator)
        nb, size = -(-sk // 16), 16
        own = (torch.arange(sk - sq, sk) // size).expand(2, 2, -1)
        other = torch.randint(0, nb, (2, 2, sq), generator=generator)
        other = torch.where(other < own, other, -1)
        indices = torch.stack([own, other, torch.full_like(own, -1)], -1)
        module = torch.nn.Module()
        module.indexer = torch.nn.Module()
        module.indexer.block_size = size
        out, _ = attention_forward(module, q, k, v, None, scaling=0.3, block_indices=indices)
        block = torch.arange(sk) // size
        chosen = (indices.unsqueeze(-1) == block).any(3)
        visible = chosen & (torch.arange(sk) <= torch.arange(sk - sq, sk)[:, None])
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, visible.repeat_interleave(2, 1), scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out, expected.transpose(1, 2), **TOLERANCE)

    def test_the_model(self, name):
        """A small MiniMax-M3 text model, against the mask that it makes for SDPA itself."""
        from transformers import MiniMaxM3VLTextConfig
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

        config = MiniMaxM3VLTextConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            dense_intermediate_size=32,
            shared_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rotary_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
            index_n_heads=2,
            index_head_dim=16,
            index_block_size=16,
            index_topk_blocks=2,
            index_local_blocks=1,
            initializer_range=0.3,
            layer_types=["minimax_m3_sparse"] * 2,
            pad_token_id=0,
        )
        torch.manual_seed(0)
        model = modeling.MiniMaxM3VLTextModel._from_config(
            config, attn_implementation="sdpa"
        ).eval()
        ids = torch.randint(0, 64, (2, 70))
        with torch.no_grad():
            theirs = model(ids).last_hidden_state
            model.set_attn_implementation(name)
            ours = model(ids).last_hidden_state
        torch.testing.assert_close(ours, theirs, **TOLERANCE)

    def test_wrong_sizes(self):
        q = torch.zeros(1, 4, 3, 8)
        module = torch.nn.Module()
        module.indexer = torch.nn.Module()
        module.indexer.block_size = 16
        indices = torch.zeros(1, 2, 2, 1, dtype=torch.int64)
        with pytest.raises(InvalidInput, match="block_indices is of other sizes"):
            attention_forward(module, q, q, q, None, block_indices=indices)
        offsets = torch.tensor([0, q.shape[2]], dtype=torch.int32)
        packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        with pytest.raises(Unsupported, match="cu_seq_lens_q together with indices"):
            attention_forward(module, q, q, q, None, block_indices=indices, **packed)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({}, InvalidInput, "shows no key"),
            ({"window": 0}, InvalidInput, "window is too small"),
            ({"stride": 1.5}, InvalidType, "stride is not an int"),
            ({"window": 8, "block_size": 17}, InvalidInput, "block_size is unsupported"),
        ],
    )
    def test_configuration(self, options, error, text):
        with pytest.raises(error, match=text):
            BlockSparse(**options)

    def test_register(self):
        with pytest.raises(InvalidType, match="block_sparse is of a wrong type"):
            register(3)
        with pytest.raises(InvalidType, match="name is not a str; expected str, got int"):
            register(name=3)
        with pytest.raises(InvalidType, match=r"names a layer by something else; .* got a"):
            register({"a": None})
        with pytest.raises(InvalidType, match=r"gives layer 1 something else; .* got int"):
            register({0: None, 1: 16})

    @pytest.mark.parametrize("layer", [2, 99])
    def test_a_layer_that_the_model_does_not_have(self, layer, make_model, long_ids):
        model = make_model()
        sparse = BlockSparse(window=4)
        model.set_attn_implementation(register({0: sparse, layer: sparse}, name="beyond"))
        with pytest.raises(
            InvalidInput,
            match=rf"block_sparse names layers that .*; expected layers 0 to 1, got \[{layer}\]",
        ):
            model(long_ids)

    def test_explain_tells_which_layers_are_sparse(self, make_model):
        model = make_model()
        sparse = BlockSparse(window=4)
        model.set_attn_implementation(register({1: sparse}, name="second"))
        found = bsk.explain(model)
        assert found.attention == {0: None, 1: sparse}
        lines = str(found).splitlines()
        assert lines[0] == "attention of layer 0: dense"
        assert lines[1] == f"attention of layer 1: {sparse}"
        model.set_attn_implementation(register(sparse, name="both"))
        assert str(bsk.explain(model)).startswith(f"attention of layers 0-1: {sparse}\n")
        model.set_attn_implementation("sdpa")
        assert bsk.explain(model).attention == {}

    @pytest.mark.parametrize("tokens", [1, 16, 40, 100])
    @pytest.mark.parametrize(
        "sparse",
        [
            BlockSparse(window=20, block_size=16),
            BlockSparse(window=17, global_blocks=1, block_size=16),
            BlockSparse(stride=3, block_size=16),
            BlockSparse(top_k=2, block_size=16),
            BlockSparse(top_k=2, window=20, global_blocks=1, block_size=16),
        ],
        ids=str,
    )
    def test_the_report_counts_blocks_of_a_prompt(self, sparse, tokens, make_model):
        model = make_model()
        model.set_attn_implementation(register({1: sparse}, name="second"))
        report = bsk.sparsity_report(model, tokens=tokens)
        first, second = (layer for layer in report.layers if layer.kind == "attention")
        assert (first.pattern, first.kept, first.total) == (
            "dense",
            *[tokens * (tokens + 1) // 2] * 2,
        )
        assert (second.pattern, second.unit) == (str(sparse), "blocks")
        q, k = torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8)
        keep = sparse.keep(q, k)
        rows = keep.shape[2]
        assert second.total == rows * (rows + 1) // 2
        assert (keep.tril() == keep).all()
        assert keep.sum((0, 2, 3)).unique().tolist() == [second.kept]
        assert report.parameters == sum(x.numel() for x in model.parameters())

    def test_a_layer_below_zero(self):
        with pytest.raises(InvalidInput, match=r"block_sparse names a layer below zero; .* got -1"):
            register({-1: None})

    def test_a_function_that_gives_something_else(self, make_model, long_ids):
        model = make_model()
        model.set_attn_implementation(register(lambda layer: "window", name="wrong"))
        with pytest.raises(InvalidType, match=r"gives layer 0 something else; .* got str"):
            model(long_ids)

    @pytest.mark.parametrize(
        ("name", "found"),
        [("my_flash", ["flash"]), ("org/attention", ["/"]), ("paged|x", ["paged", "|"])],
    )
    def test_names_that_transformers_reads(self, name, found):
        text = "register: name means something else to transformers; expected other words, got"
        with pytest.raises(InvalidInput, match=f"^{re.escape(f'{text} {found}')}$"):
            register(name=name)

    def test_a_mask_function_of_the_user(self):
        q = torch.zeros(1, 2, 20, 16)
        plan = make_visible_keys(
            1, 20, 20, mask_function=lambda b, h, q, k: q >= k, device=torch.device("cpu")
        )
        with pytest.raises(Unsupported, match="block_sparse together with a mask that is eval"):
            attention_forward(None, q, q, q, plan, block_sparse=FIXED["sinks"])
        # layers that are not causal are never sparse
        attention_forward(None, q, q, q, plan, is_causal=False, block_sparse=FIXED["sinks"])

    def test_sequences_packed_by_offsets(self, make_model, long_ids):
        """A window is a window within each of them; other parts would have been ignored."""
        model, offsets = make_model(), torch.tensor([0, 30, LENGTH], dtype=torch.int32)
        model.set_attn_implementation(register(FIXED["window"], name="sparse"))
        packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "use_cache": False}
        positions = torch.tensor([[*range(30), *range(LENGTH - 30)]])
        ours = model(long_ids[:1], position_ids=positions, **packed).logits
        torch.testing.assert_close(ours[:, 30:], model(long_ids[:1, 30:]).logits, **TOLERANCE)
        model.set_attn_implementation(register(FIXED["sinks"], name="sparse"))
        with pytest.raises(Unsupported, match="cu_seq_lens_q together with block_sparse"):
            model(long_ids[:1], **packed)

    def test_continuous_batching(self, continuous_batching, make_model, long_ids):
        register(FIXED["sinks"], name="sparse")
        model = make_model()
        model.set_attn_implementation("paged|sparse")
        with pytest.raises(Unsupported, match="continuous batching with block_sparse"):
            model(long_ids)
