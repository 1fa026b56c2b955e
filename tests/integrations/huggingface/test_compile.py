"""One graph, whatever the mask; and few graphs over many lengths."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

pytest.importorskip("transformers", minversion="5.17")

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def compiled():
    """Compile a model into one graph; the second result counts the graphs."""

    def make(model, **options):
        torch._dynamo.reset()
        counter = CompileCounter()
        return torch.compile(model, fullgraph=True, backend=counter, **options), counter

    yield make
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "case"),
    [("Llama", "left"), ("Llama", "packed"), ("Mistral", "plain"), ("GptOss", "right")],
)
def test_one_graph(family, case, make_model, compiled, ids, padding):
    model = make_model(family, num_hidden_layers=1)
    options = {}
    if case in padding:
        options["attention_mask"] = padding[case]
    if case == "packed":
        positions = torch.tensor([[*range(5), *range(8)], [*range(9), *range(4)]])
        options = {"position_ids": positions, "use_cache": False}
    function, _ = compiled(model)
    with torch.no_grad():
        expected = model(ids, **options).logits
        found = function(ids, **options).logits
    real = padding[case].bool() if case in padding else slice(None)
    torch.testing.assert_close(found[real], expected[real], **TOLERANCE)


@pytest.mark.parametrize("padded", [False, True])
def test_steps_over_a_static_cache_share_one_graph(padded, make_model, compiled, ids, padding):
    import transformers

    model = make_model("Llama", num_hidden_layers=1)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    mask = torch.nn.functional.pad(padding["left"], (0, 3), value=1) if padded else None
    function, counter = compiled(model)
    with torch.no_grad():
        model(ids, past_key_values=cache, attention_mask=None if mask is None else mask[:, :13])
        found = []
        for i in range(3):
            step = None if mask is None else mask[:, : 14 + i]
            if step is not None:
                # of one size for all steps, as in `generate`
                step = torch.nn.functional.pad(step, (0, 32 - step.shape[1]))
            found.append(
                function(ids[:, i : i + 1], past_key_values=cache, attention_mask=step).logits
            )
        together = torch.cat([ids, ids[:, :3]], 1)
        expected = model(together, attention_mask=mask).logits[:, 13:]
    torch.testing.assert_close(torch.cat(found, 1), expected, **TOLERANCE)
    assert counter.frame_count == 1


def test_fifty_lengths_compile_twice_at_most(make_model, compiled):
    model = make_model("Llama", num_hidden_layers=1)
    function, counter = compiled(model)
    with torch.no_grad():
        for length in range(20, 70):
            ids = torch.randint(3, 64, (1, length))
            torch.testing.assert_close(function(ids).logits, model(ids).logits, **TOLERANCE)
    # the first graph and at most two more
    assert counter.frame_count <= 3


def test_training_step(make_model, compiled, ids):
    model = make_model("Llama", num_hidden_layers=1).train()
    model(ids, labels=ids).loss.backward()
    expected = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    torch._dynamo.reset()
    function = torch.compile(model, fullgraph=True, backend="aot_eager")
    function(ids, labels=ids).loss.backward()
    found = model.model.layers[0].self_attn.q_proj.weight.grad
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["fixed", "top_k"])
def test_sparse_layers(kind, make_model, compiled):
    from blackwell_sparsek.integrations.huggingface import BlockSparse, register

    parts = {"window": 20, "global_blocks": 1} if kind == "fixed" else {"top_k": 1}
    model = make_model("Llama", num_hidden_layers=1)
    model.set_attn_implementation(register(BlockSparse(**parts, block_size=16), name="sparse"))
    ids = torch.randint(3, 64, (1, 90), generator=torch.Generator().manual_seed(0))
    function, _ = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(function(ids).logits, model(ids).logits, **TOLERANCE)


def test_sparse_layers_without_a_cache(make_model, ids):
    """There the mask is evaluated, and the layers would have been dense without a word."""
    from blackwell_sparsek import Unsupported
    from blackwell_sparsek.integrations.huggingface import BlockSparse, register

    model = make_model("Llama", num_hidden_layers=1)
    model.set_attn_implementation(register(BlockSparse(window=4), name="sparse"))
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=r"block_sparse together with .*use_cache=True"):
        torch.compile(model, backend="eager")(ids, use_cache=False)
    torch._dynamo.reset()
