"""The suites of `bsk bench`, by name, and groups of them."""

from . import attention, backward, block_sparse, decode, first_call, host, matmul

_MODULES = (matmul, attention, block_sparse, backward, decode, host, first_call)
SUITES = {suite.name: suite for module in _MODULES for suite in module.SUITES}
GROUPS = {
    **{
        group: [name for name in SUITES if name.startswith(f"{group}_")]
        for group in ("matmul", "attention")
    },
    # what the project set out to do
    "founding": ["matmul_founding", "attention_small", "attention_window"],
    "quick": ["matmul_founding", "attention_dense", "attention_window", "block_sparse", "host"],
    "all": list(SUITES),
}
