"""Peers that cannot be installed here, by stand-ins with their signatures.

What is tested is ours: layouts, windows, lists of blocks, page tables. That the packages still have
these signatures shows only where they are installed.
"""

import inspect
import sys
import types

import pytest
import torch

from blackwell_sparsek.bench.suites import attention_peers as importing
from blackwell_sparsek.bench.suites.attention import BUILDERS
from blackwell_sparsek.bench.suites.attention_peers import FORWARD, blocks_of
from blackwell_sparsek.bench.suites.attention_problem import Attention
from blackwell_sparsek.bench.suites.chosen_peers import CHOSEN_PEERS
from blackwell_sparsek.bench.suites.decode import DECODE, Decode
from blackwell_sparsek.bench.suites.fp8 import ATTENTION_PEERS as FP8
from blackwell_sparsek.bench.suites.fp8 import Fp8Inputs
from blackwell_sparsek.bench.suites.gradients import BACKWARD
from blackwell_sparsek.bench.suites.mla import PEERS as MLA
from blackwell_sparsek.bench.suites.mla import Latent
from blackwell_sparsek.bench.suites.sparse_attention import Chosen
from blackwell_sparsek.bench.suites.varlen import VARLEN, Varlen

from ..stand_ins import MODULES, attention_with_cache, flash_attention, varlen_attention

CPU = torch.device("cpu")
F32 = torch.float32
BANDS = [
    Attention(2, 4, 96, 16, dtype=F32),
    Attention(2, 4, 96, 16, kv_heads=2, dtype=F32, causal=True),
    Attention(1, 2, 96, 16, dtype=F32, causal=True, window=20),
]
PACKED = [
    Varlen((17, 64, 1, 40), 4, 16, dtype=F32),
    Varlen((17, 64, 1, 40), 4, 16, 2, F32, causal=True),
]
BLOCKS = Attention(1, 2, 256, 16, dtype=F32, block=(64, 64), density=0.4)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """All of them, for one test."""
    for name, members in MODULES.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        module.__path__ = []
        module.__spec__ = types.SimpleNamespace(name=name, submodule_search_locations=[])
        monkeypatch.setitem(sys.modules, name, module)
    importing.load.cache_clear()
    importing.why_missing.cache_clear()
    yield
    importing.load.cache_clear()
    importing.why_missing.cache_clear()


def _checked(peer, inputs):
    assert peer.available() is None
    contender = peer.prepare(inputs)
    contender.check(contender.run())
    return contender


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "flashinfer"])
@pytest.mark.parametrize("problem", BANDS, ids=lambda p: p.title)
def test_bands(name, problem):
    inputs = problem.build(CPU)
    assert _checked(FORWARD[name], inputs).flops == inputs.flops


@pytest.mark.parametrize("name", ["fa4", "flashinfer", "cudnn_blocks"])
def test_block_masks(name):
    inputs = BLOCKS.build(CPU)
    contender = _checked(FORWARD[name], inputs)
    wrong = contender.run().roll(1, 2)
    with pytest.raises(AssertionError):
        contender.check(wrong)


def test_rows_with_unequal_numbers_of_blocks():
    inputs = BLOCKS.build(CPU)
    inputs.keep[0, 0] = True
    for peers in (FORWARD, BACKWARD):
        _checked(peers["cudnn_blocks"], inputs)
    assert "q2k_block_nums" in blocks_of(inputs)


@pytest.mark.parametrize("name", ["cudnn_blocks", "cudnn_rounding"])
@pytest.mark.parametrize("side", [64, 128])
def test_block_masks_in_fp8(name, side):
    problem = Attention(1, 2, 256, 128, dtype=F32, block=(side, side), density=0.5)
    contender = _checked(FP8[name], Fp8Inputs.of(problem, CPU))
    wrong = contender.run().roll(1, 2)
    with pytest.raises(AssertionError):
        contender.check(wrong)


@pytest.mark.parametrize("changes, reason", [
    ({}, "needs a CUDA GPU"),
    ({"block": (128, 64)}, "takes blocks of 64x64 and 128x128, not 128x64"),
    ({"block": None}, "measured with block masks only"),
    ({"kv_heads": 1}, "takes as many KV heads as query heads"),
    ({"head_dim": 64}, "takes head dim 128, not causal"),
    ({"causal": True}, "takes head dim 128, not causal"),
])  # fmt: skip
def test_what_cudnn_does_not_take_in_fp8(changes, reason, monkeypatch):
    if "needs" not in reason:
        monkeypatch.setattr(importing, "on_gpu", lambda inputs: None)
    given = {"block": (64, 64), "density": 0.5, "dtype": F32, **changes}
    problem = Attention(1, 2, 128, given.pop("head_dim", 128), **given)
    assert FP8["cudnn_blocks"].supports(Fp8Inputs.of(problem, CPU)) == reason


@pytest.mark.parametrize("name", ["fa2", "fa4"])
@pytest.mark.parametrize("problem", BANDS, ids=lambda p: p.title)
def test_gradients_of_bands(name, problem):
    _checked(BACKWARD[name], problem.build(CPU))


def test_gradients_of_64_by_64_blocks_are_not_asked_of_fa4():
    assert BACKWARD["fa4"].supports(BLOCKS.build(CPU)) == "has no gradients for blocks of 64x64"


@pytest.mark.parametrize("name", ["fa4", "cudnn_blocks"])
def test_gradients_of_block_masks(name):
    _checked(BACKWARD[name], BLOCKS.build(CPU))


@pytest.mark.parametrize("problem", PACKED, ids=lambda p: p.title)
@pytest.mark.parametrize("name", [name for name in VARLEN if name != "torch_varlen"])
def test_packed_sequences(name, problem):
    peer, inputs = VARLEN[name], problem.build(CPU)
    if "padded" in name and not problem.causal:
        assert peer.supports(inputs) == "padding would be visible"
        return
    contender = _checked(peer, inputs)
    assert contender.flops == problem.flops
    with pytest.raises(AssertionError):
        contender.check(contender.run().roll(1, 0))


@pytest.mark.parametrize(
    ("parameters", "causal", "given"),
    [
        ({"is_causal": False}, True, {"is_causal": True}),
        ({"window_size": (-1, -1), "enable_gqa": False}, True, {"window_size": (-1, 0)}),
        ({"window_size": (-1, -1), "enable_gqa": False}, False, {}),
    ],
)
def test_torch_says_causal_in_two_ways(monkeypatch, parameters, causal, given):
    seen = {}

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        seen.update(options)
        return varlen_attention(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, causal)

    kind = inspect.Parameter.KEYWORD_ONLY
    known = [inspect.Parameter(n, kind, default=value) for n, value in parameters.items()]
    varlen_attn.__signature__ = inspect.Signature(known)
    module = types.ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = varlen_attn
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    problem = Varlen((9, 30), 2, 16, dtype=F32, causal=causal)
    _checked(VARLEN["torch_varlen"], problem.build(CPU))
    assert seen == given
    grouped = Varlen((9, 30), 4, 16, 2, F32, causal)
    if "enable_gqa" in parameters:
        _checked(VARLEN["torch_varlen"], grouped.build(CPU))
        assert seen == given | {"enable_gqa": True}
    else:
        with pytest.raises(NotImplementedError, match="no GQA in this version"):
            VARLEN["torch_varlen"].prepare(grouped.build(CPU))


@pytest.mark.parametrize("shortest", [0, 7])
@pytest.mark.parametrize(("name", "page_size"), [("fa3", 0), ("fa3", 16), ("flashinfer", 16)])
def test_decoding(name, page_size, shortest):
    problem = Decode(3, 50, 4, 2, 16, page_size, F32, shortest=shortest)
    contender = _checked(DECODE[name], problem.build(CPU))
    assert contender.moved_bytes == problem.cache_bytes


@pytest.mark.parametrize("page_size", [0, 16])
def test_decoding_several_tokens(page_size):
    inputs = Decode(3, 50, 4, 2, 16, page_size, F32, shortest=7, queries=5).build(CPU)
    contender = _checked(DECODE["fa3"], inputs)
    with pytest.raises(AssertionError, match="sampled"):
        contender.check(contender.run().roll(1, 2))


CHOSEN = [
    ("vllm_msa", Chosen("", 4, 2, 16, 3, 128, 640, dtype=torch.bfloat16)),
    ("vllm_qsa", Chosen("", 4, 2, 16, 8, 4, 192, dtype=torch.bfloat16)),
    ("fla_nsa", Chosen("", 32, 2, 16, 3, 32, 160, dtype=F32)),
    ("fla_nsa", Chosen("", 32, 2, 16, 3, 32, 160, dtype=F32, backward=True)),
    ("flash_mla", Chosen("", 16, 1, 576, 8, 1, 96, dtype=F32, latent=512, queries=40)),
]


@pytest.mark.parametrize(("name", "problem"), CHOSEN, ids=[name for name, _ in CHOSEN])
def test_chosen_keys(name, problem):
    inputs = problem.build(CPU)
    for other, peer in CHOSEN_PEERS.items():
        assert (peer.supports(inputs) is None) == (other == name)
    contender = _checked(CHOSEN_PEERS[name], inputs)
    assert contender.flops == problem.flops(inputs.pairs())
    out, dq = contender.run()
    with pytest.raises(AssertionError):
        contender.check((out.roll(1, 2), dq))


def test_latent_caches():
    inputs = Latent(3, 150, 16, 64, F32).build(CPU)
    _checked(MLA["flash_mla"], inputs)


def test_planning_is_timed():
    _checked(BUILDERS["flashinfer"], BLOCKS.build(CPU))


def test_the_library_of_flash_attention_3(monkeypatch):
    """vLLM's build: an operator over packed or paged tensors, called by names."""
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? q_v, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, "
        "Tensor? page_table, float? softmax_scale, bool is_causal, int window_size_left, "
        "int window_size_right, float softcap, bool is_rotary_interleaved, int num_splits, "
        "bool? pack_gqa, int cp_world_size, int cp_rank) -> Tensor[]"
    )

    def forward(*args):
        (q, k, v, _, cu_q, cu_k, used, longest, _, pages, _, causal, left, right, softcap) = args[
            :15
        ]
        assert softcap == 0.0 and args[15:] == (True, args[16], None, 1, 0)
        batch = cu_q.shape[0] - 1
        if cu_k is None:
            assert cu_q.tolist() == list(range(0, q.shape[0] + 1, longest))
            q = q.unflatten(0, (batch, longest))
            return [attention_with_cache(q, k, v, used, pages, causal).flatten(0, 1)]
        if longest * batch != q.shape[0]:
            return [varlen_attention(q, k, v, cu_q, cu_k, longest, longest, causal)[0]]
        parts = [x.unflatten(0, (batch, longest)) for x in (q, k, v)]
        return [flash_attention(*parts, causal=causal, window_size=(left, right)).flatten(0, 1)]

    library.impl("fwd", forward, "CPU")
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    importing.why_missing.cache_clear()
    for problem in BANDS:
        contender = FORWARD["fa3"].prepare(problem.build(CPU))
        contender.check(contender.run())
        assert contender.notes == {"build": "vLLM's library"}
    for page_size, queries in ((0, 1), (16, 1), (0, 5), (16, 5)):
        problem = Decode(3, 50, 4, 2, 16, page_size, F32, queries=queries)
        contender = DECODE["fa3"].prepare(problem.build(CPU))
        contender.check(contender.run())
    for packed in PACKED:
        contender = VARLEN["fa3"].prepare(packed.build(CPU))
        contender.check(contender.run())
    library._destroy()
