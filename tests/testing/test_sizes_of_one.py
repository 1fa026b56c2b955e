"""Kernels build for sizes and strides of 1, which Triton passes as constants."""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

from blackwell_sparsek.core.env import environment_for_compiler


def checked(*arguments):
    """The records that a child process prints; kernels cannot be compiled where they interpret."""
    command = [sys.executable, "-m", "blackwell_sparsek.testing.sizes_of_one", "--json", *arguments]
    done = subprocess.run(command, env=environment_for_compiler(), capture_output=True, text=True)
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def failures(records):
    return "\n".join(
        f"{r['name']} with {r['variant']} at 1: {problem}"
        for r in records
        for problem in r["problems"]
    )


@pytest.mark.exhaustive
def test_kernels_build_with_every_integer_at_one():
    records = checked("--quick")
    assert len({r["name"].split("/")[0] for r in records}) > 30
    assert not failures(records), failures(records)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_kernels_build_with_each_field_at_one(part):
    records = checked("--part", str(part), "4")
    assert {"all", "token"} <= {r["variant"] for r in records}
    assert not failures(records), failures(records)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["attn_dq/float16-d80", "attn_dkdv/float16-d80", "fp8-batch16"])
def test_strides_and_heads_of_one(kernel):
    """Regression: a head dimension of 1 in the backward pass, one KV head with an fp8 cache."""
    records = checked(kernel)
    assert len(records) > 3
    assert not failures(records), failures(records)


class Plain(NamedTuple):
    first: int
    second: object = None


class Mixed(NamedTuple):
    inner: Plain
    number: int


@pytest.mark.parametrize(
    "value, problems",
    [
        (Plain(1), 0),
        (Plain(Plain(1), Plain(2)), 0),
        (Mixed(Plain(1), 2), 1),
        (Plain(Mixed(Plain(1), 2), Mixed(Plain(1), 2)), 2),
        ((Plain(1), None), 1),
        (Mixed("*fp32", 2), 0),
        (Mixed(Plain("*fp32", "i32"), 2), 0),
    ],
)
def test_records_that_lose_constants_are_found(value, problems):
    from blackwell_sparsek.testing.sizes_of_one import mixed_records

    found = mixed_records(value, "argument")
    assert len(found) == problems
    assert all("argument" in problem and "of their own" in problem for problem in found)
