"""Unpack SGLang without its compiled parts, so that its classes can be imported without a GPU.

    python tests/integrations/unpack_sglang.py FOLDER

downloads the wheel of the release that the backend is written against, and the packages that its
attention classes import. Nothing is installed: put FOLDER on PYTHONPATH.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

from unpack_vllm import ALONE, PACKAGES, pip

RELEASE = "sglang==0.5.23"
# What SGLang imports besides what vLLM does.
FURTHER = (
    "apache-tvm-ffi", "dill", "ipython", "loguru", "orjson", "pillow", "sentencepiece", "traitlets",
)  # fmt: skip
# SGLang imports names of torchvision that attention never calls, and the package itself must match
# the installed torch to the patch release.
STAND_IN = '''"""Names of torchvision, without what is behind them."""

import sys
import types

__version__ = "0.28.0"


class _Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


_V2 = "transforms.v2"
for _name in ("io", "transforms", "transforms.functional", _V2, _V2 + ".functional"):
    _made = sys.modules["torchvision." + _name] = _Module("torchvision." + _name)
    _made.__path__ = []
    if "." not in _name:
        globals()[_name] = _made
'''
METADATA = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"


def main() -> None:
    folder = Path(sys.argv[1])
    if (folder / "sglang").is_dir():
        return
    binary = ("--only-binary", ":all:")
    pip("install", "--target", str(folder), *binary, *PACKAGES)
    pip("install", "--target", str(folder), *binary, "--no-deps", *ALONE, *FURTHER)
    for name, text in (
        ("torchvision/__init__.py", STAND_IN),
        ("torchvision-0.28.0.dist-info/METADATA", METADATA),
    ):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with tempfile.TemporaryDirectory() as downloads:
        pip("download", "--no-deps", *binary, "-d", downloads, RELEASE)
        for wheel in Path(downloads).glob("sglang-*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                members = [name for name in archive.namelist() if not name.endswith(".so")]
                archive.extractall(folder, members)


if __name__ == "__main__":
    main()
