"""`attention(..., key_gate=)`: numbers and gradients of each implementation, and refusals."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

import blackwell_sparsek as bsk
from blackwell_sparsek.attention.gated import eager, op
from blackwell_sparsek.attention.gated.live_blocks import live_blocks
from blackwell_sparsek.attention.gated.op import backward_dispatch, forward_dispatch
from blackwell_sparsek.attention.gated.triton import _dq_config
from blackwell_sparsek.attention.triton.tuning import attn_dq_config
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.reference import gated_attention as reference
from blackwell_sparsek.testing import inputs, layouts
from blackwell_sparsek.testing.poison import poisoned_empty

from . import problems


def mask_of(lengths, heads=1, batch=1, block=16):
    """Kept, absent and partial blocks."""
    visible = inputs.normal(batch, heads, *lengths, seed=3) > 0.3
    visible[..., : lengths[0] // 2, : min(16, lengths[1])] = False
    return bsk.BlockMask.from_element_mask(visible, block)


CASES = {
    "one query": {"lengths": (1, 40)},
    "one query and three keys": {"lengths": (1, 3)},
    "more queries than keys": {"lengths": (17, 9)},
    "no keys": {"lengths": (5, 0)},
    "several tiles": {"lengths": (130, 190), "keep": 9.5},
    "a gate per KV head": {"heads": (6, 2), "gates": 2},
    "a gate per query head": {"batch": 2, "heads": (4, 2), "gates": 4},
    "one gate for a batch": {"batch": 2, "heads": (2, 2), "gates": 2, "gate_batch": 1},
    "not causal": {"causal": False, "dims": (24, 40)},
    "a window": {"window": (9, 0), "lengths": (33, 33)},
    "keys that all count": {"keep": 100.0},
    "no keys that count": {"keep": 0.0},
    "a block mask": {"lengths": (20, 40), "block_mask": mask_of((20, 40))},
    "a mask per head": {
        **{"lengths": (20, 40), "heads": (4, 2), "gates": 2, "batch": 2},
        "block_mask": mask_of((20, 40), 4, 2),
    },
    "all of it": {
        **{"heads": (4, 2), "gates": 2, "window": (20, 0), "sinks": True, "lengths": (9, 33)},
        **{"softcap": 2.0, "scale": -0.7},
    },
}
IMPLS = ["eager", "triton"]
# the interpreter takes seconds for each of the others
FEW = ("one query", "a gate per KV head", "one gate for a batch", "a block mask", "all of it")
SLOW = [pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES if name not in FEW]


def case_of(name, device):
    tensors, options = problems.problem(**CASES[name], device=device)
    if "block_mask" in options:
        options["block_mask"] = options["block_mask"].to(device)
    return tensors, options


@pytest.mark.parametrize("case", CASES)
def test_forward(case, device):
    problems.check_forward(*case_of(case, device), "eager")


@pytest.mark.parametrize("case", [*FEW, *SLOW])
def test_forward_by_the_kernel(case, device):
    problems.check_forward(*case_of(case, device), "triton")


@pytest.mark.parametrize("case", CASES)
def test_gradients(case, device):
    problems.check_gradients(*case_of(case, device), "eager")


@pytest.mark.parametrize("seed", [4, 9, 23])
def test_gradients_where_the_only_key_has_a_small_weight(seed, device):
    given = problems.problem(lengths=(17, 9), seed=seed, device=device)
    problems.check_gradients(*given, "eager")


@pytest.mark.parametrize("case", [*FEW, *SLOW])
def test_gradients_by_the_kernels(case, device):
    problems.check_gradients(*case_of(case, device), "triton")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype, impl, device):
    given = problems.problem(gates=1, dtype=dtype, device=device, sinks=True)
    problems.check_forward(*given, impl)
    problems.check_gradients(*given, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_only_key_of_a_row_may_have_a_tiny_weight(impl, device):
    # 16-bit probabilities of such rows must not be rounded before they are normalised
    tensors, options = problems.problem(lengths=(17, 17), dtype=torch.float16, device=device)
    tensors["u"][:] = -9.0
    tensors["u"][..., 4] = 1e-6
    tensors["tau"][:] = 0.0
    out, _ = problems.check_forward(tensors, options, impl)
    assert torch.equal(out[0, 0, 9], tensors["v"][0, 0, 4])


@pytest.mark.parametrize("names", [("out",), ("lse",), ("out", "lse")], ids=str)
def test_the_formula_has_the_gradients_of_each_result(names):
    tensors, options = problems.problem(sinks=True, dtype=torch.float64)

    def gradients(run):
        own = {name: x.double().requires_grad_() for name, x in tensors.items()}
        results = dict(zip(("out", "lse"), run(own, options), strict=True))
        weights = {x: inputs.normal(*results[x].shape, seed=91).double() for x in names}
        total = sum((results[x] * weights[x]).sum() for x in names)
        return torch.autograd.grad(total, list(own.values()), materialize_grads=True)

    def formula(own, options):
        return reference.gated_attention(problems.call_of(own, options))

    found = gradients(lambda own, options: problems.ours(own, options, "reference"))
    for ours, expected in zip(found, gradients(formula), strict=True):
        assert torch.equal(ours, expected)


def test_gradients_by_finite_differences_reach_scores_through_thresholds():
    tensors, _ = problems.problem(heads=(2, 1), lengths=(9, 9), dims=(3, 2), dtype=torch.float64)
    leaves = [tensors[name].double().requires_grad_() for name in ("q", "k", "v", "u")]
    sinks = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, u, sinks):
        gate = (u, bsk.sparsek_causal(u, 2.5))
        return bsk.attention(q, k, v, causal=True, key_gate=gate, sinks=sinks, softcap=3.0)

    assert torch.autograd.gradcheck(run, (*leaves, sinks))


def test_gradients_by_finite_differences_of_thresholds_and_lse():
    tensors, _ = problems.problem(heads=(2, 2), gates=2, lengths=(5, 8), dims=(3, 2))
    leaves = [x.double().requires_grad_() for x in tensors.values()]

    def run(q, k, v, u, tau):
        return bsk.attention(q, k, v, key_gate=(u, tau), return_lse=True)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "u", "tau", "sinks"])
@pytest.mark.parametrize("impl", IMPLS)
def test_one_gradient_alone(wanted, impl, device):
    tensors, options = problems.problem(lengths=(9, 17), sinks=True, device=device)
    sinks = options.pop("sinks")

    def gradient(names):
        own = {**tensors, "sinks": sinks}
        own = {name: x.clone().requires_grad_(name in names) for name, x in own.items()}
        out, _ = problems.ours(
            {name: own[name] for name in tensors}, {**options, "sinks": own["sinks"]}, impl
        )
        return torch.autograd.grad(out.square().sum(), own[wanted])[0]

    assert torch.equal(gradient([wanted]), gradient(["q", "k", "v", "u", "tau", "sinks"]))


@pytest.mark.parametrize("start", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_every_tensor_with_strides_of_its_own(start, device):
    tensors, options = problems.problem(
        batch=2, heads=(2, 2), gates=2, lengths=(9, 17), device=device
    )
    laid_out = layouts.different_layouts(*tensors.values(), start=start)
    problems.check_gradients(dict(zip(tensors, laid_out, strict=True)), options, "triton")


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_without_weight_are_not_read(impl, device):
    tensors, options = problems.problem(lengths=(9, 200), keep=3.0, device=device, causal=False)
    # all weights of the middle keys are 0, and so are those of keys that do not exist
    tensors["u"][..., 64:128] = -50.0
    tensors["u"][..., 70] = -torch.inf
    tensors["tau"] = bsk.sparsek_causal(tensors["u"], 3.0)[..., -9:].contiguous()
    expected, _ = problems.ours(tensors, options, impl)
    for name in ("k", "v"):
        tensors[name][..., 64:128, :] = torch.nan
    out, lse = problems.ours(tensors, options, impl)
    assert torch.equal(out, expected) and not lse.isnan().any()
    made = problems.gradients_by(tensors, options, lambda t, o: problems.ours(t, o, impl))
    assert not any(x.isnan().any() for x in made.values())
    assert (made["k"][..., 64:128, :] == 0).all() and (made["u"][..., 64:128] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_values_that_are_not_finite_reach_only_the_queries_that_see_them(impl, value):
    """A query before the key, computed together with later ones, must not multiply it by 0."""
    tensors, options = problems.problem(lengths=(20, 40))
    # every key has the weight 1, so that only their order hides keys
    tensors["tau"][:] = -torch.inf
    expected, _ = problems.ours(tensors, options, impl)
    tensors["v"][..., 30, 5] = value
    out, lse = problems.ours(tensors, options, impl)
    assert torch.equal(out[:, :, :10], expected[:, :, :10]) and not lse.isnan().any()
    others = torch.arange(16) != 5
    assert torch.equal(out[..., others], expected[..., others])
    assert not out[:, :, 10:, 5].isfinite().any()


@pytest.mark.parametrize("impl", [*IMPLS, "reference"])
def test_nan_of_a_score_or_threshold_shows(impl, device):
    tensors, options = problems.problem(lengths=(20, 40), device=device)
    tensors["u"][..., 30] = torch.nan
    out, _ = problems.ours(tensors, options, impl)
    assert out[:, :, 10:].isnan().all() and not out[:, :, :10].isnan().any()
    tensors, options = problems.problem(lengths=(20, 40), device=device)
    tensors["tau"][..., 7] = torch.nan
    out, _ = problems.ours(tensors, options, impl)
    assert out[:, :, 7].isnan().all() and not out[:, :, 8:].isnan().any()


def test_the_kernel_walks_only_blocks_that_have_a_weight(device):
    tensors, options = problems.problem(lengths=(256, 256), heads=(1, 1), keep=4.0, device=device)
    # scores rise, so that old keys fall behind
    tensors["u"] = torch.linspace(0, 200, 256, device=device).expand(1, 1, -1).contiguous()
    tensors["tau"] = bsk.sparsek_causal(tensors["u"], 4.0)
    mask = live_blocks(problems.call_of(tensors, options))
    assert mask.block_size == (128, 64)
    assert torch.equal(mask.forward.indices.cpu(), torch.tensor([0, 1, 2, 3, 1, 2, 3]).int())
    problems.check_forward(tensors, options, "triton")


def test_eager_gathers_only_keys_that_have_a_weight(monkeypatch):
    tensors, options = problems.problem(lengths=(256, 256), keep=4.0)
    tensors["u"] = torch.linspace(0, 200, 256).expand(1, 1, -1).contiguous()
    tensors["tau"] = bsk.sparsek_causal(tensors["u"], 4.0)
    seen = []
    plain = eager._Gates.steps

    def counted(self, tile):
        for step in plain(self, tile):
            seen.append(len(step.keys))
            yield step

    monkeypatch.setattr(eager._Gates, "steps", counted)
    problems.check_forward(tensors, options, "eager")
    # one tile of queries at a time sees its own 128 keys and the few before that still count
    assert sum(seen) <= 256 + 16


def test_many_keys_are_more_than_one_step(monkeypatch):
    monkeypatch.setattr(eager, "KEYS", 7)
    monkeypatch.setattr(eager, "TILE_Q", 5)
    given = problems.problem(heads=(4, 2), gates=2, keep=20.0, sinks=True)
    problems.check_forward(*given, "eager")
    problems.check_gradients(*given, "eager")


def test_two_runs_give_the_same_bits(device):
    given = problems.problem(lengths=(9, 17), device=device)
    first, second = (
        problems.gradients_by(*given, lambda t, o: problems.ours(t, o, "triton")) for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gate_of_ones_is_plain_attention():
    tensors, options = problems.problem(lengths=(50, 50), heads=(4, 2))
    tensors["tau"][:] = -torch.inf
    out, lse = problems.ours(tensors, options, "eager")
    q, k, v = (tensors[name] for name in "qkv")
    expected, expected_lse = bsk.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_auto_takes_eager_on_a_cpu_and_explains_it():
    tensors, options = problems.problem()
    q, k, v, u, tau = tensors.values()
    said = str(bsk.explain(bsk.attention, q, k, v, key_gate=(u, tau), **options))
    assert "gated_attn_fwd" in said and "eager" in said
    with pytest.raises(bsk.Unsupported, match="sm90"):
        problems.ours(tensors, options, "sm90")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16}, "need bfloat16"),
        ({"head_dim": 192, "head_dim_v": 128}, "heads over 128"),
        ({"max_q": 0}, "no queries"),
        ({"max_k": 0}, "zero keys"),
        ({"positive": False}, "scale above zero"),
    ],
    ids=str,
)
def test_what_the_hopper_forward_takes(changes, reason):
    call = problems.call_of(*problems.problem(dims=(64, 64), dtype=torch.bfloat16))
    arch = Arch("cuda", 90, 132, 232448, False)
    problem = dataclasses.replace(call.problem, arch=arch, tma=True, **changes)
    why = op._why_not_sm90(problem)
    assert why is None if reason is None else reason in why


@pytest.mark.parametrize(
    ("arch", "chosen", "reason"),
    [
        (Arch("cuda", 90, 132, 232448, False), "triton", None),
        (Arch("cpu", 0, 1, 0, False), "eager", "needs a CUDA GPU"),
        (Arch("cpu", 0, 1, 0, True), "eager", "would be interpreted"),
    ],
)
def test_what_auto_takes(arch, chosen, reason):
    call = problems.call_of(*problems.problem())
    problem = dataclasses.replace(call.problem, arch=arch)
    for dispatch, backward in ((forward_dispatch, False), (backward_dispatch, True)):
        given = dataclasses.replace(problem, backward=backward)
        decision = dispatch.decide("auto", given)
        assert decision.chosen == chosen
        assert reason is None or reason in decision.reasons["triton"]


@pytest.mark.parametrize(
    ("sm", "dim", "changes"),
    [
        (89, 64, {}),
        (89, 128, {"tile_m": 64}),
        (120, 256, {"num_stages": 1}),
        (80, 128, {}),
        (90, 256, {}),
    ],
)
def test_gates_shrink_the_tiles_of_dq_where_shared_memory_is_small(sm, dim, changes):
    call = problems.call_of(*problems.problem(dims=(dim, dim), dtype=torch.bfloat16))
    arch = Arch("cuda", sm, 100, 101376, False)
    problem = dataclasses.replace(call.problem, arch=arch, backward=True)
    plain = attn_dq_config(problem, "ieee")
    config = _dq_config(problem, "ieee", call.attention)
    assert config == dataclasses.replace(plain, **changes)
    assert (config != plain) == bool(changes)


@pytest.mark.gpu
def test_auto_takes_the_kernels_on_a_gpu():
    tensors, options = problems.problem(device="cuda")
    q, k, v, u, tau = tensors.values()
    decision = bsk.explain(bsk.attention, q, k, v, key_gate=(u, tau), **options)
    assert decision.chosen == "triton"


def test_compiled_and_checked_as_an_operator():
    tensors, _ = problems.problem(heads=(4, 2), gates=2, lengths=(17, 17))
    q, k, v, u, tau = (x.requires_grad_() for x in tensors.values())
    arguments = (q, k, v, None, u, tau, [], [], [2**30, 0], 0.25, 0.0, "eager")
    torch.library.opcheck(torch.ops.bsk.gated_attn_fwd.default, arguments)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q, k, v, u):
        gate = (u, bsk.sparsek_causal(u, 3.0))
        return bsk.attention(q, k, v, causal=True, key_gate=gate)

    out = run(q, k, v, u)
    expected = bsk.attention(q, k, v, causal=True, key_gate=(u, bsk.sparsek_causal(u, 3.0)))
    assert torch.equal(out, expected)
    ours = torch.autograd.grad(out.square().sum(), (q, u))
    theirs = torch.autograd.grad(expected.square().sum(), (q, u))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_with_a_mask_through_the_operator():
    tensors, options = problems.problem(lengths=(40, 50), block_mask=mask_of((40, 50)))
    problems.check_gradients(tensors, options, "eager")


def refusals():
    tensors, _ = problems.problem(heads=(4, 2), gates=2, batch=2)
    u, tau = tensors["u"], tensors["tau"]
    return {
        "no pair": (u, bsk.InvalidType, r"key_gate is not a pair; expected \(u, tau\)"),
        "no tensor": ((u, 1.0), bsk.InvalidType, r"key_gate \(tau\) is not a tensor"),
        "keys": ((u[..., :9], tau), bsk.InvalidInput, r"key_gate \(u\) has a wrong shape.*40\]"),
        "heads": ((u[:, [0, 0, 0]], tau), bsk.InvalidInput, r"\[1 or 2, 1 or 2 or 4, 40\]"),
        "rank": ((u[0], tau), bsk.InvalidInput, "has a wrong shape"),
        "dtype": ((u.long(), tau), bsk.InvalidInput, r"key_gate \(u\)"),
        "gaps": (
            (u.repeat_interleave(2, -1)[..., ::2], tau),
            bsk.InvalidInput,
            "contiguous",
        ),
        "different heads": ((u[:, :1], tau), bsk.InvalidInput, "has parts that differ"),
    }


@pytest.mark.parametrize("case", refusals())
def test_refusals(case):
    gate, error, text = refusals()[case]
    tensors, options = problems.problem(heads=(4, 2), gates=2, batch=2)
    q, k, v = (tensors[name] for name in "qkv")
    with pytest.raises(error, match=text):
        bsk.attention(q, k, v, key_gate=gate, **options)


def test_scales_of_fp8_are_refused_beside_a_gate():
    tensors, options = problems.problem()
    q, k, v, u, tau = tensors.values()
    with pytest.raises(bsk.InvalidInput, match="out_dtype does not go with key_gate"):
        bsk.attention(q, k, v, key_gate=(u, tau), out_dtype=torch.float16, **options)


def test_empty_queries_and_heads(device):
    for lengths, heads in (((0, 9), (2, 1)), ((9, 9), (0, 1))):
        tensors, options = problems.problem(lengths=lengths, heads=heads, device=device)
        for impl in ("eager", "triton"):
            out, _ = problems.ours(tensors, options, impl)
            assert out.numel() == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_a_gate_that_no_sequence_reads(impl, device):
    tensors, options = problems.problem(batch=0, gate_batch=1, lengths=(9, 9), device=device)
    leaves = [tensors[name].requires_grad_() for name in ("u", "tau")]
    with poisoned_empty():
        out, _ = problems.ours(tensors, options, impl)
        gradients = torch.autograd.grad(out.sum(), leaves)
    for gradient in gradients:
        assert torch.equal(gradient, torch.zeros(1, 1, 9, device=device))
