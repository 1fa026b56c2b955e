"""Padding in models of transformers: every row, padding included, as with their own attention."""

import pytest
import torch

from .conftest import FAMILIES

pytest.importorskip("transformers", minversion="5.17")

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
# softcap and sinks are beyond sdpa
THEIRS = {"Gemma2": "eager", "GptOss": "eager"}


def rows_that_see_a_key(mask, window):
    """bool `[B, S]`; for other rows eager averages over all keys, and sdpa gives zeros."""
    position = torch.arange(mask.shape[1])
    distance = position[:, None] - position
    visible = (distance >= 0) & (mask[:, None] != 0)
    if window is not None:
        visible &= distance < window
    return visible.any(-1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right", "hole"])
def test_logits_of_all_rows(family, side, make_model, both, ids, padding):
    mask, base = padding[side], THEIRS.get(family, "sdpa")
    theirs, ours = both(make_model(family), lambda m: m(ids, attention_mask=mask).logits, base)
    if base == "eager":
        rows = rows_that_see_a_key(mask, FAMILIES[family]["sliding_window"])
        ours, theirs = ours[rows], theirs[rows]
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Gemma2", "GptOss"])
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_generation_from_right_padded_prompts(family, cache, make_model, both, ids, padding):
    """The last row of such a prompt is padding, and its logits decide about the first token."""
    options = {"use_cache": cache != "none"}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}

    def generate(model):
        return model.generate(
            ids,
            attention_mask=padding["right"],
            max_new_tokens=7,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )

    theirs, ours = both(make_model(family), generate, THEIRS.get(family, "sdpa"))
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", [None, "right"])
def test_padding_on_the_left_changes_nothing(family, side, make_model, ids, padding):
    """Logits of the last row, and what is generated, are those of the prompt without padding.

    The last row may itself be padding, on the right.
    """
    model, width = make_model(family), 9
    given = torch.ones_like(ids) if side is None else padding[side]
    padded = torch.cat([torch.zeros(2, width, dtype=ids.dtype), ids], 1)
    mask = torch.cat([torch.zeros(2, width, dtype=ids.dtype), given], 1)
    places, positions = ((x.cumsum(1) - 1).clamp(min=0) for x in (given, mask))
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        alone = model(ids, attention_mask=given, position_ids=places).logits[:, -1]
        found = model(padded, attention_mask=mask, position_ids=positions).logits[:, -1]
        expected = model.generate(ids, attention_mask=given, **options)[:, ids.shape[1] :]
        tokens = model.generate(padded, attention_mask=mask, **options)[:, padded.shape[1] :]
    torch.testing.assert_close(found, alone, **TOLERANCE)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("side", ["left", "right", "hole"])
def test_gradients_of_all_rows(family, side, make_model, name, ids, padding):
    """A loss that counts padding rows too."""
    gradients = []
    for implementation in ("sdpa", name):
        model = make_model(family).train()
        model.set_attn_implementation(implementation)
        model(ids, attention_mask=padding[side], labels=ids).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        model.zero_grad()
    for parameter, theirs in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][parameter], theirs, **TOLERANCE, msg=lambda m, n=parameter: f"{n}: {m}"
        )


def test_right_padding_of_an_encoder(make_model, both, ids, padding):
    theirs, ours = both(
        make_model("Llama", is_causal=False),
        lambda m: m(ids, attention_mask=padding["right"]).logits,
        "sdpa",
    )
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_a_mask_without_padding_is_no_mask(name):
    """Causality is all there is, so that layers run without lists."""
    from transformers.masking_utils import causal_mask_function

    from blackwell_sparsek.integrations.huggingface.visible_keys import make_visible_keys

    options = {"mask_function": causal_mask_function, "device": "cpu"}
    everything = torch.ones(2, 40, dtype=torch.bool)
    assert make_visible_keys(2, 40, 40, attention_mask=everything, **options) is None
    everything[1, -1] = False
    assert make_visible_keys(2, 40, 40, attention_mask=everything, **options) is not None
