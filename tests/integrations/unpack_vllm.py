"""Unpack vLLM without its compiled parts, so that its classes can be imported without a GPU.

    python tests/integrations/unpack_vllm.py FOLDER

downloads the wheel of the release that the backend is written against, and the packages that its
attention classes import. Nothing is installed: put FOLDER on PYTHONPATH.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASE = "vllm==0.33.0"
# With their own requirements, and without: torch and what needs a GPU stay out.
PACKAGES = ("aiohttp", "fastapi", "huggingface_hub<2", "mistral_common", "openai", "pydantic")
ALONE = (
    "blake3", "cachetools", "cbor2", "cloudpickle", "compressed-tensors==0.17.0", "depyf==0.20.0",
    "einops", "gguf", "msgspec", "oss-harmony", "partial-json-parser", "prometheus_client",
    "psutil", "py-cpuinfo", "pybase64", "python-json-logger", "pyzmq", "regex", "safetensors",
    "setproctitle", "tokenizers", "transformers<5.20", "tqdm",
)  # fmt: skip


def pip(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *args], check=True)


def main() -> None:
    folder = Path(sys.argv[1])
    if (folder / "vllm").is_dir():
        return
    binary = ("--only-binary", ":all:")
    pip("install", "--target", str(folder), *binary, *PACKAGES)
    pip("install", "--target", str(folder), *binary, "--no-deps", *ALONE)
    with tempfile.TemporaryDirectory() as downloads:
        platform = ("--platform", "manylinux_2_28_x86_64")
        pip("download", "--no-deps", *binary, *platform, "-d", downloads, RELEASE)
        for wheel in Path(downloads).glob("vllm-*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if not name.endswith(".so")]
                archive.extractall(folder, names)


if __name__ == "__main__":
    main()
