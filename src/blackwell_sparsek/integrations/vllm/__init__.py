"""A backend for vLLM: its attention layers run on this package.

Installing this package registers the backend as `CUSTOM` in every process of vLLM, through the
entry point group `vllm.general_plugins`; select it with `--attention-backend CUSTOM`. Written
against vLLM 0.32.
"""

BACKEND = "blackwell_sparsek.integrations.vllm.backend.SparseKBackend"


def register() -> None:
    """Make the backend known to vLLM under the name CUSTOM; may be called any number of times."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
