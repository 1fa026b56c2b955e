"""`BlockSparse` under masks that the user has made: keys that both show, or an error."""

import pytest
import torch

from blackwell_sparsek import Unsupported
from blackwell_sparsek.integrations.huggingface import BlockSparse, register
from blackwell_sparsek.integrations.huggingface.attention import attention_forward
from blackwell_sparsek.testing.inputs import normal

from .test_block_sparse import FIXED, LENGTH, TOLERANCE, visible

pytest.importorskip("transformers", minversion="5.17")

SEQUENCES = torch.tensor([30, 20, 25])


@pytest.fixture
def ids():
    return torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def causal_mask():
    """Of two documents in the first sequence, with single pairs missing in the second."""
    document = torch.arange(3).repeat_interleave(SEQUENCES)
    shown = (document[:, None] == document) | (document == 0)
    some = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.7
    both = torch.stack([shown, some | torch.eye(LENGTH, dtype=torch.bool)])
    return both.tril()[:, None]


def attend(q, k, v, mask, sparse, **options):
    out, _ = attention_forward(None, q, k, v, mask, block_sparse=sparse, **options)
    return out


def dense(q, k, v, shown):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True)
    return out.transpose(1, 2)


def qkv(sq, sk, batch=2):
    sizes = {"q": (4, sq), "k": (2, sk), "v": (2, sk)}
    return tuple(normal(batch, *size, 16, seed=i) for i, size in enumerate(sizes.values()))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("kind", FIXED)
def test_prompt(kind, dtype, make_model, ids):
    """In fp64, as large weights multiply what the first layer rounds."""
    import copy

    model, sparse, mask = copy.deepcopy(make_model()).double(), FIXED[kind], causal_mask()
    both = mask & visible(sparse, LENGTH, LENGTH)
    assert not both.equal(mask)
    given = mask
    if dtype != torch.bool:
        given = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    model.set_attn_implementation(register({0: sparse, 1: None}, name="sparse"))
    mixed = model(ids, attention_mask=given).logits
    model.set_attn_implementation(register(sparse, name="sparse"))
    ours = model(ids, attention_mask=given).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(ours, model(ids, attention_mask=both).logits)
    assert not torch.allclose(ours, mixed)


@pytest.mark.parametrize("kind", FIXED)
def test_one_token_after_another(kind, make_model, ids):
    """As in a prompt, whose blocks of queries are blocks of keys."""
    import transformers

    model, whole, mask = make_model(), LENGTH // 16 * 16, causal_mask()[..., :64, :64]
    model.set_attn_implementation(register(FIXED[kind], name="sparse"))
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(ids[:, :whole], attention_mask=mask).logits
        model(ids[:, :32], past_key_values=cache, attention_mask=mask[..., :32, :32])
        steps = [
            model(
                ids[:, i : i + 1],
                past_key_values=cache,
                attention_mask=mask[..., i : i + 1, : i + 1],
            ).logits
            for i in range(32, whole)
        ]
    torch.testing.assert_close(torch.cat(steps, 1), expected[:, 32:], **TOLERANCE)


@pytest.mark.parametrize(("sq", "sk"), [(LENGTH, LENGTH), (20, LENGTH), (1, LENGTH)])
@pytest.mark.parametrize("heads", [1, 4])
def test_top_k(heads, sq, sk):
    """Chosen as without the mask; a single query sees what the other parts show, here all."""
    (q, k, v), sparse = qkv(sq, sk), BlockSparse(top_k=1, block_size=16)
    mask = causal_mask()[..., sk - sq :, :].repeat(1, heads, 1, 1)
    shown = mask
    if sq > 1:
        keep = sparse.keep(q, k).repeat_interleave(16, 2).repeat_interleave(16, 3)
        shown = mask & keep[:, :, :sq, :sk]
        assert not shown.equal(mask.expand_as(shown))
    torch.testing.assert_close(attend(q, k, v, mask, sparse), dense(q, k, v, shown), **TOLERANCE)


@pytest.mark.parametrize("kind", FIXED)
def test_a_chunk_of_a_prompt(kind):
    q, k, v = qkv(20, LENGTH)
    mask = causal_mask()[..., -20:, :]
    shown = mask & visible(FIXED[kind], 20, LENGTH)
    torch.testing.assert_close(
        attend(q, k, v, mask, FIXED[kind]), dense(q, k, v, shown), **TOLERANCE
    )


@pytest.mark.parametrize("kind", ["window", "sinks"])
def test_a_mask_of_flex_attention(kind):
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (kv % 3 > 0)

    q, k, v = qkv(LENGTH, LENGTH)
    flex = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)
    slot = torch.arange(LENGTH)
    shown = visible(FIXED[kind], LENGTH, LENGTH) & mask_mod(0, 0, slot[:, None], slot)
    made = attend(q, k, v, flex, FIXED[kind])
    # a row that sees nothing is 0 here and NaN in torch
    torch.testing.assert_close(made, dense(q, k, v, shown).nan_to_num(), **TOLERANCE)


def test_dropout_keeps_the_pattern():
    """In plain PyTorch, where weights tell what is visible."""
    (q, k, v), mask = qkv(LENGTH, LENGTH), causal_mask()
    with pytest.warns(UserWarning, match="output_attentions"):
        _, weights = attention_forward(
            None, q, k, v, mask, block_sparse=FIXED["all"], output_attentions=True
        )
    shown = mask & visible(FIXED["all"], LENGTH, LENGTH)
    assert torch.equal(weights > 0, shown.expand_as(weights))


def test_layers_that_are_not_causal_are_never_sparse():
    (q, k, v), mask = qkv(20, 20), torch.ones(1, 1, 20, 20, dtype=torch.bool)
    made = attend(q, k, v, mask, FIXED["all"], is_causal=False)
    torch.testing.assert_close(made, dense(q, k, v, mask), **TOLERANCE)


def test_a_mask_that_is_not_causal_is_refused():
    (q, k, v), mask = qkv(20, 20), torch.ones(20, 20).tril().bool()[None, None]
    mask[..., 3, 4] = True
    message = r"shows keys after a query; expected .* 20 queries at .* 20 keys .*leave block_sparse"
    for sparse in FIXED.values():
        with pytest.raises(Unsupported, match=message):
            attend(q, k, v, mask, sparse)


@pytest.mark.parametrize("sq", [1, 8])
def test_queries_that_are_not_at_the_end_are_refused(sq):
    """Over a static cache, slots that are not filled yet come after the queries."""
    q, k, v = qkv(sq, 40)
    mask = torch.ones(20, 40).tril().bool()[None, None, -sq:]
    with pytest.raises(Unsupported, match=f"none of {sq} queries sees its own of 40 keys.*dynamic"):
        attend(q, k, v, mask, FIXED["sinks"])


def test_a_bias_is_refused():
    (q, k, v), bias = qkv(20, 20), torch.zeros(1, 1, 20, 20)
    bias[..., 3, 1] = 0.5
    with pytest.raises(Unsupported, match=r"attention_mask that is a bias with values other than"):
        attend(q, k, v, bias, FIXED["sinks"])


class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        "sparse", [FIXED["window"], FIXED["all"], BlockSparse(top_k=1, block_size=16)], ids=str
    )
    def test_one_graph(self, sparse):
        (q, k, v), mask = qkv(LENGTH, LENGTH), causal_mask()
        run = torch.compile(attend, fullgraph=True, backend="eager")
        expected = attend(q, k, v, mask, sparse)
        torch.testing.assert_close(run(q, k, v, mask, sparse), expected, **TOLERANCE)
        mask[..., 3, 4] = True
        with pytest.raises(RuntimeError, match="attention_mask that shows keys after a query"):
            run(q, k, v, mask, sparse)

    def test_queries_whose_place_only_the_data_tell_are_refused(self):
        (q, k, v), mask = qkv(20, LENGTH), causal_mask()[..., -20:, :]
        with pytest.raises(Unsupported, match=r"for 20 queries and 75 keys under torch\.compile"):
            torch.compile(attend, backend="eager")(q, k, v, mask, FIXED["sinks"])
