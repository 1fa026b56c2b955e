"""A backend for SGLang: its attention layers run on this package.

Installing this package registers the backend in every process of SGLang, through the entry point
group `sglang.srt.plugins`; select it with `--attention-backend blackwell_sparsek`. Written against
SGLang 0.5.23; it has run with SGLang's own classes on a CPU, not in an engine.
"""

NAME = "blackwell_sparsek"


def register() -> None:
    """Make the backend known to SGLang under its name; may be called any number of times."""
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(_create)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])


def _create(runner: object) -> object:
    from .backend import SparseKAttnBackend

    return SparseKAttnBackend(runner)
