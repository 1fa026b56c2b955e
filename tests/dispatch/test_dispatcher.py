from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek import InvalidInput, Unsupported, explain
from blackwell_sparsek.calls.matmul import BsrProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.core.compat import WARPS_TRITON
from blackwell_sparsek.dispatch import dispatcher as dispatch
from blackwell_sparsek.dispatch.dispatcher import Dispatcher, only_asked
from blackwell_sparsek.matmul.choice import matmul_dispatch

H200 = Arch("cuda", 90, 132, 232448, False)


def odd(problem):
    return None if problem % 2 else f"{problem} is even"


def anything(problem):
    return None


def large(problem):
    return "too large for auto" if problem > 100 else None


@pytest.fixture
def dispatcher(monkeypatch):
    """First `sm90` for odd numbers, which `auto` passes over when large, then `eager` for all."""
    monkeypatch.delenv("BSK_IMPL", raising=False)
    made = Dispatcher("op")
    made.register("sm90", odd, lambda *args: ("sm90", args), auto_passes=large)
    made.register("eager", anything, lambda *args: ("eager", args))
    made.register("reference", anything, lambda *args: ("reference", args), auto_passes=only_asked)
    return made


@pytest.mark.parametrize(
    ("impl", "problem", "chosen"),
    [
        ("auto", 1, "sm90"),
        ("auto", 2, "eager"),
        ("auto", 101, "eager"),
        ("auto", 102, "eager"),
        ("sm90", 1, "sm90"),
        ("sm90", 101, "sm90"),
        ("eager", 1, "eager"),
        ("reference", 1, "reference"),
    ],
)
def test_the_first_that_takes_the_problem_runs(dispatcher, impl, problem, chosen):
    assert dispatcher.decide(impl, problem).chosen == chosen
    call = SimpleNamespace(problem=problem)
    assert dispatcher.run(impl, call) == (chosen, (call,))


@pytest.mark.parametrize(
    ("impl", "problem", "reasons"),
    [
        ("auto", 1, {"eager": "sm90 comes first", "reference": "only runs when asked for"}),
        ("auto", 2, {"sm90": "2 is even", "reference": "only runs when asked for"}),
        ("auto", 101, {"sm90": "too large for auto", "reference": "only runs when asked for"}),
        # what it cannot do comes before what auto would not do
        ("auto", 102, {"sm90": "102 is even", "reference": "only runs when asked for"}),
        ("sm90", 2, {"sm90": "2 is even", **dict.fromkeys(("eager", "reference"), "sm90")}),
        ("reference", 1, dict.fromkeys(("sm90", "eager"), "reference")),
    ],
)
def test_each_of_the_others_has_its_reason(dispatcher, impl, problem, reasons):
    asked = {"sm90", "reference"}
    expected = {
        name: f"impl={why!r} was asked for" if why in asked else why
        for name, why in reasons.items()
    }
    missing = {name: f"op has no {name} implementation" for name in ("dense", "triton")}
    assert dispatcher.decide(impl, problem).reasons == missing | expected


def test_an_explicit_name_never_falls_back(dispatcher):
    with pytest.raises(Unsupported, match=r"^op: impl='sm90' cannot run this: 2 is even$"):
        dispatcher.run("sm90", SimpleNamespace(problem=2))
    message = r"^op: impl='triton' cannot run this: op has no triton implementation$"
    with pytest.raises(Unsupported, match=message):
        dispatcher.run("triton", SimpleNamespace(problem=1))


def test_a_reference_that_does_not_exist_is_refused():
    cache = torch.zeros(1, 1, 4, 8)
    lengths = torch.ones(1, dtype=torch.int32)
    with pytest.raises(
        Unsupported,
        match=r"^kv_append: impl='reference' cannot run this: "
        r"kv_append has no reference implementation$",
    ):
        bsk.kv_append(
            cache, cache, cache[:, :, :1], cache[:, :, :1], cache_seqlens=lengths, impl="reference"
        )


def test_auto_says_all_reasons_where_nothing_runs(monkeypatch):
    monkeypatch.delenv("BSK_IMPL", raising=False)
    only = Dispatcher("op")
    only.register("sm90", odd, lambda call: 1)
    assert only.decide("auto", 2).chosen is None
    with pytest.raises(Unsupported, match=r"impl='auto' cannot run this: .*eager: .*; sm90: 2 is"):
        only.run("auto", SimpleNamespace(problem=2))
    assert only.run("auto", SimpleNamespace(problem=3)) == 1


def test_an_unknown_name_is_an_error(dispatcher):
    expected = "'auto', 'reference', 'eager', 'dense', 'triton', 'sm90'"
    with pytest.raises(
        InvalidInput, match=f"^op: impl is unknown; expected one of {expected}, got"
    ):
        dispatcher.run("fast", SimpleNamespace(problem=1))


def test_the_environment_answers_for_auto_only(dispatcher, monkeypatch):
    monkeypatch.setenv("BSK_IMPL", "eager")
    assert dispatcher.run("auto", SimpleNamespace(problem=1))[0] == "eager"
    assert dispatcher.run("sm90", SimpleNamespace(problem=1))[0] == "sm90"
    decision = dispatcher.decide("auto", 1)
    assert decision.asked == "eager" and decision.reasons["sm90"] == "impl='eager' was asked for"
    monkeypatch.setenv("BSK_IMPL", "sm90")
    with pytest.raises(Unsupported, match="impl='sm90' cannot run this: 2 is even"):
        dispatcher.run("auto", SimpleNamespace(problem=2))
    monkeypatch.setenv("BSK_IMPL", "fast")
    with pytest.raises(InvalidInput, match="BSK_IMPL is 'fast'; expected one of auto, reference"):
        dispatcher.run("auto", SimpleNamespace(problem=1))


def test_decide_and_call_agree(dispatcher):
    for problem in (1, 2, 101, 102):
        for impl in ("auto", "eager", "reference"):
            ran, _ = dispatcher.run(impl, SimpleNamespace(problem=problem))
            assert ran == dispatcher.decide(impl, problem).chosen


def test_a_decision_prints_as_a_table(dispatcher):
    assert str(dispatcher.decide("auto", 2)).splitlines() == [
        "op: eager (impl='auto')",
        "  problem: 2",
        "  not dense: op has no dense implementation",
        "  not triton: op has no triton implementation",
        "  not sm90: 2 is even",
        "  not reference: only runs when asked for",
    ]
    assert str(dispatcher.decide("sm90", 2)).startswith("op: nothing (impl='sm90')")


def test_explain_stops_before_computing_and_leaves_no_trace(dispatcher):
    ran = []
    dispatcher.register("eager", anything, lambda *args: ran.append(args))
    call = SimpleNamespace(problem=2)
    decision = explain(dispatcher.run, "auto", call)
    assert decision.chosen == "eager" and decision.problem == 2 and ran == []
    assert not dispatch.is_explaining()
    dispatcher.run("auto", call)
    assert ran == [(call,)]


def test_explain_needs_an_operator_and_passes_errors_on():
    def fails():
        raise InvalidInput("no")

    with pytest.raises(Unsupported, match="explain: 'len' reached no bsk operator"):
        explain(len, [])
    with pytest.raises(InvalidInput, match=r"^no$"):
        explain(fails)
    assert not dispatch.is_explaining()


def _problem(block, density, n=8192, arch=H200):
    blocks = (8192 // block) ** 2
    half = torch.float16
    shape = (8192, 8192)
    return BsrProblem(
        "matmul", arch, half, half, shape, (block, block), round(density * blocks), n, tma=True
    )


def _layer(block, density, n, shape=(8192, 8192)):
    """x @ A.T for few rows of x; `shape` is that of A.T."""
    blocks = shape[0] * shape[1] // block**2
    layer = replace(_problem(block, density, n), dense_left=True, transposed=True)
    return replace(layer, shape=shape, nnz_blocks=round(density * blocks))


@pytest.mark.parametrize(
    ("problem", "chosen"),
    [
        (_problem(128, 0.22), "sm90"),
        (_problem(128, 0.8), "sm90"),
        (_problem(128, 1.0), "sm90"),
        (_problem(16, 0.22), "sm90"),
        (_problem(16, 0.3), "sm90"),
        (_problem(16, 0.5), "dense"),
        (_problem(32, 0.3), "sm90"),
        (_problem(32, 0.5), "sm90"),
        (_problem(32, 0.7), "sm90"),
        (_problem(32, 0.95), "dense"),
        (_problem(64, 0.5), "sm90"),
        (_problem(64, 0.9), "sm90"),
        (_problem(16, 1.0, n=16), "triton"),
        (_layer(128, 0.22, 1), "triton"),
        *((_layer(128, 0.22, n), "sm90") for n in (2, 16, 64)),
        (_layer(32, 0.22, 64), "sm90"),
        (_layer(16, 0.22, 1), "triton"),
        *((_layer(16, 0.22, n), "sm90") for n in (2, 16, 32)),
        (_layer(128, 1.0, 16), "sm90"),
        # 16 x 16 blocks of Llama's layers, as they were fastest on an H200
        (_layer(16, 0.22, 64, (4096, 4096)), "sm90"),
        (_layer(16, 0.22, 128, (4096, 4096)), "triton"),
        (_layer(16, 0.22, 1024, (4096, 4096)), "sm90"),
        (_layer(16, 0.22, 128, (14336, 4096)), "triton"),
        (_layer(16, 0.10, 128, (14336, 4096)), "triton"),
        (_layer(16, 0.22, 128, (4096, 28672)), "sm90"),
        (_layer(16, 0.50, 512, (4096, 28672)), "dense"),
        (_layer(16, 0.50, 256, (4096, 4096)), "dense"),
        (replace(_layer(128, 0.22, 16), row_major=False), "triton"),
        (_problem(128, 0.22, arch=replace(H200, sm=80)), "triton"),
        (_problem(128, 1.0, arch=replace(H200, sm=80)), "dense"),
        (_problem(64, 0.5, arch=Arch("cpu", 0, 1, 0, False)), "eager"),
        (_problem(64, 0.9, arch=Arch("cpu", 0, 1, 0, False)), "dense"),
    ],
)
def test_auto_takes_the_dense_product_where_its_estimate_is_lower(
    monkeypatch, choosing_with, problem, chosen
):
    choosing_with(WARPS_TRITON[-1])
    monkeypatch.delenv("BSK_IMPL", raising=False)
    monkeypatch.setattr("blackwell_sparsek.dispatch.machine.why_triton_fails", lambda: None)
    decision = matmul_dispatch.decide("auto", problem)
    assert decision.chosen == chosen
    assert matmul_dispatch.choose("auto", problem).name == chosen


@pytest.mark.parametrize(
    ("problem", "parting", "other"),
    [
        # rows without a partner: 1.64 and 1.97 ms in blocks of 32, 1.87 in blocks of 64 where
        # cuBLAS takes 1.41, 1.44 and 1.48
        (_problem(32, 0.5), "sm90", "dense"),
        (_problem(32, 0.7), "sm90", "dense"),
        (_problem(64, 0.9), "sm90", "dense"),
        (_problem(64, 0.5), "sm90", "triton"),
        # no strips
        *((_layer(16, 0.22, n), "sm90", "triton") for n in (2, 16, 32)),
        # one program for each tile
        (_layer(128, 0.22, 16), "sm90", "triton"),
    ],
)
def test_auto_counts_only_on_what_this_triton_builds(
    monkeypatch, choosing_with, problem, parting, other
):
    monkeypatch.delenv("BSK_IMPL", raising=False)
    monkeypatch.setattr("blackwell_sparsek.dispatch.machine.why_triton_fails", lambda: None)
    for release, chosen in ((WARPS_TRITON[-1], parting), ((3, 99), other)):
        choosing_with(release)
        assert matmul_dispatch.decide("auto", problem).chosen == chosen


FRONT_END = (
    "launched by Triton's front end, about 300 us of host time a call instead of 20 to 30: "
    "direct launches are known for triton 3.6 to 3.9, got 3.10"
)


@pytest.mark.parametrize(
    ("release", "impl", "arch", "note"),
    [
        ((3, 9), "triton", H200, None),
        ((3, 10), "triton", H200, FRONT_END),
        ((3, 10), "eager", H200, None),
        ((3, 10), "triton", Arch("cpu", 0, 1, 0, True), None),
    ],
)
def test_explain_notes_launches_by_the_front_end(
    monkeypatch, choosing_with, release, impl, arch, note
):
    monkeypatch.setattr("blackwell_sparsek.dispatch.machine.why_triton_fails", lambda: None)
    choosing_with(release)
    problem = replace(_problem(64, 0.5), arch=arch, dtype=torch.float16, out_dtype=torch.float16)
    decision = matmul_dispatch.decide(impl, problem)
    assert decision.chosen == impl and decision.note == note
    lines = str(decision).splitlines()
    assert [x for x in lines if "note" in x] == ([] if note is None else [f"  note: {note}"])


def test_both_estimates_are_in_the_reasons(monkeypatch, choosing_with):
    choosing_with(WARPS_TRITON[-1])
    monkeypatch.delenv("BSK_IMPL", raising=False)
    monkeypatch.setattr("blackwell_sparsek.dispatch.machine.why_triton_fails", lambda: None)
    sparse = matmul_dispatch.decide("auto", _problem(128, 0.22)).reasons
    assert sparse["dense"] == "estimated 1.5 ms, sm90 0.346 ms"
    dense = matmul_dispatch.decide("auto", _problem(16, 0.9)).reasons
    assert dense["sm90"] == "estimated 2.22 ms, dense 1.53 ms"
    asked = matmul_dispatch.decide("dense", _problem(128, 0.22))
    assert asked.chosen == "dense" and asked.reasons["sm90"] == "impl='dense' was asked for"


def test_explain_of_a_product_prints_both_estimates(monkeypatch):
    monkeypatch.delenv("BSK_IMPL", raising=False)
    w = bsk.BSRMatrix.from_mask(torch.randn(256, 256), torch.ones(4, 4, dtype=torch.bool))
    text = str(explain(bsk.matmul, w, torch.randn(256, 512)))
    assert text.startswith("bsr_matmul: dense (impl='auto')")
    assert "not eager: estimated " in text and " ms, dense " in text


def test_a_repeated_choice_estimates_once(monkeypatch):
    from blackwell_sparsek.matmul import choice

    calls = []
    real = choice.dense_seconds
    choice._slower_than_dense.cache_clear()
    monkeypatch.setattr(choice, "dense_seconds", lambda p: calls.append(p) or real(p))
    why = choice.eager_passed_over
    assert len({why(_problem(128, 0.22)) for _ in range(3)}) == 1
    assert len(calls) == 1
