"""What `register_context_parallel` refuses; tests/distributed runs models over two ranks."""

import pytest
import torch
import torch.distributed as dist

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import Plan
from blackwell_sparsek.integrations.huggingface import register_context_parallel

from .conftest import SIZES

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch is built without gloo")
LENGTH = 40
IDS = torch.randint(3, 64, (1, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_of(name, **options):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))
    # deep models of these sizes show roundings of fp32
    model = model.double()
    model.set_attn_implementation(name)
    return model


def called(model, **options):
    options = {"position_ids": torch.arange(LENGTH)[None], **options}
    with torch.no_grad():
        return model(IDS, **options)


@pytest.mark.parametrize("use_cache", [False, True])
def test_one_rank_has_what_the_model_has(use_cache):
    name = register_context_parallel(Plan.contiguous(LENGTH, 1))
    model = model_of(name)
    found = called(model, use_cache=use_cache).logits
    # not "eager", whose softmax is in fp32
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, called(model).logits)


def test_a_mask_for_all_layers():
    mask = bsk.masks.sliding_window(LENGTH, 5, 16, causal=True)
    plan = Plan.contiguous(LENGTH, 1)
    masked = called(model_of(register_context_parallel(plan, block_mask=mask))).logits
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=5))
    model = model.double()
    model.load_state_dict(model_of("sdpa").state_dict())
    # not "eager", whose softmax is in fp32
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(masked, called(model).logits)


def test_layers_get_the_band_of_their_mask():
    """None stands for a causal mask, where layers are known to be causal without it."""
    from transformers import masking_utils

    name = register_context_parallel(Plan.contiguous(LENGTH, 1))
    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name]
    causal = masking_utils.causal_mask_function
    window = masking_utils.sliding_window_causal_mask_function(5)
    both_sides = masking_utils.bidirectional_mask_function

    def band_of(function, config):
        made = make(1, LENGTH, LENGTH, mask_function=function, config=config, device=IDS.device)
        return None if made is None else tuple(made.band)

    llama = transformers.LlamaConfig(**SIZES)
    assert band_of(causal, llama) is None
    assert band_of(window, llama) == (4, 0)
    assert band_of(both_sides, llama) == (None, None)
    # a model without sdpa, whose decoder layers do not say that they are causal
    assert band_of(causal, transformers.PegasusXConfig()) == (None, 0)


def test_what_shards_do_not_have_is_refused():
    model = model_of(register_context_parallel(Plan.contiguous(LENGTH, 1)))
    padded = torch.ones(1, LENGTH, dtype=torch.int64)
    cache = called(model, use_cache=True).past_key_values
    one = {"position_ids": torch.tensor([[LENGTH]]), "past_key_values": cache}
    with pytest.raises(bsk.Unsupported, match=r"attention_mask does not apply to shards; .* cu_"):
        called(model, attention_mask=padded)
    with pytest.raises(bsk.Unsupported, match="past_key_values hold keys; expected no cache; see"):
        model(IDS[:, :1], **one)
    with pytest.raises(bsk.Unsupported, match="cu_seq_lens_q is of a shard; expected cu_seqlens"):
        called(model, cu_seq_lens_q=torch.tensor([0, LENGTH], dtype=torch.int32))
    with pytest.raises(bsk.Unsupported, match=r"dropout 0\.1 on attention weights, which"):
        dropout = model_of(model.config._attn_implementation, attention_dropout=0.1).train()
        called(dropout)
    with pytest.raises(bsk.Unsupported, match="output_attentions asks for the attention weights"):
        called(model, output_attentions=True)


def test_positions_of_other_tokens_are_refused():
    offsets = torch.tensor([0, 10, LENGTH], dtype=torch.int32)
    plan = Plan.contiguous(LENGTH, 1)
    model = model_of(register_context_parallel(plan))
    match = r"position_ids are not those of this rank's tokens; expected plan.positions\(\)\[None\]"
    for positions in (torch.arange(1, LENGTH + 1), plan.positions(0, cu_seqlens=offsets)):
        with pytest.raises(bsk.InvalidInput, match=match):
            called(model, position_ids=positions[None], use_cache=False)
    packed = model_of(register_context_parallel(plan, cu_seqlens=offsets))
    called(packed, position_ids=plan.positions(0, cu_seqlens=offsets)[None], use_cache=False)
    with pytest.raises(bsk.InvalidInput, match=match):
        called(packed, use_cache=False)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3,), {}, "plan is not a plan; expected Plan, got int"),
        ((Plan.contiguous(40, 2),), {}, "plan is for another world"),
        ((Plan.contiguous(40, 1),), {"method": "heads"}, "method splits by heads"),
        ((Plan.contiguous(40, 1),), {"method": "rings"}, "method is unknown"),
        ((Plan.contiguous(40, 1),), {"name": "flash_x"}, "name means something else"),
        ((Plan.contiguous(40, 1),), {"name": 3}, "name is not a str"),
    ],
)
def test_wrong_registrations(arguments, options, message):
    with pytest.raises(bsk.InvalidInput, match=message):
        register_context_parallel(*arguments, **options)
