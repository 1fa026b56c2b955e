"""Integrations with other libraries. Each is imported only on request."""

from importlib import import_module
from typing import Any

_BRIDGES = ("flash_attn", "huggingface", "torch_sdpa", "torch_sparse", "vllm", "xformers")


def __getattr__(name: str) -> Any:
    if name in _BRIDGES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
