import itertools

import pytest
import torch

from blackwell_sparsek.bench.case import EAGER, GRAPH, SUSTAINED
from blackwell_sparsek.bench.machine import ClockLog
from blackwell_sparsek.bench.measure import measure
from blackwell_sparsek.bench.run import failures
from blackwell_sparsek.bench.suites import SUITES, matmul
from blackwell_sparsek.bench.suites import matmul as matmul_peers
from blackwell_sparsek.bench.suites.matmul import (
    BLOCKS,
    CUSPARSE,
    DENSE,
    LLAMA,
    OURS,
    PACKED,
    PEERS,
    STORED,
    TORCH,
    TUNED,
    Product,
    _case,
)

CPU = torch.device("cpu")


def _measure(product, peers, seconds=0.0):
    case = _case(product, "case", peers)
    return measure(case, PEERS, CPU, seconds=seconds, clocks=ClockLog(CPU))


def test_inputs_have_exactly_the_density_and_repeat():
    product = Product(256, 128, 8, (32, 16), 0.22)
    inputs, again = product.build(CPU), product.build(CPU)
    assert inputs.sparse.nnz_blocks == round(0.22 * 64)
    assert torch.equal(inputs.dense, inputs.sparse.to_dense())
    assert torch.equal(inputs.dense, again.dense) and torch.equal(inputs.x, again.x)
    assert inputs.x.shape == (128, 8)
    assert Product(256, 128, 8, (32, 16), 0.22, linear=True).build(CPU).x.shape == (8, 128)


def test_replicas_are_other_memory_with_the_same_values():
    inputs = Product(64, 64, 8, (16, 16), 0.5).build(CPU, replicated=True)
    weights = inputs.replicas(inputs.dense)
    assert len({w.data_ptr() for w in weights}) == len(weights) == 16
    assert all(torch.equal(w, inputs.dense) for w in weights)
    contender = PEERS[OURS].prepare(inputs)
    assert len(contender.replicas) == 16
    assert torch.equal(contender.replicas[3](), contender.run())
    wide = Product(64, 64, 8, (16, 16), 0.5).build(CPU)
    assert wide.replicas(wide.dense) == [] and PEERS[OURS].prepare(wide).replicas == ()


@pytest.mark.parametrize("linear", [False, True])
def test_every_peer_that_runs_here_is_right_and_counts_its_work(linear):
    product = Product(128, 64, 24, (16, 16), 0.25, linear=linear)
    inputs = product.build(CPU)
    flops = {}
    for name in (OURS, STORED, DENSE, PACKED):
        contender = PEERS[name].prepare(inputs)
        contender.check(contender.run())
        flops[name] = contender.flops
    all_of_it = 2.0 * 128 * 64 * 24
    assert flops[DENSE] == product.dense_flops == all_of_it
    assert flops[STORED] == flops[PACKED] == all_of_it / 4


@pytest.mark.parametrize("linear", [False, True])
def test_a_wrong_result_is_caught(linear):
    inputs = Product(128, 64, 24, (16, 16), 0.25, linear=linear).build(CPU)
    contender = PEERS[DENSE].prepare(inputs)
    right = contender.run()
    contender.check(right)
    for wrong in (right.roll(1, 0), right * 1.01, right.index_fill(0, torch.tensor([0]), 50.0)):
        with pytest.raises(AssertionError, match="sampled rows"):
            contender.check(wrong)


def test_results_hold_what_the_file_promises():
    result = _measure(Product(128, 128, 32, (32, 32), 0.25), (OURS, DENSE, PACKED))
    ours = result["peers"][OURS]
    assert ours["implementation"] == "eager" and "estimated" in ours["why_not"]["dense"]
    times = ours["times"]["eager"]
    median = times["quantiles_s"]["p50"]
    assert times["rounds"] >= 3 and times["quantiles_s"]["min"] <= median
    dense_tflops = 2 * 128 * 128 * 32 / median / 1e12
    assert times["dense_equivalent_tflops"] == pytest.approx(dense_tflops)
    assert times["executed_tflops"] == pytest.approx(dense_tflops / 4)
    assert result["clocks"] == {}


def test_a_peer_that_cannot_or_is_wrong_or_crashes_keeps_the_others(monkeypatch):
    def crashes(inputs):
        raise RuntimeError("no such thing\nand a page of trace")

    def wrong(inputs):
        right = matmul_peers._dense(inputs)
        return right._replace(run=lambda: right.run() + 1)

    def crashes_when_timed(inputs):
        right = matmul_peers._dense(inputs)
        runs = iter([right.run])
        return right._replace(run=lambda: next(runs)())

    for name, prepare in (("a", crashes), ("b", wrong), ("c", crashes_when_timed)):
        monkeypatch.setitem(PEERS, name, matmul_peers.Peer(name, name, prepare))
    product = Product(64, 64, 8, (16, 16), 0.5)
    result = _measure(product, ("a", "b", "c", TUNED, CUSPARSE, OURS))
    peers = result["peers"]
    assert peers["a"]["crashed"] == "RuntimeError: no such thing"
    assert peers["b"]["failed"].startswith("AssertionError: sampled rows")
    assert peers["c"]["no eager"].startswith("StopIteration")
    assert peers[TUNED]["n/a"] == peers[CUSPARSE]["n/a"] == "needs a CUDA GPU"
    assert [name for name in peers if "times" in peers[name]] == [OURS]
    document = {"cases": [result]}
    assert failures(document) == []
    peers[OURS] = peers["b"]
    document["cases"].append({"name": "x", "peers": {}, "error": "no memory"})
    ours, built = failures(document)
    assert ours.startswith("case, blocks 16x16, 50% sparse: bsk: AssertionError: sampled rows")
    assert built == "x: no memory"


def test_a_case_that_cannot_be_built_has_an_error():
    result = _measure(Product(-1, 64, 8, (16, 16), 0.5), (OURS,))
    assert result["error"].startswith("RuntimeError") and result["peers"] == {}


@pytest.mark.parametrize("suite", ["founding", "square", "llama", "layers", "decode", "crossover"])
def test_suites_cover_what_they_say(suite):
    made = SUITES[f"matmul_{suite}"].cases
    cases, tiny = list(made(False)), list(made(True))
    assert len({case.name for case in cases}) == len(cases)
    assert len({case.name for case in tiny}) == len(tiny)
    assert {case.problem["dtype"] for case in cases} == {"float16"}
    assert {case.problem["dtype"] for case in tiny} == {"float32"}
    problems = [case.problem for case in cases]
    blocks = {tuple(p["block"]) for p in problems}
    if suite in ("founding", "square", "layers", "crossover"):
        assert blocks == set(BLOCKS)
    if suite == "founding":
        assert all(p["weight"] == [8192, 8192] and p["n"] == 8192 for p in problems)
        assert sorted({p["density"] for p in problems}) == [0.22, 1.0]
        assert sum(CUSPARSE in case.peers for case in cases) == 1
        assert all(case.modes == (EAGER, SUSTAINED) for case in cases)
    if suite in ("square", "layers"):
        problems_of = [(4096,) * 3, (8192,) * 3, (16384,) * 3, (32768,) * 3]
        if suite == "layers":
            problems_of = [
                (*LLAMA[name], n) for name in ("8B gate_up", "70B down") for n in (16, 1024)
            ]
        found = [((*p["weight"], p["n"]), tuple(p["block"]), p["density"]) for p in problems]
        densities = (0.5, 0.3, 0.22, 0.1, 0.05)
        assert set(found) == set(itertools.product(problems_of, BLOCKS, densities))
        # a run that ends early has one density of everything, and loses the longest cases
        assert set(found[:28]) == set(itertools.product(problems_of, BLOCKS, [0.22]))
        assert all(size == problems_of[-1] for size, *_ in found[-28:])
    if suite in ("square", "crossover"):
        assert all(case.build(CPU).sparse.nnz_blocks for case in tiny)
    if suite in ("llama", "layers"):
        for case in cases:
            modes = (EAGER, GRAPH) if case.problem["n"] <= 64 else (EAGER,)
            assert case.modes == modes
    if suite == "llama":
        assert {tuple(p["weight"]) for p in problems} == set(LLAMA.values())
    if suite == "decode":
        assert all(GRAPH in case.modes and case.problem["n"] <= 64 for case in cases)


def test_torch_takes_square_blocks_only(monkeypatch):
    inputs = Product(64, 64, 8, (32, 16), 0.5).build(CPU)
    assert PEERS[TORCH].supports(inputs) == "takes square blocks only"
    square = Product(64, 64, 8, (16, 16), 0.5).build(CPU)
    for has_mkl, reason in ((True, None), (False, "needs a torch with MKL on a CPU")):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda has_mkl=has_mkl: has_mkl)
        assert PEERS[TORCH].supports(square) == reason
    linear = Product(64, 64, 8, (16, 16), 0.5, linear=True).build(CPU)
    assert PEERS[TORCH].supports(linear) == "only measured as W @ x"


def test_meeting_points():
    assert matmul.meeting_point([(0.4, 0.5), (0.2, 2.0)]) == pytest.approx(0.2667)
    assert matmul.meeting_point([(0.5, 1.0), (0.9, 0.5)]) == 0.5
    assert matmul.meeting_point([(0.1, 3.0), (0.9, 1.1)]) is None
    assert matmul.meeting_point([(0.1, 0.9), (0.9, 0.2)]) is None


def test_crossings_are_found_per_block_shape():
    def case(block, density, stored_s):
        quantiles = {STORED: stored_s, DENSE: 1.0}
        peers = {n: {"times": {"eager": {"quantiles_s": {"p50": s}}}} for n, s in quantiles.items()}
        return {"problem": {"block": block, "density": density}, "peers": peers}

    cases = [case([16, 16], 0.1, 0.5), case([16, 16], 0.3, 1.5), case([64, 64], 0.1, 0.2)]
    assert matmul.crossings([*cases, {"problem": {}, "peers": {OURS: {}}}]) == [
        {"block": [16, 16], "density": 0.2, "speedups": [(0.1, 2.0), (0.3, pytest.approx(2 / 3))]},
        {"block": [64, 64], "density": None, "speedups": [(0.1, 5.0)]},
    ]
