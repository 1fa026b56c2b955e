"""`bsk bench` on a GPU: every kind of suite times small cases, ours and torch's own kernels."""

import json
import time
from dataclasses import replace

import pytest
import torch

from blackwell_sparsek.bench import cli
from blackwell_sparsek.bench.case import EAGER, GRAPH
from blackwell_sparsek.bench.run import failures, run_suite
from blackwell_sparsek.bench.suites import SUITES
from blackwell_sparsek.bench.suites.attention_problem import Attention
from blackwell_sparsek.bench.suites.decode import Decode
from blackwell_sparsek.bench.suites.matmul import Product
from blackwell_sparsek.bench.suites.varlen import Varlen
from blackwell_sparsek.bench.timing import time_interleaved

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
FEW = {"bsk", "bsk_dense", "bsk_deterministic", "bsk_padded", "bsk_attention", "bsk_new_mask"}
FEW |= {"sdpa_cudnn", "sdpa_flash", "sdpa_dense", "sdpa", "sdpa_padded"}
PROBLEMS = {
    "attention_dense": Attention(2, 4, 512, 128, causal=True),
    "attention_window": Attention(1, 4, 1024, 64, causal=True, window=200),
    "attention_small": Attention(1, 8, 512, 64, dtype=torch.float16),
    "attention_varlen": Varlen((100, 7, 300), 4, 64, 2, causal=True),
    "block_sparse": Attention(1, 2, 1024, 128, block=(128, 64), density=0.25),
    "mask_building": Attention(1, 2, 1024, 128, block=(64, 64), density=0.25),
    "backward": Attention(1, 4, 256, 64, kv_heads=2, causal=True),
    "training": Attention(1, 4, 256, 64, kv_heads=2, causal=True, forward_too=True),
    "decode": Decode(3, 1000, page_size=16, shortest=70),
    "host": Attention(1, 2, 256, 64, causal=True),
}


def _small(suite, problem):
    """The first case of a suite, with a smaller problem and no peers that compile for long."""
    case = next(iter(suite.cases(False)))
    peers = tuple(name for name in case.peers if name in FEW)
    shown = case.problem | problem.describe()
    return replace(case, name=problem.title, problem=shown, build=problem.build, peers=peers)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_small_case_of_each_suite(name):
    suite = SUITES[name]
    case = _small(suite, PROBLEMS[name])
    document = run_suite(suite, [case], GPU, seconds=0.02)
    assert failures(document) == []
    (result,) = document["cases"]
    assert set(result["peers"]["bsk"]["times"]) == set(case.modes), result["peers"]
    assert document["environment"]["driver"] != ""


def test_a_small_product():
    suite = SUITES["matmul_square"]
    small = Product(512, 512, 512, (64, 64), 0.25)
    case = replace(next(iter(suite.cases(False))), problem=small.describe(), build=small.build)
    (result,) = run_suite(suite, [case], GPU, seconds=0.02)["cases"]
    assert {name for name, entry in result["peers"].items() if "times" in entry} == {"bsk", "dense"}


def test_a_first_call_is_shorter_when_its_kernels_are_compiled():
    suite = SUITES["first_call"]
    cases = [case for case in suite.cases(False) if case.name.startswith("matmul")]
    document = run_suite(suite, cases, GPU, seconds=0.05)
    assert failures(document) == []
    cold, warm = (case["peers"]["bsk"]["times"]["reported"] for case in document["cases"])
    assert warm["quantiles_s"]["p50"] < cold["quantiles_s"]["p50"]


def test_what_a_call_costs_the_host_is_not_in_device_times():
    x = torch.ones(1024, device=GPU)

    def slow():
        time.sleep(3e-4)
        return x + 1

    times = time_interleaved({"slow": slow}, GPU, budget_s=0.01, rounds=(5, 5))
    assert times["slow"].median < 1e-4


def test_graphs_rotate_inputs_past_the_cache():
    inputs = PROBLEMS["attention_small"].build(GPU)
    copies = inputs.others()
    size = sum(x.numel() * x.element_size() for x in (inputs.q, inputs.k, inputs.v))
    assert len(copies) * size >= 128 * 2**20 or len(copies) == 128
    assert len({x.q.data_ptr() for x in copies}) == len(copies)
    case = _small(SUITES["attention_small"], PROBLEMS["attention_small"])
    assert case.modes == (EAGER, GRAPH)


def test_the_command_runs_a_worker_and_leaves_results(tmp_path, capfd):
    args = ["bench", "host", "--case", "matmul W", "--seconds", "0.02", "-o", str(tmp_path)]
    assert cli.main(args) == 0
    document = json.loads((tmp_path / "host.json").read_text())
    assert document["environment"]["device"] == "cuda"
    assert [path.name for path in tmp_path.iterdir()] == ["host.json"]
    assert "| matmul W @ x |" in capfd.readouterr().out
