"""The serving loop generates what computing each request alone does."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blackwell_sparsek as bsk

PATH = Path(__file__).parents[2] / "examples" / "continuous_batching.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("continuous_batching", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def alone(example, model, rotary, prompt, new):
    """Greedy continuation from all tokens at every step, without a cache."""

    def attend(layer, q, k, v):
        positions = torch.arange(len(q))
        cos, sin = (x[positions][:, None] for x in (rotary.cos, rotary.sin))
        half = cos.shape[-1]
        q, k = (
            torch.cat([x[..., :half] * cos - x[..., half:] * sin,
                       x[..., half:] * cos + x[..., :half] * sin], -1)
            for x in (q, k)
        )  # fmt: skip
        dense = (x.transpose(0, 1)[None] for x in (q, k, v))
        return bsk.attention(*dense, causal=True)[0].transpose(0, 1)

    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(model(torch.tensor(tokens), attend)[-1].argmax()))
    return tokens[len(prompt) :]


def test_same_tokens_as_alone(example):
    torch.manual_seed(1)
    model, rotary = example.Model().eval(), example.rotations()
    lengths = (5, 70, 1, 33, 18)
    requests = [
        example.Request(2 * i, torch.randint(example.VOCABULARY, (n,)).tolist(), new=6 + i)
        for i, n in enumerate(lengths)
    ]
    steps = list(example.serve(model, requests, rotary))
    with torch.inference_mode():
        for request in requests:
            want = alone(example, model, rotary, request.prompt, request.new)
            assert request.generated == want
    assert max(map(sum, steps)) <= example.BUDGET
    # decoding went on beside a chunk of the long prompt
    assert any(1 in counts and max(counts) > 16 for counts in steps)


def test_requests_wait_for_pages(example):
    """Three requests of ten pages each do not fit into 24 at once."""
    torch.manual_seed(2)
    requests = [example.Request(0, [1] * 150, new=3) for _ in range(3)]
    steps = list(example.serve(example.Model().eval(), requests, example.rotations()))
    assert max(map(len, steps)) <= 2
    assert all(len(request.generated) == 3 for request in requests)


def test_runs_from_the_command_line():
    environment = {"PYTHONPATH": str(PATH.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(PATH), "--requests", "2"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=300,
    )
    assert result.stdout.startswith("step  0: ")


@pytest.mark.parametrize("prompt, new", [(0, 3), (5, 0), (200, 58)])
def test_requests_that_would_never_end(example, prompt, new):
    """They are refused when they are made, not waited for."""
    with pytest.raises(ValueError, match=f"at most 256 tokens .* prompt of {prompt} and {new} to"):
        example.Request(0, [1] * prompt, new=new)


def test_a_request_that_just_fits(example):
    torch.manual_seed(2)
    request = example.Request(0, torch.randint(example.VOCABULARY, (200,)).tolist(), new=57)
    steps = list(example.serve(example.Model().eval(), [request], example.rotations()))
    assert sum(map(sum, steps)) == example.LONGEST
    assert len(request.generated) == 57
