"""Layers of sparse attention: each against its formula in plain PyTorch, gradients, refusals."""

import pytest
import torch
from torch import nn

import blackwell_sparsek as bsk
from blackwell_sparsek.nn import sparse_attention as layers
from blackwell_sparsek.testing import inputs

HIDDEN, TOKENS = 12, 37
# Of equal scores, which relu makes, the lower key is taken.
TIES = 1e-12 * torch.arange(TOKENS)
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 6, "dtype": torch.float64}
KINDS = {
    "moba": lambda: bsk.nn.MixtureOfBlockAttention(HIDDEN, **SIZES, block=16, top_k=2),
    "nsa": lambda: bsk.nn.NativeSparseAttention(HIDDEN, **SIZES, block=16, top_k=2, window=5),
    "indexer": lambda: bsk.nn.IndexerAttention(
        HIDDEN, **SIZES, index_heads=3, index_dim=5, top_k=7
    ),
    "sparsek": lambda: bsk.nn.SparsekAttention(HIDDEN, **SIZES, keep=4.5),
}


def made(kind, seed=0):
    torch.manual_seed(seed)
    layer = KINDS[kind]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer, inputs.normal(2, TOKENS, HIDDEN, seed=1, dtype=torch.float64)


def heads_of(layer, x):
    """q, k and v [B, Hq, T, D], keys and values repeated for the heads of a group."""
    q, k, v = (
        y.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for y in (layer.q(x), layer.k(x), layer.v(x))
    )
    return q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)


def attend(q, k, v, weights):
    """Softmax whose exponentials have weights [.., T, T], 0 for hidden keys."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    p = weights * (scores - scores.amax(-1, keepdim=True)).exp()
    total = p.sum(-1, keepdim=True)
    return p @ v / torch.where(total == 0, 1.0, total)


def back(layer, out):
    return layer.out(out.transpose(1, 2).flatten(2))


def causal():
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def by_formula(kind, layer, x):
    q, k, v = heads_of(layer, x)
    place = torch.arange(TOKENS)
    block = place // 16
    if kind == "moba":
        seen = torch.zeros(2, 4, TOKENS, TOKENS, dtype=torch.float64)
        for t in range(TOKENS):
            scores = [
                (q[:, :, t, None] * k[:, :, 16 * c : min(16 * c + 16, t + 1)].mean(2)[:, :, None])
                .sum(-1)
                .squeeze(-1)
                for c in range(t // 16 + 1)
            ]
            scores[-1] = torch.full_like(scores[-1], torch.inf)
            best = torch.stack(scores, -1).topk(min(2, len(scores)), -1).indices
            seen[:, :, t] = (block[None, None, :, None] == best[:, :, None]).any(-1)
        return back(layer, attend(q, k, v, seen * causal()))
    if kind == "sparsek":
        u = layer.score(x).transpose(1, 2)
        tau = bsk.sparsek_causal(u.contiguous(), layer.keep, impl="reference")
        gate = (u[:, :, None] - tau[..., None]).clamp(0, 1).repeat_interleave(2, 1)
        return back(layer, attend(q, k, v, gate * causal()))
    if kind == "indexer":
        q_index = layer.q_index(x).unflatten(-1, (3, 5))
        weights = layer.index_weights(x)
        scores = torch.einsum("bthd,bjd->bthj", q_index, layer.k_index(x)).relu()
        scores = (weights[..., None] * scores).sum(2).masked_fill(~causal(), -torch.inf)
        best = (scores - TIES).topk(7, -1)
        seen = torch.zeros(2, TOKENS, TOKENS, dtype=torch.float64)
        seen.scatter_(-1, best.indices, (best.values > -torch.inf).double())
        return back(layer, attend(q, k, v, seen[:, None]))
    weights = layer.pooling.softmax(-1).repeat_interleave(2, 1)
    means = [
        torch.stack(
            [(w[None, :, :, None] * y[:, :, 16 * c : 16 * c + 16]).sum(2) for c in (0, 1)], 2
        )
        for y, w in zip((k, v), weights, strict=True)
    ]
    whole = (16 * torch.arange(1, 3) <= place[:, None] + 1).double()
    compressed = attend(q, *means, whole)
    p = attend(q, means[0], torch.eye(2, dtype=torch.float64).expand(2, 4, 2, 2), whole)
    p = nn.functional.pad(p.unflatten(1, (2, 2)).sum(2), (0, 1))
    p = p.masked_fill((torch.arange(3) == 0) | (torch.arange(3) == block[:, None]), torch.inf)
    p = p.masked_fill(torch.arange(3) > block[:, None], -1.0)
    best = p.topk(2, -1)
    best = best.indices.masked_fill(best.values < 0, -1).repeat_interleave(2, 1)
    seen = (block[None, None, None, :, None] == best[:, :, :, None]).any(-1) & causal()
    near = causal() & (place[:, None] - place < 5)
    branches = (compressed, attend(q, k, v, seen.double()), attend(q, k, v, near.double()))
    gates = torch.sigmoid(layer.gates(x)).unflatten(-1, (3, 4)).permute(2, 0, 3, 1)
    return back(layer, sum(g[..., None] * y for g, y in zip(gates, branches, strict=True)))


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_the_formula(kind):
    layer, x = made(kind)
    x.requires_grad_()
    out, expected = layer(x), by_formula(kind, layer, x)
    torch.testing.assert_close(out, expected)
    weights = inputs.normal(*out.shape, seed=2, dtype=torch.float64)
    reached = {"moba": (), "nsa": ("pooling", "gates"), "indexer": (), "sparsek": ("score",)}
    trained = [x, layer.q.weight, layer.k.weight, layer.v.weight, layer.out.weight]
    for name in reached[kind]:
        part = getattr(layer, name)
        trained.append(part if isinstance(part, nn.Parameter) else part.weight)
    ours = torch.autograd.grad((out * weights).sum(), trained)
    # nothing of the choice may have a gradient, so the formula has none either
    theirs = torch.autograd.grad((expected * weights).sum(), trained)
    if kind == "sparsek":
        # the reference of the thresholds has no gradient: see the next test
        ours, theirs = ours[1:5], theirs[1:5]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_sparsek_by_finite_differences():
    layer, x = made("sparsek")
    x = x[:1, :9].clone().requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,), rtol=1e-4)


def test_the_indexer_learns_from_its_own_loss_alone():
    layer, x = made("indexer")
    x.requires_grad_()
    out, loss = layer(x, with_loss=True)
    torch.testing.assert_close(out, layer(x))
    index = {name for name, _ in layer.named_parameters() if "index" in name}
    layer.zero_grad()
    out.square().sum().backward()
    assert {name for name, w in layer.named_parameters() if w.grad is not None}.isdisjoint(index)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    loss.backward()
    assert {name for name, w in layer.named_parameters() if w.grad is not None} == index
    assert x.grad is None


def test_the_loss_of_the_indexer_is_the_divergence_over_the_chosen_keys(monkeypatch):
    layer, x = made("indexer")
    _, whole = layer(x, with_loss=True)
    # more than one chunk of queries
    monkeypatch.setattr(layers, "CHUNK", 3000)
    _, loss = layer(x, with_loss=True)
    torch.testing.assert_close(loss, whole)
    q, k, _ = heads_of(layer, x)
    scores = torch.einsum(
        "bthd,bjd->bthj", layer.q_index(x).unflatten(-1, (3, 5)), layer.k_index(x)
    )
    scores = (3**-0.5 * layer.index_weights(x)[..., None] * scores.relu()).sum(2)
    total = 0.0
    for b in range(2):
        for t in range(TOKENS):
            best = (scores[b, t] - TIES)[: t + 1].topk(min(7, t + 1)).indices
            p = (k[b][:, best] @ q[b, :, t, :, None]).squeeze(-1).div(6**0.5).softmax(-1).mean(0)
            total = total + (p * (p.log() - scores[b, t, best].log_softmax(-1))).sum()
    torch.testing.assert_close(loss.double(), total / (2 * TOKENS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_sees_a_later_one(kind):
    layer, x = made(kind)
    out = layer(x)
    x[:, 20:] += 3.0
    torch.testing.assert_close(layer(x)[:, :20], out[:, :20])


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_embeddings_turn_queries_and_keys(kind):
    layer, x = made(kind)
    angles = torch.arange(TOKENS)[:, None] * torch.tensor([1.0, 0.1, 0.01]).double().repeat(2)
    none = torch.zeros(TOKENS, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x, (none + 1, none)), layer(x))
    turned = layer(x, (angles.cos(), angles.sin()))
    assert not torch.allclose(turned, layer(x))
    with pytest.raises(bsk.InvalidInput, match="rotary has a wrong shape"):
        layer(x, (none[1:], none))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 16, 17])
def test_short_sequences(kind, tokens):
    layer, x = made(kind)
    assert layer(x[:, :tokens]).shape == (2, tokens, HIDDEN)


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph(kind):
    layer, x = made(kind)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_autocast_leaves_scores_and_losses_in_fp32(monkeypatch):
    products, original = [], torch.einsum

    def noted(formula, *operands):
        made = original(formula, *operands)
        products.append((formula, made.dtype))
        return made

    monkeypatch.setattr(torch, "einsum", noted)
    for kind, options in (("nsa", {}), ("indexer", {"with_loss": True})):
        layer, x = made(kind)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer.float()(x.float(), **options)
    formulas = {formula for formula, dtype in products if dtype == torch.float32}
    assert formulas == {"bhgtd,bhnd->bhgtn", "bhgtd,btnhd->bhgtn", "bhtd,btnd->bhtn"}


def test_compressed_scores_in_chunks(monkeypatch):
    layer, x = made("nsa")
    expected = layer(x)
    monkeypatch.setattr(layers, "CHUNK", 100)
    assert torch.equal(layer(x), expected)


def test_refusals():
    with pytest.raises(bsk.InvalidInput, match="heads do not fit; expected a multiple of 3, got 4"):
        bsk.nn.MixtureOfBlockAttention(12, heads=4, kv_heads=3)
    with pytest.raises(bsk.InvalidInput, match="top_k"):
        bsk.nn.NativeSparseAttention(12, heads=4, kv_heads=2, top_k=1)
    layer, x = made("moba")
    with pytest.raises(bsk.InvalidInput, match=r"x has a wrong shape; expected \[B, T, 12\]"):
        layer(x[..., :5])
    for rotary in (torch.ones(TOKENS, 6), (torch.ones(TOKENS, 6),), (1.0, 0.0)):
        with pytest.raises(bsk.InvalidType, match="rotary is not a pair of tensors"):
            layer(x, rotary)
    with pytest.raises(bsk.InvalidInput, match="head_dim is too small"):
        bsk.nn.MixtureOfBlockAttention(12, heads=4, kv_heads=2, head_dim=0)
