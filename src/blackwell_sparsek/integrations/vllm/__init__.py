"""A backend for vLLM: its attention layers run on this package.

Installing this package registers the backend as `CUSTOM` in every process of vLLM, through the
entry point group `vllm.general_plugins`; select it with `--attention-backend CUSTOM`. Written
against vLLM 0.33.

Decoding steps and prompts read part of the cache if that is asked for, either or both:

    --additional-config '{"blackwell_sparsek": {"decode_blocks": 128, "prefill_blocks": 256}}'

In layers without a sliding window, each request and KV head then reads the `decode_blocks` blocks
whose keys can matter most to the new token: the first `keep_first` (1), the last `keep_last` (2),
and others by their `summary`, `minmax` or `mean`. With `prefill_blocks`, so does every run of
`prefill_queries` (64) tokens of a prompt, for whichever of its queries a block matters most; the
blocks of its own tokens are always read. Without it prompts are read whole, and then so are the
requests that share a step with one. Summaries take
`2 / block_size` of the memory of the keys, which vLLM does not know of: leave room for them with
`--gpu-memory-utilization`.
"""

BACKEND = "blackwell_sparsek.integrations.vllm.backend.SparseKBackend"


def register() -> None:
    """Make the backend known to vLLM under the name CUSTOM; may be called any number of times."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
