"""Every environment variable the package reads. No other file touches `os.environ`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import InvalidInput
from .messages import quoted

# reference: the fp64 oracle; eager: plain PyTorch on the stored blocks, any device; dense: the
# matrix is densified and multiplied by torch; triton: portable kernels; sm90: kernels for Hopper.
IMPLS = ("auto", "reference", "eager", "dense", "triton", "sm90")


def default_impl() -> str:
    """`BSK_IMPL`: the implementation that calls without an `impl` argument take (default auto)."""
    if _stored("BSK_IMPL") is None:
        return "auto"
    value = os.environ["BSK_IMPL"]
    if value not in IMPLS:
        raise InvalidInput(f"BSK_IMPL is {quoted(value)}; expected one of {', '.join(IMPLS)}")
    return value


def asked_impl() -> object:
    """`BSK_IMPL` as the environment stores it, unchecked: to tell whether it changed."""
    return _stored("BSK_IMPL")


def _stored(name: str) -> object:
    """A variable as the environment stores it, or None.

    Reading `os.environ` decodes the value, which takes longer than everything else that a replayed
    call checks. If the stored form is not accessible, the decoded value is returned.
    """
    if _STORED_NAMES is None:
        return os.environ.get(name)
    return os.environ._data.get(_STORED_NAMES[name])  # type: ignore[attr-defined]


_STORED_NAMES = (
    {name: os.environ.encodekey(name) for name in ("BSK_IMPL", "TRITON_INTERPRET")}
    if hasattr(os.environ, "_data")
    else None
)


def triton_interpreted() -> bool:
    """`TRITON_INTERPRET`: whether Triton runs kernels on the CPU. Triton reads it at import."""
    if _stored("TRITON_INTERPRET") is None:
        return False
    return os.environ["TRITON_INTERPRET"].lower() in ("1", "true", "on", "yes")


def config_dir() -> str | None:
    """`BSK_CONFIG_DIR`: folder of tiles found by `bsk tune`; if unset, built-in tiles are used."""
    return os.environ.get("BSK_CONFIG_DIR") or None


def triton_cache_dir() -> str:
    """Where Triton keeps compiled kernels, which processes of this user load and run."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")


def triton_overrides() -> dict[str, str]:
    """Return the set variables that make Triton load code or tools from elsewhere."""
    names = (
        "TRITON_CACHE_MANAGER",
        "TRITON_REMOTE_CACHE_BACKEND",
        "TRITON_KERNEL_OVERRIDE",
        "TRITON_OVERRIDE_DIR",
        "TRITON_PTXAS_PATH",
        "TRITON_PTXAS_BLACKWELL_PATH",
        "PTXAS_OPTIONS",
        "TRITON_LIBDEVICE_PATH",
        "TRITON_LIBCUDA_PATH",
        "TRITON_CUDACRT_PATH",
        "TRITON_CUDART_PATH",
        # builds the launchers of kernels
        "CC",
    )
    return {name: os.environ[name] for name in names if name in os.environ}


def relevant_variables() -> dict[str, str]:
    """Return the set variables that change what runs or how fast, for reports."""
    prefixes = ("BSK_", "TRITON_", "CUDA_", "PYTORCH_", "OMP_", "MKL_", "NVIDIA_TF32_")
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def environment_for_sanitizer() -> dict[str, str]:
    """The environment of a process under compute-sanitizer, where torch caches no memory.

    Its allocator hands out parts of large blocks, whose bounds no tool knows.
    """
    return {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def environment_for_compiler() -> dict[str, str]:
    """Return the environment for a child process in which Triton compiles, not interprets."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def environment_with_cache(folder: str) -> dict[str, str]:
    """Return the environment for a child process that keeps everything it compiles in `folder`."""
    own = {
        "TRITON_CACHE_DIR": folder,
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": os.path.join(folder, "flash_attention"),
    }
    return environment_for_compiler() | own


@contextmanager
def kept_variable(name: str) -> Iterator[None]:
    """Undo what happens to a variable inside: imports of others may change one."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
