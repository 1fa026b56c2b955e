"""`make mutants`: plant small faults in the package and see whether the tests notice.

A random sample of all mutants (`mutations.py`) of the package, but for kernels for Hopper, choices
of tiles, and the code that measures and tests the rest. Each runs in a process of its own, in a
copy of the repository, against the tests that mirror the file, then those of `FALLBACKS`. What a
test does not notice is a hole: give it a test, or say in `equivalent_mutants.txt` why nobody can
tell.

A run that was stopped goes on where it was: the answer for a mutant stays in the file of `--out`
and counts as long as the mutated file and its tests have not changed since. The whole sample counts
in the share, which is that of the tests that were run for each file, not of the whole suite. A test
that also fails without a fault kills nothing: the killing tests are run once more without one.
"""

import argparse
import ast
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from .mutations import Mutant, apply, mutants_of

REPOSITORY = pathlib.Path(__file__).parents[2]
SOURCE = "src/blackwell_sparsek"
EQUIVALENTS = pathlib.Path(__file__).with_name("equivalent_mutants.txt")

# Host code and portable kernels; not `tuning.py`, where a fault changes the speed alone, nor sm90,
# whose tests need a GPU or minutes in an emulator, nor what needs vLLM, SGLang or xFormers to run.
TARGETS = (
    "core/*.py",
    "dispatch/*.py",
    "launch/*.py",
    "masks/*.py",
    "sparse/*.py",
    "calls/*.py",
    "device/*.py",
    "reference/*.py",
    "attention/*.py",
    "attention/eager/*.py",
    "attention/triton/*.py",
    "attention/gated/*.py",
    "decode/*.py",
    "distributed/*.py",
    "fp8/*.py",
    "integrations/*.py",
    "integrations/flash_attn/*.py",
    "integrations/huggingface/*.py",
    "jax/*.py",
    "kv_cache/*.py",
    "matmul/*.py",
    "matmul/triton/*.py",
    "nn/*.py",
    "prune/*.py",
    "ragged/*.py",
    "select_keys/*.py",
    "sparse_attention/*.py",
    "sparse_attention/eager/*.py",
    "sparse_attention/triton/*.py",
    "sparsek/*.py",
)
NOT_TARGETS = (
    "tuning.py",
    "portable_tuning.py",
    "estimate.py",
    "estimate_sampled.py",
    "__init__.py",
    "sm90.py",
    "sm90_latent.py",
    "sm90_latent_tiles.py",
    "sm90_producer.py",
    "xformers.py",
)

# For each folder or file, tests that run after those of the same name; the longest entry that a
# path begins with counts. Tests of its own folder that import a file need not be here.
FALLBACKS = {
    "masks": ["masks/test_block_mask.py", "masks/test_patterns.py"],
    "masks/block_mask": [
        "masks/test_block_mask.py",
        "masks/test_patterns.py",
        "masks/test_algebra.py",
        "masks/test_any_length.py",
        "masks/test_meta_device.py",
    ],
    "masks/list_kernels": ["masks/test_list_kernels.py", "masks/test_device_build.py"],
    "masks/order": ["attention/sm90/test_dq_order.py"],
    "masks/segments": ["attention/test_varlen.py", "attention/sm90/test_launch.py"],
    "sparse": ["sparse/test_matrix.py", "sparse/test_validate.py", "matmul/test_op.py"],
    "sparse/matrix": ["sparse/test_matrix.py", "sparse/test_fp8.py", "matmul/test_op.py"],
    "sparse/pattern": [
        "sparse/test_matrix.py",
        "sparse/test_copies.py",
        "sparse/test_validate.py",
        "nn/test_written_pattern.py",
    ],
    "sparse/product": ["matmul/test_eager.py", "sparse/test_matrix.py", "matmul/test_op.py"],
    "sparse/reading": ["nn/test_written_pattern.py"],
    "sparse/scores": ["prune/test_sparsify.py"],
    "calls/attention": [
        "attention/test_op.py",
        "attention/test_api.py",
        "attention/sm90/test_tuning.py",
        "attention/test_resize.py",
        "attention/test_zero_sizes.py",
    ],
    "calls/cache": [
        "kv_cache/test_cache.py",
        "kv_cache/test_paged.py",
        "kv_cache/test_slots.py",
    ],
    "calls/decode": ["decode/test_op.py", "decode/test_api.py", "decode/test_latent.py"],
    "calls/fp8": ["fp8/test_attention.py", "fp8/test_quantize.py", "fp8/test_matmul.py"],
    "core": ["core/test_checks.py"],
    "core/activations": [
        "device/test_epilogue.py",
        "matmul/triton/test_epilogue_gradients.py",
        "matmul/test_api.py",
    ],
    "core/after_torch": ["architecture/test_lazy_imports.py", "dispatch/test_flops.py"],
    "core/checks": ["core/test_checks.py", "dispatch/test_transforms.py"],
    "core/env": ["core/test_env.py", "dispatch/test_dispatcher.py", "launch/test_cache_keys.py"],
    "core/fp8": ["fp8/test_quantize.py", "sparse/test_fp8.py"],
    "core/sizes": ["launch/test_descriptors.py", "launch/test_launcher.py", "fp8/test_quantize.py"],
    "core/target": ["dispatch/test_machine.py"],
    "core/torch_private": ["launch/test_launcher.py", "launch/test_workspace.py"],
    "core/torch_state": [
        "dispatch/test_machine.py",
        "dispatch/test_dispatcher.py",
        "masks/test_block_mask.py",
        "attention/test_op.py",
    ],
    "core/transfer": [
        "kv_cache/test_cache.py",
        "kv_cache/test_paged.py",
        "nn/test_written_pattern.py",
    ],
    "dispatch": ["dispatch/test_dispatcher.py"],
    "dispatch/model_report": [
        "nn/test_comfort.py",
        "dispatch/test_sparsity.py",
        "integrations/huggingface/test_block_sparse.py",
    ],
    "dispatch/operators": ["dispatch/test_transforms.py", "attention/test_op.py"],
    "launch": ["launch/test_launcher.py", "launch/test_variants.py", "launch/test_described.py"],
    "launch/descriptors": ["decode/test_tuning_sm90.py"],
    "launch/interpreted": ["decode/test_triton.py", "attention/triton/test_forward.py"],
    "launch/recording": [
        "launch/test_launcher.py",
        "launch/test_workspace.py",
        "attention/test_replay.py",
    ],
    "launch/replay": ["attention/test_replay.py", "masks/test_derived_lists.py"],
    "launch/resize": ["attention/test_resize.py"],
    "launch/signature": [
        "launch/test_described.py",
        "launch/test_assembler.py",
        "launch/test_cache_keys.py",
        "testing/test_compile_only.py",
    ],
    "launch/variants": [
        "launch/test_launcher.py",
        "launch/test_cache_keys.py",
        "launch/test_described.py",
    ],
    "launch/templates": [
        "launch/test_launcher.py",
        "launch/test_replay.py",
        "testing/test_canaries.py",
    ],
    "reference/fp8": ["fp8/test_quantize.py", "fp8/test_attention.py", "fp8/test_matmul.py"],
    "reference/gated_attention": ["attention/gated/test_gated.py"],
    "reference/attention": ["attention/eager/test_forward.py", "attention/test_bias.py"],
    "reference/ragged": ["ragged/test_api.py", "ragged/test_triton.py"],
    "reference/select_keys": ["select_keys/test_api.py"],
    "reference/sparse_attention": [
        "sparse_attention/test_api.py",
        "sparse_attention/eager/test_eager.py",
    ],
    "reference/sparsek": ["sparsek/test_api.py", "sparsek/test_triton.py"],
    "matmul/fp8_": ["fp8/test_matmul.py"],
    "calls/gated_attention": ["attention/gated/test_gated.py"],
    "attention/gated": ["attention/gated/test_gated.py"],
    "device/gates": ["attention/gated/test_gated.py"],
    "calls/matmul": ["matmul/sm90/test_sddmm.py", "matmul/test_op.py", "matmul/test_api.py"],
    "calls/ragged": [
        "ragged/test_api.py",
        "ragged/test_triton.py",
        "ragged/test_tuning.py",
    ],
    "calls/select_keys": ["select_keys/test_api.py", "select_keys/test_triton.py"],
    "calls/sparse_attention": [
        "sparse_attention/test_api.py",
        "sparse_attention/eager/test_eager.py",
    ],
    "calls/sparsek": ["sparsek/test_api.py", "sparsek/test_triton.py"],
    "device": ["attention/triton/test_forward.py", "attention/triton/test_backward.py"],
    "device/epilogue": ["matmul/triton/test_spmm.py"],
    "device/tiles": [
        "device/test_epilogue.py",
        "attention/triton/test_forward.py",
        "attention/triton/test_backward.py",
    ],
    "device/fp8": ["decode/test_triton.py"],
    "device/ordering": ["kv_cache/test_selection_kernels.py"],
    "device/paging": ["decode/test_triton.py"],
    "device/softmax": [
        "attention/triton/test_forward.py",
        "sparse_attention/triton/test_forward.py",
    ],
    "device/partials": ["decode/test_triton.py"],
    "attention": ["attention/test_api.py", "attention/test_op.py", "attention/test_autograd.py"],
    "attention/api": [
        "attention/test_api.py",
        "attention/test_varlen.py",
        "attention/test_out.py",
        "launch/test_replay.py",
    ],
    "attention/autograd": ["attention/test_autograd.py", "attention/test_replay.py"],
    "attention/fp8_": ["fp8/test_attention.py", "attention/test_api.py"],
    "attention/inputs": [
        "attention/test_api.py",
        "attention/test_op.py",
        "attention/test_bias.py",
        "attention/test_varlen.py",
        "attention/test_out.py",
        "attention/test_zero_sizes.py",
    ],
    "attention/resize": ["attention/test_resize.py"],
    # what kernels are given is seen by kernels, and by those of packed and masked calls most of all
    "attention/operands": [
        "attention/triton/test_forward.py",
        "attention/test_mask_per_kv_head.py",
        "attention/test_bias.py",
    ],
    "attention/merge": ["attention/test_merge_op.py"],
    "attention/eager/fp8": ["fp8/test_attention.py"],
    "attention/eager": ["attention/eager/test_forward.py", "attention/test_autograd.py"],
    "attention/sdpa": ["integrations/test_torch_sdpa.py", "attention/test_api.py"],
    "attention/triton": [
        "attention/triton/test_route.py",
        "attention/test_bias.py",
        "attention/gated/test_gated.py",
    ],
    "attention/triton/forward_fp8": ["fp8/test_attention.py"],
    "decode": ["decode/test_api.py", "decode/test_op.py"],
    "distributed": ["distributed/test_alone.py", "distributed/test_simulated_ranks.py"],
    "distributed/plan": ["distributed/test_simulated_ranks.py"],
    # what ranks tell each other is seen by ranks in processes of their own
    "distributed/api": [
        "distributed/test_alone.py",
        "distributed/test_explain.py",
        "distributed/test_simulated_ranks.py",
        "distributed/test_ranks.py",
    ],
    "distributed/collectives": [
        "distributed/test_simulated_ranks.py",
        "distributed/test_ranks.py",
    ],
    "distributed/call": ["distributed/test_simulated_ranks.py", "distributed/test_ranks.py"],
    "distributed/decode": ["distributed/test_ranks.py"],
    "distributed/group": ["distributed/test_alone.py", "distributed/test_ranks.py"],
    "distributed/linear": ["distributed/test_ranks.py"],
    "distributed/sequence": [
        "distributed/test_simulated_ranks.py",
        "distributed/test_ranks.py",
    ],
    "distributed/traffic": ["distributed/test_plan.py", "distributed/test_explain.py"],
    "fp8": ["fp8/test_quantize.py", "fp8/test_attention.py", "fp8/test_matmul.py"],
    "fp8/attend": ["fp8/test_attention.py"],
    "fp8/multiply": ["fp8/test_matmul.py"],
    "integrations": ["integrations/test_integrations.py"],
    "integrations/flash_attn": [
        "integrations/test_flash_attn.py",
        "integrations/test_flash_attn_grid.py",
    ],
    "integrations/huggingface": [
        "integrations/huggingface/test_attention.py",
        "integrations/huggingface/test_models.py",
        "integrations/huggingface/test_masks_of_models.py",
    ],
    "integrations/huggingface/attention": [
        "integrations/huggingface/test_attention.py",
        "integrations/huggingface/test_block_sparse.py",
        "integrations/huggingface/test_indexed_masks.py",
        "integrations/huggingface/test_dense.py",
        "integrations/huggingface/test_fp8.py",
        "integrations/huggingface/test_models.py",
        "integrations/huggingface/test_masks_of_models.py",
    ],
    "integrations/huggingface/registration": [
        "integrations/huggingface/test_block_sparse.py",
        "integrations/huggingface/test_fp8.py",
        "integrations/huggingface/test_models.py",
        "integrations/huggingface/test_masks_of_models.py",
    ],
    "integrations/huggingface/visible_keys": [
        "integrations/huggingface/test_visible_keys.py",
        "integrations/huggingface/test_indexed_masks.py",
        "integrations/huggingface/test_padding.py",
        "integrations/huggingface/test_masks_of_models.py",
    ],
    "jax": ["jax/test_attention.py", "jax/test_decode.py", "jax/test_matmul.py"],
    # what public functions hand to kernels is seen by kernels
    "jax/attention": [
        "jax/test_attention.py",
        "jax/test_attention_kernels.py",
        "jax/test_vmap_kernels.py",
    ],
    "jax/decode": ["jax/test_decode.py", "jax/test_other_kernels.py", "jax/test_vmap_kernels.py"],
    "jax/matmul": ["jax/test_matmul.py", "jax/test_other_kernels.py", "jax/test_vmap_kernels.py"],
    "jax/bsr": ["jax/test_pytrees.py", "jax/test_matmul.py"],
    "jax/block_mask": ["jax/test_pytrees.py", "jax/test_attention.py"],
    "jax/attention_sm90": ["jax/test_sm90.py"],
    "jax/attention_triton": ["jax/test_attention_kernels.py", "jax/test_vmap_kernels.py"],
    "jax/batching": ["jax/test_vmap_kernels.py"],
    "jax/driver_calls": ["jax/test_sm90.py"],
    "jax/decode_triton": ["jax/test_other_kernels.py", "jax/test_vmap_kernels.py"],
    "jax/ffi": ["jax/test_ffi.py"],
    "jax/flat_kernels": ["jax/test_attention_kernels.py", "jax/test_other_kernels.py"],
    "jax/kernel_calls": ["jax/test_attention_kernels.py", "jax/test_other_kernels.py"],
    "jax/matmul_triton": ["jax/test_other_kernels.py", "jax/test_vmap_kernels.py"],
    "decode/triton": ["decode/test_variants.py", "decode/test_slopes.py"],
    "jax/version": ["jax/test_pytrees.py"],
    "kv_cache": [
        "kv_cache/test_cache.py",
        "kv_cache/test_paged.py",
        "kv_cache/test_copies.py",
    ],
    "kv_cache/selection": ["kv_cache/test_selection.py", "kv_cache/test_selection_kernels.py"],
    "kv_cache/slots": ["kv_cache/test_slots.py"],
    "matmul": ["matmul/test_api.py", "matmul/test_op.py", "matmul/test_eager.py"],
    "matmul/autograd": ["matmul/test_training.py", "matmul/test_api.py"],
    "matmul/inputs": ["matmul/test_api.py", "matmul/test_training.py", "matmul/test_op.py"],
    "matmul/rows": ["matmul/triton/test_spmm.py", "matmul/triton/test_narrow.py"],
    "matmul/strides": ["matmul/triton/test_spmm.py", "jax/test_other_kernels.py"],
    "matmul/products": [
        "matmul/test_api.py",
        "matmul/test_training.py",
        "nn/test_bsr_linear.py",
    ],
    "matmul/triton": ["matmul/test_op.py"],
    "matmul/triton/finish": ["matmul/triton/test_spmm.py"],
    "matmul/triton/sample": ["matmul/triton/test_shares_and_sample.py"],
    "matmul/triton/spmm": ["matmul/test_op.py", "fp8/test_matmul.py"],
    "nn/bsr": [
        "nn/test_bsr_linear.py",
        "nn/test_bsr_weight.py",
        "nn/test_comfort.py",
        "nn/test_fp8.py",
        "nn/test_written_pattern.py",
        "nn/test_distributed.py",
    ],
    "ragged": ["ragged/test_api.py", "ragged/test_triton.py"],
    "ragged/op": ["ragged/test_api.py", "ragged/test_triton.py", "ragged/test_tuning.py"],
    "ragged/api": [
        "ragged/test_triton.py",
        "attention/test_bias.py",
        "fp8/test_attention.py",
    ],
    "select_keys": ["select_keys/test_api.py", "select_keys/test_choose.py"],
    "select_keys/choose": ["select_keys/test_choose.py", "select_keys/test_triton.py"],
    "select_keys/op": ["select_keys/test_api.py", "select_keys/test_triton.py"],
    "sparse_attention": [
        "sparse_attention/test_api.py",
        "sparse_attention/eager/test_eager.py",
    ],
    "sparse_attention/triton": [
        "sparse_attention/triton/test_forward.py",
        "sparse_attention/triton/test_backward.py",
    ],
    "sparsek": ["sparsek/test_api.py", "sparsek/test_triton.py", "sparsek/test_cache.py"],
}


_CRASH = "process ended"
_MARK = "\x1e"
# Names of tests may hold anything, so that they cannot be told from the rest of a printed summary.
_PYTEST = """
import os, sys
import pytest

class Failures:
    def pytest_runtest_logreport(self, report):
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report):
        if report.failed:
            os.write(1, f"\\n\x1e{report.nodeid}\\n".encode())

sys.exit(pytest.main([*sys.argv[1:], "--capture=sys"], plugins=[Failures()]))
"""


class Ended(NamedTuple):
    """How a run of pytest ended: its status, the tests that failed, all that it printed."""

    code: int
    failed: list[str]
    output: str


class Site(NamedTuple):
    """A mutant of a file below the package."""

    path: str
    mutant: Mutant

    @property
    def name(self) -> str:
        """What the file of answers calls it."""
        mutant = self.mutant
        return f"{self.path}:{mutant.start}-{mutant.end} {mutant.operator}: {mutant.put}"


def all_sites(root: pathlib.Path = REPOSITORY) -> list[Site]:
    """Every mutant of every target, in one order."""
    package = root / SOURCE
    paths = {path for pattern in TARGETS for path in package.glob(pattern)}
    return [
        Site(path.relative_to(package).as_posix(), mutant)
        for path in sorted(paths)
        if path.name not in NOT_TARGETS
        for mutant in mutants_of(path.read_text())
    ]


def sample(sites: list[Site], seed: int, count: int) -> list[Site]:
    """Draw `count` mutants, of each operator in turn.

    Two fifths of all mutants swap arguments, which most tests notice: drawn all alike, they would
    hide what happens to the others.
    """
    draw = random.Random(seed)
    by_operator: dict[str, list[Site]] = {}
    for site in sites:
        by_operator.setdefault(site.mutant.operator, []).append(site)
    for same in by_operator.values():
        draw.shuffle(same)
    turns = itertools.zip_longest(*(by_operator[name] for name in sorted(by_operator)))
    return [site for turn in turns for site in turn if site is not None][:count]


def tests_for(path: str, root: pathlib.Path = REPOSITORY) -> list[str]:
    """The tests that are run for a file of the package.

    Its mirror first, then the fallbacks, then what else in the mirror of its folder imports it.
    """
    stem = pathlib.PurePosixPath(path).with_suffix("")
    mirrored = sorted((root / "tests" / stem.parent).glob(f"test_{stem.name}*.py"))
    found = [p.relative_to(root).as_posix() for p in mirrored if not p.stem.endswith("_gpu")]
    entry = max((e for e in FALLBACKS if str(stem).startswith(e)), key=len, default=None)
    for name in FALLBACKS[entry] if entry else ():
        found.append(f"tests/{name}")
    module = ".".join(("blackwell_sparsek", *stem.parts))
    folder, *_ = stem.parts
    found += [test for test, modules in _imports(folder, root).items() if module in modules]
    return list(dict.fromkeys(found))


@functools.cache
def _imports(folder: str, root: pathlib.Path) -> dict[str, set[str]]:
    """What each test of a folder may import by full names, but for tests on a GPU or of Hopper."""
    found = {}
    for path in sorted((root / "tests" / folder).rglob("test_*.py")):
        if path.stem.endswith("_gpu") or path.parent.name == "sm90":
            continue
        names = found[path.relative_to(root).as_posix()] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.update((node.module, *(f"{node.module}.{x.name}" for x in node.names)))
    return found


def diff_of(source: str, mutant: Mutant) -> list[str]:
    """The lines that go and the lines that come, without indentation."""
    lines = source.splitlines(), apply(source, mutant).splitlines()
    changed = [line for line in difflib.ndiff(*lines) if line[0] in "-+"]
    return [f"{line[0]} {line[2:].strip()}" for line in changed]


def equivalents(path: pathlib.Path = EQUIVALENTS) -> set[tuple[str, ...]]:
    """Mutants that nobody can tell from the original: (file, the lines of the diff)."""
    text = "\n".join(x for x in path.read_text().splitlines() if not x.startswith("#"))
    known = set()
    for entry in filter(None, map(str.strip, text.split("\n\n"))):
        name, *lines = entry.splitlines()
        diff = [line for line in lines if line[0] in "-+"]
        if not diff or not lines[-1].startswith("why: "):
            raise SystemExit(f"{path}: {name}: expected lines of a diff, then `why: ...`")
        known.add((name, *diff))
    return known


class Bench:
    """A copy of the repository in which one file at a time is broken."""

    def __init__(self, root: pathlib.Path, timeout: float) -> None:
        self.timeout = timeout
        self._temporary = tempfile.TemporaryDirectory(prefix="mutants-")
        self.copy = pathlib.Path(self._temporary.name)
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (root / name).is_file():
                (self.copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, self.copy / name)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def digest(self, path: str) -> str:
        """Of the file and of the tests that are run for it."""
        names = [f"{SOURCE}/{path}", *tests_for(path, self.copy)]
        text = b"\0".join((self.copy / name).read_bytes() for name in names)
        return hashlib.sha256(text).hexdigest()[:16]

    def run(self, site: Site) -> dict[str, Any]:
        """Plant a fault, run the tests, take the fault out: what they said."""
        file = self.copy / SOURCE / site.path
        original = file.read_text()
        answer = {
            "mutant": site.name,
            "digest": self.digest(site.path),
            "place": f"{site.path}:{site.mutant.line}",
            "operator": site.mutant.operator,
            "diff": diff_of(original, site.mutant),
        }
        started = time.monotonic()
        _rewrite(file, apply(original, site.mutant))
        try:
            answer |= self._tested(tests_for(site.path, self.copy))
        finally:
            _rewrite(file, original)
        return answer | {"seconds": round(time.monotonic() - started)}

    def _tested(self, tests: list[str]) -> dict[str, Any]:
        try:
            code, failed, output = self.pytest("-x", *tests, timeout=self.timeout)
        except subprocess.TimeoutExpired:
            return {"outcome": "timeout"}
        if code == 0:
            return {"outcome": "survived"}
        if code < 0:  # a kernel in the interpreter that leaves its memory ends the process
            return {"outcome": "killed", "by": f"{_CRASH} by signal {-code}"}
        # 1: a test failed; 2: a file could not be collected; 4: not even conftest.py ran
        if code not in (1, 2, 4):
            raise SystemExit(f"pytest ended with {code}:\n{output[-3000:]}")
        return {"outcome": "killed", "by": failed[0] if failed else tests[0]}

    def pytest(self, *arguments: str, timeout: float | None = None) -> Ended:
        """Run pytest in the copy; raises TimeoutExpired."""
        paths = [str(self.copy / "src"), os.environ.get("PYTHONPATH", "")]
        marks = "not gpu and not exhaustive"
        process = subprocess.Popen(
            [sys.executable, "-c", _PYTEST, "-q", "--tb=short", "-m", marks, *arguments],
            cwd=self.copy,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:  # also Ctrl-C: tests start processes of their own
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        failed = [line[1:] for line in output.split("\n") if line.startswith(_MARK)]
        return Ended(process.returncode, failed, output)

    def failing_unbroken(self, tests: list[str]) -> set[str]:
        """Those of the tests that fail without any fault."""
        broken = set()
        whole = sorted({test for test in tests if "::" not in test})
        single = sorted({test for test in tests if "::" in test})
        for arguments in (["--collect-only", *whole] if whole else [], single):
            if not arguments:
                continue
            code, failed, output = self.pytest(*arguments)
            if code not in (0, 1, 2):  # nothing ran, so nothing is confirmed
                raise SystemExit(f"pytest ended with {code}:\n{output[-3000:]}")
            broken |= set(failed)
        return broken


def _rewrite(file: pathlib.Path, text: str) -> None:
    """Write a source file, and drop its bytecode, which is only told apart by second and size."""
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def read_answers(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The answers of earlier runs, by mutant; a line that was cut off is dropped."""
    answers = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        answers[answer["mutant"]] = answer
    return answers


def interval(killed: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: how much the sample leaves open."""
    if not of:
        return 0.0, 1.0
    z, share = 1.96, killed / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return middle - half, middle + half


def report(answers: list[dict[str, Any]], sites: int) -> str:
    """What was found, survivors with their diffs first."""
    by = {
        outcome: [answer for answer in answers if answer["outcome"] == outcome]
        for outcome in ("survived", "timeout", "unconfirmed", "equivalent", "killed")
    }
    lines = []
    for outcome in ("survived", "timeout", "unconfirmed"):
        for answer in sorted(by[outcome], key=lambda answer: answer["place"]):
            killer = f" ({answer['by']} fails without it too)" if outcome == "unconfirmed" else ""
            lines += [f"{outcome}: {answer['place']}: {answer['operator']}{killer}"]
            lines += [f"    {line}" for line in answer["diff"]]
    killed, judged = len(by["killed"]), len(by["killed"]) + len(by["survived"])
    low, high = interval(killed, judged)
    lines.append(
        f"{len(answers)} of {sites} mutants sampled: {killed} killed, {len(by['survived'])} "
        f"survived, {len(by['timeout'])} timed out, {len(by['unconfirmed'])} unconfirmed, "
        f"{len(by['equivalent'])} equivalent"
    )
    if judged:
        lines.append(
            f"killed {killed / judged:.1%} of those that were killed or survived "
            f"(95 % interval {low:.1%} to {high:.1%})"
        )
    return "\n".join(lines)


def run_sample(
    sites: list[Site], chosen: list[Site], out: pathlib.Path, bench: Bench
) -> tuple[list[dict[str, Any]], str]:
    """Run what has no answer yet, confirm the kills, and report."""
    known, earlier = equivalents(), read_answers(out)
    answers = []
    for number, site in enumerate(chosen, 1):
        source = (bench.copy / SOURCE / site.path).read_text()
        answer = earlier.get(site.name)
        if (site.path, *diff_of(source, site.mutant)) in known:
            place, operator = f"{site.path}:{site.mutant.line}", site.mutant.operator
            answer = {"outcome": "equivalent", "place": place, "operator": operator}
        elif answer is None or answer["digest"] != bench.digest(site.path):
            answer = bench.run(site)
            with out.open("a") as file:
                file.write(json.dumps(answer) + "\n")
        answers.append(answer)
        took = f" ({answer['seconds']} s)" if "seconds" in answer else ""
        said = f"{answer['outcome']} {answer['place']} {answer['operator']}{took}"
        print(f"[{number}/{len(chosen)}] {said}", flush=True)
    killers = [answer["by"] for answer in answers if answer["outcome"] == "killed"]
    broken = bench.failing_unbroken([by for by in killers if not by.startswith(_CRASH)])
    for answer in answers:
        if answer["outcome"] == "killed" and answer["by"] in broken:
            answer["outcome"] = "unconfirmed"
    return answers, report(answers, len(sites))


def main() -> int:
    """Run a sample; 1 when a mutant survived that is not known to be equivalent."""
    parser = argparse.ArgumentParser(
        prog="mutants",
        description="Plant small faults in the package and see whether the tests notice.",
    )
    parser.add_argument("--seed", type=int, default=0, help="which sample (default 0)")
    parser.add_argument("--count", type=int, default=60, help="how many mutants (default 60)")
    parser.add_argument("--only", default="", help="only files whose path has this in it")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one mutant")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("mutants.jsonl"))
    args = parser.parse_args()
    # ended from outside, it still ends its tests and removes its copy
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sites = [site for site in all_sites() if args.only in site.path]
    chosen = sample(sites, args.seed, args.count)
    print(f"{len(chosen)} of {len(sites)} mutants, seed {args.seed}; answers in {args.out}")
    with Bench(REPOSITORY, args.timeout) as bench:
        answers, text = run_sample(sites, chosen, args.out, bench)
    print(text)
    return int(any(answer["outcome"] in ("survived", "unconfirmed") for answer in answers))


if __name__ == "__main__":
    sys.exit(main())
