"""A model of transformers over two ranks against one process; run by test_ranks.py."""

import copy
import importlib.util

import torch
import torch.distributed as dist

from blackwell_sparsek.distributed import Band, balance
from blackwell_sparsek.testing.tolerance import assert_within_budget

CHECKS = {}
LENGTH, VOCABULARY = 200, 96


def check(function):
    CHECKS[function.__name__] = function
    return function


def model_of(family, **options):
    import transformers

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        # wide enough that attention decides about the tokens
        "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def trained(model, ids, targets, position_ids):
    """Logits, and the gradients of a sum over these tokens."""
    # with a cache transformers would not look for packed sequences in the positions
    logits = model(ids, position_ids=position_ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    gradients = torch.autograd.grad(loss / LENGTH, list(model.parameters()))
    return logits.detach(), gradients


def compare_with_one_process(model, rank, world, *, method="auto", cu_seqlens=None):
    from blackwell_sparsek.integrations.huggingface import register_context_parallel

    ids, targets = torch.randint(
        VOCABULARY, (2, 1, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    plan = balance(Band(None, 0), world, seq_length=LENGTH, tile=16)
    whole = torch.arange(LENGTH)[None]
    if cu_seqlens is not None:
        whole = torch.cat([torch.arange(int(n)) for n in cu_seqlens.diff()])[None]
    expected = []
    # the softmax of "eager" is in fp32 whatever the model is
    for dtype, theirs in ((torch.float64, "sdpa"), (torch.float32, "eager")):
        one = copy.deepcopy(model).to(dtype)
        one.set_attn_implementation(theirs)
        expected.append(trained(one, ids, targets, whole))
    name = register_context_parallel(plan, method=method, cu_seqlens=cu_seqlens)
    model.set_attn_implementation(name)
    positions = plan.positions(rank, cu_seqlens=cu_seqlens)[None]
    own = (plan.shard(x, rank=rank) for x in (ids, targets))
    logits, gradients = trained(model, *own, positions)
    exact, plain = ([plan.shard(x, rank=rank) for x in found[:1]] for found in expected)
    assert_within_budget(logits, *exact, *plain, roundings=world, what="logits")
    names = [key for key, _ in model.named_parameters()]
    for key, found, a, b in zip(names, gradients, expected[0][1], expected[1][1], strict=True):
        dist.all_reduce(found)
        assert_within_budget(found, a, b, roundings=world, what=key)


@check
def models_of_transformers(rank, world, folder):
    """In two processes only: importing transformers takes longer than all of this."""
    if world != 2 or importlib.util.find_spec("transformers") is None:
        return
    for method in ("needed", "ulysses"):
        compare_with_one_process(model_of("Llama"), rank, world, method=method)
    offsets = torch.tensor([0, 30, 37, LENGTH], dtype=torch.int32)
    compare_with_one_process(model_of("Llama"), rank, world, cu_seqlens=offsets)
    compare_with_one_process(model_of("Mistral", sliding_window=40), rank, world)
