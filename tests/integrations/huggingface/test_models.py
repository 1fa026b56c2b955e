"""Models of transformers give the logits and tokens of transformers' own attention."""

import weakref

import pytest
import torch

from blackwell_sparsek import InvalidInput, Unsupported
from blackwell_sparsek.integrations.huggingface.attention import attention_forward
from blackwell_sparsek.integrations.huggingface.visible_keys import (
    visible_elements,
    visible_of_user,
)

pytest.importorskip("transformers", minversion="5.17")

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Phi3", "GptOss")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family, make_model, both, ids):
    theirs, ours = both(make_model(family), lambda m: m(ids).logits)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right", "hole"])
def test_logits_of_padded_batches(family, side, make_model, both, ids, padding):
    mask = padding[side]
    theirs, ours = both(make_model(family), lambda m: m(ids, attention_mask=mask).logits)
    real = mask.bool()
    torch.testing.assert_close(ours[real], theirs[real], **TOLERANCE)
    assert torch.isfinite(ours).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_packed_sequences(family, make_model, both, ids):
    positions = torch.tensor([[*range(5), *range(8)]])
    theirs, ours = both(
        make_model(family),
        lambda m: m(ids[:1], position_ids=positions, use_cache=False).logits,
    )
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    if family != "GptOss":  # whose masks know nothing of position_ids, with any attention
        alone = make_model(family)(ids[:1, 5:]).logits
        torch.testing.assert_close(ours[:, 5:], alone, **TOLERANCE)


def test_packed_rows_of_a_batch_differ(make_model, both, ids):
    positions = torch.tensor([[*range(5), *range(8)], [*range(9), *range(4)]])
    theirs, ours = both(
        make_model("Mistral"), lambda m: m(ids, position_ids=positions, use_cache=False).logits
    )
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("window", [None, 4])
def test_packed_sequences_by_offsets(window, make_model, ids):
    family = "Llama" if window is None else "Mistral"
    model = make_model(family, **({} if window is None else {"sliding_window": window}))
    offsets = torch.tensor([0, 5, 13], dtype=torch.int32)
    positions = torch.tensor([[*range(5), *range(8)]])
    with torch.no_grad():
        packed = model(
            ids[:1],
            position_ids=positions,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=8,
            max_length_k=8,
            use_cache=False,
        ).logits
        alone = model(ids[:1, 5:]).logits
    torch.testing.assert_close(packed[:, 5:], alone, **TOLERANCE)
    with pytest.raises(InvalidInput, match="got a batch of 2"):
        model(ids, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, use_cache=False)


def test_windows_to_both_sides_of_packed_sequences():
    q, k, v = torch.randn(3, 1, 2, 13, 16, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, 5, 13], dtype=torch.int32)
    given = {"is_causal": False, "sliding_window": 3}
    packed, _ = attention_forward(
        None, q, k, v, None, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, **given
    )
    alone, _ = attention_forward(None, *(x[:, :, 5:] for x in (q, k, v)), None, **given)
    torch.testing.assert_close(packed[:, 5:], alone)


def test_offsets_beside_a_mask_of_elements_are_refused(make_model, ids):
    """They would have been ignored: one of the two describes what is visible, or both the same."""
    offsets = torch.tensor([0, 5, 13], dtype=torch.int32)
    mask = torch.ones(13, 13, dtype=torch.bool).tril()
    mask[:, 2] = False
    mask[2, 2] = True
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "use_cache": False}
    with pytest.raises(Unsupported, match="cu_seq_lens_q together with"):
        make_model()(ids[:1], attention_mask=mask[None, None], **given)
    with pytest.raises(Unsupported, match="a mask of single elements"):
        make_model()(ids[:1], attention_mask=visible_elements(mask[None, None]), **given)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GptOss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
def test_generated_tokens(family, cache, side, make_model, both, ids, padding):
    static = {"cache_implementation": "static", "disable_compile": True}

    def generate(model):
        return model.generate(
            ids,
            attention_mask=None if side is None else padding[side],
            max_new_tokens=7,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **(static if cache == "static" else {}),
        )

    theirs, ours = both(make_model(family), generate)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), **TOLERANCE)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_a_prompt_in_pieces(family, kind, make_model, both, ids):
    """Several queries over keys of before: the last query meets the last key in use."""
    import transformers

    def in_pieces(model):
        options = {"max_cache_len": 32} if kind == "StaticCache" else {}
        cache = getattr(transformers, kind)(config=model.config, **options)
        pieces = [
            model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 6), (6, 11), (11, 13))
        ]
        return torch.cat(pieces, 1)

    model = make_model(family)
    _, ours = both(model, in_pieces)
    torch.testing.assert_close(ours, model(ids).logits, **TOLERANCE)


@pytest.mark.parametrize("num_beams", [2])
def test_beam_search(num_beams, make_model, both, ids, padding):
    theirs, ours = both(
        make_model(),
        lambda m: m.generate(
            ids, attention_mask=padding["left"], num_beams=num_beams, max_new_tokens=5
        ),
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GptOss"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_gradients(family, side, make_model, name, ids, padding):
    mask = None if side is None else padding[side]
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    if side == "left":
        # the query before the first real token sees nothing: it would predict that token
        labels[0, 5] = -100
    gradients = []
    for implementation in ("eager", name):
        model = make_model(family).train()
        model.set_attn_implementation(implementation)
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for parameter, theirs in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][parameter], theirs, **TOLERANCE, msg=lambda m, n=parameter: f"{n}: {m}"
        )


def test_gradient_checkpointing(make_model, ids, padding):
    model = make_model().train()
    model(ids, attention_mask=padding["left"], labels=ids).loss.backward()
    plain = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, attention_mask=padding["left"], labels=ids, use_cache=False).loss.backward()
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(model.model.layers[0].self_attn.q_proj.weight.grad, plain)


def test_bidirectional_attention(make_model, both, ids, padding):
    model = make_model("Llama", is_causal=False)
    for mask in (None, padding["right"], padding["left"]):
        theirs, ours = both(model, lambda m, mask=mask: m(ids, attention_mask=mask).logits)
        real = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(ours[real], theirs[real], **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_ready_mask_is_all_there_is(dtype, make_model, both, ids):
    visible = torch.rand(2, 1, 13, 13, generator=torch.Generator().manual_seed(0)) < 0.5
    visible |= torch.eye(13, dtype=torch.bool)
    hidden = torch.finfo(torch.float32).min
    additive = torch.zeros(2, 1, 13, 13).masked_fill(~visible, hidden)
    theirs, _ = both(make_model(), lambda m: m(ids, attention_mask=additive).logits)
    given = visible if dtype == torch.bool else additive
    ours = make_model()(ids, attention_mask=given).logits
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_a_ready_mask_may_change(make_model, ids):
    model, mask = make_model(), torch.ones(13, 13).tril().bool()[None, None].repeat(2, 1, 1, 1)
    before = model(ids, attention_mask=mask).logits
    mask[:, :, :, 0] = False
    mask[:, :, 0, 0] = True
    after = model(ids, attention_mask=mask).logits
    assert not torch.allclose(before[:, 1:], after[:, 1:], atol=1e-3)
    torch.testing.assert_close(before[:, 0], after[:, 0])


@torch.inference_mode()
def test_a_ready_mask_may_change_in_inference_mode(make_model, ids):
    """Tensors made there do not count their changes."""
    model, mask = make_model(), torch.ones(13, 13).tril().bool()[None, None].repeat(2, 1, 1, 1)
    model(ids, attention_mask=mask)
    mask[:, :, 1:, 0] = False
    after = model(ids, attention_mask=mask).logits
    assert after.equal(model(ids, attention_mask=mask.clone()).logits)


def test_a_ready_mask_that_is_gone_is_not_kept():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    q = torch.zeros(1, 1, 4, 16)
    made = weakref.ref(visible_of_user(mask, q, q))
    assert made() is visible_of_user(mask, q, q)
    del mask
    assert made() is None


def test_continuous_batching(continuous_batching, make_model, ids):
    pytest.importorskip("psutil", reason="transformers measures memory with it")
    import transformers

    model = make_model("Llama")
    prompts = [ids[0].tolist(), ids[1, :7].tolist()]
    options = {"max_new_tokens": 5, "do_sample": False}
    model.set_attn_implementation("paged|blackwell_sparsek")
    found = model.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(eos_token_id=-1, **options),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            block_size=32, num_blocks=16, max_batch_tokens=64
        ),
    )
    found = sorted(request.generated_tokens for request in found.values())
    model.set_attn_implementation("sdpa")
    expected = [
        model.generate(torch.tensor([p]), eos_token_id=None, **options)[0, len(p) :].tolist()
        for p in prompts
    ]
    assert found == sorted(expected)


class TestErrors:
    def test_a_mask_of_other_sizes(self, make_model, ids):
        with pytest.raises(InvalidInput, match="attention_mask has a wrong shape"):
            make_model()(ids, attention_mask=torch.ones(2, 1, 12, 13).bool())

    def test_an_integer_mask(self, make_model, ids):
        with pytest.raises(Unsupported, match="attention_mask has an unsupported dtype"):
            make_model()(ids, attention_mask=torch.ones(2, 1, 13, 13).int())

    def test_paged_outside_of_continuous_batching(self, continuous_batching, make_model, ids):
        model = make_model()
        model.set_attn_implementation("paged|blackwell_sparsek")
        with pytest.raises(Unsupported, match="inside of continuous batching alone"):
            model(ids)
