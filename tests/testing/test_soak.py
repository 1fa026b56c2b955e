"""The soak finds what it is there to find: other bits, errors, growth, and says in which call."""

import itertools
import json
import subprocess
import sys
import threading

import pytest
import torch

from blackwell_sparsek.core.env import environment_for_compiler
from blackwell_sparsek.core.errors import Unsupported
from blackwell_sparsek.testing import soak as tool
from blackwell_sparsek.testing.fixed_calls import FixedCall, fixed_calls, supported
from blackwell_sparsek.testing.soak import Checked, Soak

CPU = torch.device("cpu")
FUNCTIONS = (
    "attention/", "attention_varlen/", "scaled_dot_product_attention/", "merge_states/",
    "attention-backward/", "attention_varlen-backward/", "attention_decode/", "kv_append/",
    "kv_append/slots-", "page_summaries/", "topk_pages/", "matmul/", "sddmm/",
    "BSRLinear-backward/", "BlockMask/", "masks.topk/", "sparse_attention/",
    "sparse_attention-backward/", "fp8.attention/", "select_keys/", "sparsek/",
)  # fmt: skip


def planted(name, step, **options):
    """A call that returns `step(n)` at its n-th run in each thread."""

    def make(device):
        runs = itertools.count()
        return lambda: (step(next(runs)),)

    return FixedCall(name, make, **options)


def steady(n):
    return torch.tensor([1.0, float("nan"), -0.0])


def ran(*calls, threads=2, count=400, **options):
    soak = Soak([Checked(call, CPU) for call in calls], threads, graphs=False)
    return soak.run(60, count, **options)


def test_steady_calls_pass_and_are_counted():
    report = ran(planted("a", steady), planted("b", steady), threads=3)
    assert report.failures == []
    assert report.calls >= 400


@pytest.mark.parametrize(
    "later",
    [
        torch.tensor([1.0, float("nan"), 0.0]),  # equal as numbers
        torch.tensor([1.0 + 2**-23, float("nan"), -0.0]),
        torch.tensor([float("nan"), float("nan"), -0.0]),
    ],
)
def test_one_other_bit_is_found(later):
    faulty = planted("faulty", lambda n: steady(n) if n < 9 else later)
    report = ran(planted("good", steady), faulty)
    assert len(report.failures) == 2  # one of each thread
    assert all("faulty: " in failure and "differ" in failure for failure in report.failures)


def test_results_of_another_shape_are_found():
    faulty = planted("faulty", lambda n: steady(n) if n < 9 else steady(n)[:2])
    failures = ran(faulty).failures
    assert failures and "faulty: a call raised AssertionError: result 0 is" in failures[0]


def test_errors_name_the_call():
    def step(n):
        if n == 7:
            raise RuntimeError("planted")
        return steady(n)

    failures = ran(planted("good", steady), planted("faulty", step)).failures
    assert failures and "faulty: a call raised RuntimeError: planted" in failures[0]


def test_growth_of_the_process_is_found(monkeypatch):
    kept = []
    monkeypatch.setattr(tool, "HOST_BYTES", 2**20)

    def step(n):
        kept.append(bytearray(b"x" * 2**16))
        return steady(n)

    report = ran(planted("keeps", step), count=10_000, lap_seconds=0.2)
    assert any("memory: the process grew by" in failure for failure in report.failures)


def test_growth_on_the_device_is_found(monkeypatch):
    in_use = itertools.count(100)
    monkeypatch.setattr(Soak, "_memory", lambda self: (next(in_use), 0))
    report = ran(planted("good", steady), count=10_000, lap_seconds=0.05)
    assert any("bytes more are in use on cpu" in failure for failure in report.failures)


@pytest.mark.exhaustive
def test_a_thread_stays_through_all_laps():
    """PyTorch keeps memory for each thread that multiplies on a stream."""
    met = set()

    def make(device):
        def call():
            met.add((id(call), threading.get_ident()))
            return (steady(0),)

        return call

    assert ran(FixedCall("a", make), count=10_000, lap_seconds=0.02).failures == []
    met = {pair for pair in met if pair[1] != threading.get_ident()}
    assert len(met) == len({call for call, _ in met}) == len({thread for _, thread in met}) == 2


def test_results_that_vary_are_judged_by_the_budget():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def of(error):
        return planted(
            "varies", lambda n: (exact + error * (n % 2)).float(), varying=(0,),
            exact=lambda device: ((exact,), (exact.float() + 1e-4,)),
        )  # fmt: skip

    assert ran(of(1.5e-4)).failures == []
    assert any("varies: " in failure for failure in ran(of(3e-4)).failures)
    assert any("varies: " in failure for failure in ran(of(float("nan"))).failures)


def test_fixed_calls_cover_every_function():
    names = [call.name for call in fixed_calls(torch.device("cuda"))]
    for function in FUNCTIONS:
        assert any(name.startswith(function) for name in names), function
    for impl in ("auto", "triton", "sm90"):
        assert sum(name.endswith(f"/{impl}") for name in names) > 30


# Which kernels products launch on Hopper; in a process that does not interpret kernels.
FAMILIES = """
import json
import torch
from blackwell_sparsek.core import compat
from blackwell_sparsek.testing.bsr import operand_for, product, random_bsr
from blackwell_sparsek.testing.captured_launches import captured_launches
from blackwell_sparsek.testing import fixed_calls
import blackwell_sparsek.matmul.sm90.spmm_launch

compat.triton_version = lambda: (3, 6)
torch.cuda.is_current_stream_capturing = lambda: False
for name, (shape, block, density, order, columns, dtype, _) in fixed_calls._PRODUCTS.items():
    if name.split("-")[0] not in ("wide", "pairs", "narrow", "strips", "warps"):
        continue
    a = random_bsr(shape, block, seed=51, density=density, dtype=dtype)
    with captured_launches(90) as launches:
        product(a, order, operand_for(a, order, columns, seed=52), impl="sm90")
    last = launches[-1]
    paired = any(getattr(x, "PAIRED", False) is True for x in last.args)
    print(json.dumps([name, last.kernel.fn.__name__, paired]))
"""


def test_products_reach_the_kernels_they_are_named_for():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", FAMILIES], env=environment_for_compiler(), capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    launched = [json.loads(line) for line in done.stdout.splitlines()]
    wanted = {
        "wide": ["_spmm_sm90_kernel", False], "pairs": ["_spmm_sm90_kernel", True],
        "narrow": ["_spmm_narrow_sm90_kernel", False], "strips": ["_spmm_strips_kernel", False],
        "warps": ["_spmm_warps_kernel", False],
    }  # fmt: skip
    assert {name.split("-")[0] for name, *_ in launched} == set(wanted)
    for name, *kernel in launched:
        assert kernel == wanted[name.split("-")[0]], name


def test_only_default_gradients_may_vary():
    varying = [call.name for call in fixed_calls(torch.device("cuda")) if call.varying]
    assert varying
    assert all(x.startswith("attention-backward/") and "deterministic" not in x for x in varying)


def test_what_a_device_does_not_support_is_told():
    def make(device):
        raise Unsupported("not here")

    assert supported(FixedCall("x", make), CPU) == "not here"
    assert supported(planted("x", steady), CPU) is None


def test_processes_that_disagree_are_found():
    digests = {}
    assert tool._compared(digests, {"a": "1", "b": "2"}, 0) == []
    assert tool._compared(digests, {"a": "1", "b": "3"}, 1) == [
        "b: process 1 has other bits in its first run"
    ]


def test_products_of_the_fixed_calls_run_here():
    """Two threads, on whatever this machine has."""
    checked, _, _ = tool.prepare(CPU, "page_summaries")
    report = Soak(checked, 2, graphs=False).run(60, 20)
    assert report.failures == [] and report.calls >= 20


@pytest.mark.gpu
def test_soak_on_the_gpu():
    """Threads, streams, graphs and two processes, briefly."""
    command = [sys.executable, "-m", "blackwell_sparsek.testing.soak"]
    options = ["--minutes", "1", "--calls", "20000", "--processes", "2", "--threads", "3"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.exhaustive
def test_soak_in_two_processes():
    command = [sys.executable, "-m", "blackwell_sparsek.testing.soak", "--device", "cpu", "decode"]
    options = ["--minutes", "2", "--calls", "60", "--processes", "2", "--threads", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compared with the bits of their first run" in done.stdout
    assert "calls/s" in done.stdout


def test_a_child_that_finds_nothing_to_do_fails(capsys):
    code = tool.main(["no such call", "--child", "--device", "cpu"])
    line = json.loads(capsys.readouterr().out)
    assert code == 1 and "no call matches" in line["failure"]
