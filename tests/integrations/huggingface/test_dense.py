"""What no kernel computes runs in plain PyTorch, with a warning, as transformers' own attention."""

import pytest
import torch

from blackwell_sparsek import InvalidInput, Unsupported
from blackwell_sparsek.integrations.huggingface import BlockSparse, dense, register

from .conftest import SIZES

transformers = pytest.importorskip("transformers", minversion="5.17")

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def warn_again():
    dense.warn_once.cache_clear()


def oracle(q, k, v, visible, *, bias=0.0, scale, softcap=None, sinks=None):
    """Output and weights in fp64, written out."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~visible, -torch.inf)
    column = torch.full_like(scores[..., :1], -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand_as(column)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1].nan_to_num(0.0)
    return weights @ v, weights


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sinks": True}])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_weights", [False, True])
def test_against_the_oracle(heads, options, with_bias, with_weights):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads[0], 7, 16, generator=generator, requires_grad=True)
    k, v = (torch.randn(2, heads[1], 9, 16, generator=generator) for _ in range(2))
    visible = torch.rand(2, 1, 7, 9, generator=generator) < 0.6
    visible[1, 0, 3] = False
    bias = torch.randn(heads[0], 7, 9, generator=generator) if with_bias else None
    if "sinks" in options:
        options = {"sinks": torch.randn(heads[0], generator=generator)}
    expected, weights = oracle(
        q, k, v, visible, bias=0.0 if bias is None else bias, scale=0.3, **options
    )
    out, made = dense.dense_attention(
        q, k, v, visible, bias=bias, scale=0.3, with_weights=with_weights, **options
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert (out[1, :, 3] == 0).all()
    assert (made is None) == (not with_weights)
    if made is not None:
        torch.testing.assert_close(made.double(), weights, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(out.square().sum(), q)
    (exact,) = torch.autograd.grad(expected.square().sum(), q)
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_attention_weights(family, side, make_model, both, ids, padding):
    mask = None if side is None else padding[side]

    def run(model):
        out = model(ids, attention_mask=mask, output_attentions=True)
        return out.logits, *out.attentions

    with pytest.warns(UserWarning, match="output_attentions asks for the attention weights"):
        theirs, ours = both(make_model(family), run)
    # eager averages over all keys where a row sees none
    rows = torch.ones(2, 13, dtype=torch.bool) if mask is None else mask.bool()
    assert len(ours) == len(theirs) == 3
    torch.testing.assert_close(ours[0][rows], theirs[0][rows], **TOLERANCE)
    for found, expected in zip(ours[1:], theirs[1:], strict=True):
        assert found.shape == expected.shape
        found, expected = (x.transpose(1, 2)[rows] for x in (found, expected))
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_attention_weights_while_generating(make_model, both, ids, padding):
    def generate(model):
        made = model.generate(
            ids,
            attention_mask=padding["left"],
            max_new_tokens=3,
            do_sample=False,
            eos_token_id=None,
            output_attentions=True,
            return_dict_in_generate=True,
        )
        return made.sequences, [step[0][1] for step in made.attentions]

    with pytest.warns(UserWarning, match="output_attentions"):
        theirs, ours = both(make_model(), generate)
    assert torch.equal(ours[0], theirs[0])
    for found, expected in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(found[:, :, -1], expected[:, :, -1], **TOLERANCE)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_dropout_in_training(family, make_model, name, ids, padding):
    """Two runs from one seed agree, two seeds do not, and the mean is that without dropout."""
    model = make_model(family, attention_dropout=0.5).train()
    mask = padding["right"]

    def run(seed):
        torch.manual_seed(seed)
        return model(ids, attention_mask=mask).logits

    with pytest.warns(UserWarning, match=r"dropout 0\.5 on attention weights"):
        first = run(0)
    assert torch.equal(first, run(0))
    assert not torch.allclose(first, run(1))
    first.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    # in evaluation the kernels run, without a warning
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()(ids, attention_mask=mask)


def test_dropout_keeps_the_mean():
    q, k, v = torch.randn(3, 1, 2, 8, 16, generator=torch.Generator().manual_seed(0))
    visible = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    torch.manual_seed(0)
    for softcap in (None, 50.0):
        options = {"scale": 0.25, "softcap": softcap}
        runs = [
            dense.dense_attention(q, k, v, visible, dropout=0.3, **options)[0] for _ in range(2000)
        ]
        exact, _ = dense.dense_attention(q, k, v, visible, **options)
        mean = torch.stack(runs).mean(0)
        error = torch.stack(runs).std(0) / len(runs) ** 0.5
        # five standard errors, over 256 numbers
        assert ((mean - exact).abs() <= 5 * error + 1e-6).all()
        assert error.max() > 0


def test_a_bias_instead_of_a_mask(make_model, both, ids):
    bias = torch.randn(2, 4, 13, 13, generator=torch.Generator().manual_seed(0))
    hidden = torch.ones(13, 13).tril() == 0
    bias = bias.masked_fill(hidden, torch.finfo(torch.float32).min)
    with pytest.warns(UserWarning, match="attention_mask is a bias"):
        theirs, ours = both(make_model(), lambda m: m(ids, attention_mask=bias).logits)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_a_bias_has_a_gradient(make_model, name, ids):
    gradients = []
    for implementation in ("eager", name):
        model = make_model()
        model.set_attn_implementation(implementation)
        bias = torch.ones(2, 1, 13, 13, requires_grad=True)
        model(ids, attention_mask=bias).logits.sum().backward()
        gradients.append(bias.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-3)


T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("side", [None, "right"])
def test_position_biases(side, both, ids, padding, name):
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**{**SIZES, **T5})).eval()
    mask = None if side is None else padding[side]

    def run(model):
        for part in (model.encoder, model.decoder):
            part.set_attn_implementation(model.config._attn_implementation)
        logits = model(ids, attention_mask=mask, decoder_input_ids=ids.flip(1)).logits
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=5, eos_token_id=None)
        return logits, tokens

    with pytest.warns(UserWarning, match="position_bias is added to the scores"):
        theirs, ours = both(model, run)
    torch.testing.assert_close(ours[0], theirs[0], **TOLERANCE)
    assert torch.equal(ours[1], theirs[1])


def test_a_warning_comes_once(make_model, ids, recwarn):
    model = make_model()
    for _ in range(2):
        model(ids, output_attentions=True)
    assert len([w for w in recwarn if "output_attentions" in str(w.message)]) == 1


def test_sparse_layers_are_sparse_in_plain_pytorch_too(make_model, ids):
    model = make_model()
    model.set_attn_implementation(register(BlockSparse(window=4), name="four_keys"))
    weights = model(ids, output_attentions=True).attentions[0]
    visible = torch.ones(13, 13).tril().triu(-3).bool()
    assert (weights[:, :, ~visible] == 0).all()
    assert (weights[:, :, visible] > 0).all()
    blocks = register(BlockSparse(global_blocks=1, window=4, block_size=16), name="first_block")
    model.set_attn_implementation(blocks)
    long = torch.randint(3, 64, (1, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(long).logits
        found = model(long, output_attentions=True)
    torch.testing.assert_close(found.logits, expected, **TOLERANCE)
    assert (found.attentions[0][0, :, 69, 16:48] == 0).all()


def test_what_stays_refused(make_model, name, ids):
    offsets = torch.tensor([0, 5, 13], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "use_cache": False}
    with pytest.raises(Unsupported, match="cu_seq_lens_q together with output_attentions"):
        make_model()(ids[:1], output_attentions=True, **packed)
    with pytest.raises(Unsupported, match="head_mask is not supported; use attn_implem"):
        make_model()(ids, head_mask=torch.ones(4))
    with pytest.raises(
        InvalidInput, match=r"position_bias does not broadcast; expected \[2, 4, 13"
    ):
        make_model()(ids, position_bias=torch.zeros(1, 3, 13, 13))
