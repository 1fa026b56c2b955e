"""Random calls against the second oracle, and faults planted to see that they are found."""

import inspect
import itertools
import json
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.core.errors import Unsupported
from blackwell_sparsek.testing import fuzz, fuzz_attention, fuzz_products, fuzz_sparse, naive
from blackwell_sparsek.testing.fuzz_draw import Draw, same_bits

CORPUS = pathlib.Path(__file__).parent / "fuzz_corpus.txt"
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind, seed", fuzz.read_corpus(CORPUS))
def test_corpus(kind, seed, device):
    outcome = fuzz.run_one(kind, seed, device)
    assert not outcome.problem, f"{outcome.told}\n{outcome.problem}"


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_a_call_of_each_kind(kind, device):
    outcome = fuzz.run_one(kind, 20, device)
    assert not outcome.problem, f"{outcome.told}\n{outcome.problem}"


# Public functions that are not drawn, and why.
NOT_DRAWN = {
    "check_decode_inputs": "computes nothing",
    "explain": "computes nothing",
    "kv_cache_bytes": "a product of sizes",
    "kv_memory_table": "text",
    "sparsity_report": "text",
}


def test_every_public_function_is_drawn():
    folder = pathlib.Path(fuzz.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("fuzz_*.py"))
    functions = {name for name in bsk.__all__ if inspect.isfunction(getattr(bsk, name))}
    functions |= {"SparsekCache", "KeySelection", "BSRMatrix", "BlockMask", "KVCache"}
    missing = {name for name in functions if f"{name}(" not in text and f"{name}." not in text}
    assert missing == set(NOT_DRAWN)
    assert {f"fp8.{name}" for name in bsk.fp8.__all__ if name.islower()} <= set(fuzz.KINDS)


@pytest.mark.exhaustive
def test_many_calls():
    """The same ones in every run, as tests are; `make fuzz` draws others."""
    for kind, seed in itertools.islice(fuzz.drawn_kinds(777_000, ()), 400):
        outcome = fuzz.run_one(kind, seed, CPU)
        assert not outcome.problem, f"{outcome.told}\n{outcome.problem}"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(1, 200, 25))
def test_random_calls_on_the_gpu(seed):
    command = [sys.executable, "-m", "blackwell_sparsek.testing.fuzz", "--calls", "25"]
    options = ["--seed", str(seed), "--seconds", "300"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_call_that_loses_the_device_costs_no_other_call(monkeypatch, capsys):
    """Another process goes on after it."""
    starts = []

    def start(args, job, made, seconds):
        starts.append((job, made))
        calls = range(made, 3 if made == 0 else 5)
        lines = [
            json.dumps(fuzz.Outcome("matmul", n, "told", "lost" if n == 2 else "", 0)._asdict())
            for n in calls
        ]
        status = fuzz.DEVICE_LOST if made == 0 else 0
        return SimpleNamespace(stdout=lines, wait=lambda: status)

    monkeypatch.setattr(fuzz, "_start", start)
    assert fuzz.main(["--calls", "5", "--seed", "1", "--device", "cpu"]) == 1
    assert starts == [(0, 0), (0, 3)]
    printed = capsys.readouterr().out
    assert "5 calls (matmul 5)" in printed and "1 failures" in printed
    assert "processes ended" not in printed


def test_a_process_goes_on_after_the_calls_that_were_made(monkeypatch, capsys):
    made = []
    outcome = fuzz.Outcome("matmul", 0, "told", "", 0)
    monkeypatch.setattr(fuzz, "run_one", lambda kind, seed, device: made.append(seed) or outcome)
    options = ["--calls", "10", "--seed", "7", "--jobs", "2", "--device", "cpu"]
    assert fuzz.main([*options, "--job", "1", "--made", "3"]) == 0
    assert made == [14, 16]


def broken(module, name, monkeypatch, spoil):
    """Replace a public function, as the fuzzer sees it, by one whose results are spoiled."""
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: spoil(real(*args, **kwargs)))


def found(kind, seeds=range(40)):
    return next((o for o in (fuzz.run_one(kind, s, CPU) for s in seeds) if o.problem), None)


def test_a_wrong_element_is_found(monkeypatch):
    def spoil(results):
        results[0][..., -1, -1] *= 1.05
        return results

    broken(fuzz_attention, "merge_states", monkeypatch, spoil)
    outcome = found("merge_states")
    assert outcome is not None and "over the budget" in outcome.problem
    assert outcome.told.startswith(f"merge_states {outcome.seed}: dtype=")


def test_an_element_that_nobody_wrote_is_found(monkeypatch):
    def forgetful(o_a, lse_a, o_b, lse_b):
        return torch.empty_like(o_a), torch.logaddexp(lse_a, lse_b)

    monkeypatch.setattr(fuzz_attention, "merge_states", forgetful)
    outcome = found("merge_states")
    assert outcome is not None and "got nan" in outcome.problem


def test_a_call_that_is_not_repeatable_is_found(monkeypatch):
    broken(
        fuzz_attention, "scaled_dot_product_attention", monkeypatch,
        lambda out: out + torch.rand(()).to(out.dtype),
    )  # fmt: skip
    outcome = found("scaled_dot_product_attention")
    assert outcome is not None and "other bits when the call is repeated" in outcome.problem


@pytest.mark.parametrize(
    "name, spoil",
    [
        ("sparsek_causal", lambda tau: tau + 1e-4),
        ("sparsek_causal", lambda tau: tau.clamp(min=-9.0)),
        ("sparsek", lambda made: (made[0], made[1] + 1e-4)),
        ("sparsek", lambda made: (made[0].clamp(max=0.99), made[1])),
    ],
)
def test_other_thresholds_and_weights_are_found(name, spoil, monkeypatch):
    broken(fuzz_sparse, name, monkeypatch, spoil)
    assert found(name) is not None


def test_a_slot_too_many_is_found(monkeypatch):
    real = fuzz_products.kv_append

    def append(k_cache, *args, **kwargs):
        real(k_cache, *args, **kwargs)
        k_cache.view(-1, k_cache.shape[-1])[-1] = 0

    monkeypatch.setattr(fuzz_products, "kv_append", append)
    outcome = found("kv_append")
    assert outcome is not None and "the k cache differs" in outcome.problem


def test_auto_must_not_refuse():
    def refuse(impl):
        raise Unsupported("no")

    with pytest.raises(AssertionError, match="auto refused: no"):
        Draw("attention", 0, CPU).twice(refuse, "auto")


def test_a_named_implementation_may_refuse():
    def call(impl):
        if impl != "auto":
            raise Unsupported("not here")
        return torch.ones(2)

    draw = Draw("attention", 0, CPU)
    assert torch.equal(draw.twice(call, "sm90"), torch.ones(2))
    assert draw.refused == ["sm90: not here"]


def test_the_same_seed_draws_the_same_call():
    one, two, other = (fuzz.run_one("topk_pages", seed, CPU) for seed in (3, 3, 4))
    assert one.told == two.told != other.told


def test_failing_seeds_are_kept_once(tmp_path):
    path = tmp_path / "corpus.txt"
    outcome = fuzz.Outcome("attention", 17, "", "AssertionError: wrong\nmore", 0)
    fuzz.keep_in_corpus(path, outcome)
    fuzz.keep_in_corpus(path, outcome)
    assert path.read_text() == "attention 17  # AssertionError: wrong\n"
    assert fuzz.read_corpus(path) == [("attention", 17)]


def test_a_corpus_that_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("attention seventeen\n")
    with pytest.raises(ValueError, match="expected a kind of"):
        fuzz.read_corpus(path)


def test_processes_share_the_calls(capsys):
    seeds = []
    for job in ("0", "1"):
        options = ["--calls", "4", "--jobs", "2", "--seed", "7", "--device", "cpu"]
        assert fuzz.main(["masks", "--job", job, *options]) == 0
        seeds += [json.loads(x)["seed"] for x in capsys.readouterr().out.splitlines()]
    assert sorted(seeds) == [7, 8, 9, 10]


def test_one_call_is_made_again(capsys):
    assert fuzz.main(["--repeat", "masks 5", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("masks 5: pattern=")


# The oracle itself, on cases that are known by heart.


def test_the_oracle_rounds_to_fp8_as_torch_does():
    x = torch.cat([torch.linspace(-500, 500, 997), torch.linspace(-0.05, 0.05, 401)])
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    assert torch.equal(naive.stored_fp8(x, 1.0), want)


def test_the_oracle_of_windows():
    band = naive.in_band(2, 4, causal=True, window=2)
    assert band.int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert naive.limits(False, 3) == (2, 2)
    assert naive.limits(True, (1, 5)) == (1, 0)


def test_the_oracle_and_torch_agree_on_gradients():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 5, 4, dtype=torch.float64) for h in (2, 1, 1))
    seen = naive.in_band(5, 5, True, None).expand(1, 2, 5, 5)
    dout, dlse = torch.randn(1, 2, 5, 4).double(), torch.zeros(1, 2, 5).double()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, is_causal=True, scale=0.5, enable_gqa=True
    )
    want = torch.autograd.grad(out, leaves, dout)
    got = naive.attention_gradients(q, k, v, seen, naive.Softmax(0.5), dout, dlse, torch.float64)
    for a, b in zip(got, want, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_bits_are_compared():
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
