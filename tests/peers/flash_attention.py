"""FlashAttention's own test files, run through the flash-attn front end of this package.

`python -m tests.peers.flash_attention CHECKOUT [--version 2] [--sample 500]`, where CHECKOUT is a
clone of github.com/Dao-AILab/flash-attention; needs einops. Its tests import `flash_attn` (2) or
`flash_attn_interface` (3): here these names are modules that hand over to
`blackwell_sparsek.integrations.flash_attn`. They are too many to run all, so a sample is drawn. A
test that calls something the front end refuses by name counts as refused, with the message;
everything else must pass. Without a GPU the tests run on the CPU, slowly: `--longest 128` keeps to
short sequences.
"""

import argparse
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# What each version's test file needs of the checkout, and under which name.
FILES = {
    2: {
        "tests/test_flash_attn.py": "test_file.py",
        "flash_attn/bert_padding.py": "flash_attn/bert_padding.py",
    },
    3: {
        "hopper/test_flash_attn.py": "test_file.py",
        "hopper/test_util.py": "test_util.py",
        "hopper/padding.py": "padding.py",
    },
}
FRONT_END = "from blackwell_sparsek.integrations.flash_attn import *\n"
PACKED = """
def flash_attn_qkvpacked_func(qkv, *args, **options):
    return flash_attn_func(*qkv.unbind(2), *args, **options)
def flash_attn_kvpacked_func(q, kv, *args, **options):
    return flash_attn_func(q, *kv.unbind(2), *args, **options)
def flash_attn_varlen_qkvpacked_func(qkv, offsets, longest, *args, **options):
    sizes = (offsets, offsets, longest, longest)
    return flash_attn_varlen_func(*qkv.unbind(1), *sizes, *args, **options)
def flash_attn_varlen_kvpacked_func(q, kv, *args, **options):
    return flash_attn_varlen_func(q, *kv.unbind(1), *args, **options)
"""
# The reference of the tests rotates with this; the front end has a kernel of its own.
ROTARY = """
import torch
from blackwell_sparsek.kv_cache.slots import rotated
def apply_rotary_emb(x, cos, sin, interleaved=False, seqlen_offsets=0):
    batch, length = x.shape[:2]
    first = torch.as_tensor(seqlen_offsets, device=x.device).expand(batch)
    positions = (first[:, None] + torch.arange(length, device=x.device)).flatten()
    positions = positions.clamp(max=cos.shape[0] - 1)
    return rotated(x.flatten(0, 1), cos, sin, positions, interleaved).view(x.shape)
"""
MODULES = {
    "flash_attn/__init__.py": FRONT_END + PACKED,
    "flash_attn/layers/__init__.py": "",
    "flash_attn/layers/rotary.py": ROTARY,
    "flash_attn/flash_attn_interface.py": "USE_TRITON_ROCM = False\n_get_block_size_n = None\n",
    "flash_attn_interface.py": FRONT_END
    + "flash_attn_combine = None\nget_scheduler_metadata = lambda *args, **options: None\n",
}
# Tests of functions that the front end does not offer.
OTHERS = ("combine", "compatibility", "generator")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Draw the sample."""
    sample, seed, longest = map(int, os.environ["FLASH_ATTENTION_SAMPLE"].split())

    def fits(item: Any) -> bool:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        sizes = (params.get(name, 0) for name in ("seqlen", "seqlen_q", "seqlen_k"))
        return max(sizes) <= longest and not any(name in item.name for name in OTHERS)

    kept = [item for item in items if fits(item)]
    items[:] = random.Random(seed).sample(kept, min(sample, len(kept)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Tests that end in a refusal by name are skipped, with its message."""
    from blackwell_sparsek.core.errors import BskError

    outcome = yield
    report = outcome.get_result()
    if call.excinfo is not None and call.excinfo.errisinstance(BskError):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"refused: {str(call.excinfo.value)[:160]}")


def main() -> int:
    """Lay out the modules and the test file in a folder, and run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--version", type=int, choices=sorted(FILES), default=2)
    parser.add_argument("--sample", type=int, default=500, help="tests to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=10**6, help="longest sequence of a test")
    args, rest = parser.parse_known_args()
    import torch

    with tempfile.TemporaryDirectory() as folder:
        for name, text in MODULES.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for source, name in FILES[args.version].items():
            shutil.copy(args.checkout / source, pathlib.Path(folder, name))
        if not torch.cuda.is_available():
            test = pathlib.Path(folder, "test_file.py")
            text = test.read_text().replace('device = "cuda"', 'device = "cpu"')
            test.write_text(text.replace('torch.cuda.get_device_capability("cuda")', "(9, 0)"))
        paths = [folder, str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment["FLASH_ATTENTION_SAMPLE"] = f"{args.sample} {args.seed} {args.longest}"
        command = [sys.executable, "-m", "pytest", "-q", "-rsf", "--tb=short", "-p"]
        command += [__spec__.name if __spec__ else __name__, "-p", "no:cacheprovider"]
        done = subprocess.run([*command, *rest, "test_file.py"], cwd=folder, env=environment)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
