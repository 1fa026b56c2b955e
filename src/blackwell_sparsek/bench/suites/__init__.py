"""The suites of `bsk bench`, by name, and groups of them."""

from . import attention, matmul

SUITES = {suite.name: suite for suite in (*matmul.SUITES, *attention.SUITES)}
GROUPS = {
    **{
        group: [name for name in SUITES if name.startswith(f"{group}_")]
        for group in ("matmul", "attention")
    },
    # what the project set out to do
    "founding": ["matmul_founding", "attention_small", "attention_window"],
    "quick": ["matmul_founding", "attention_dense", "attention_window"],
    "all": list(SUITES),
}
