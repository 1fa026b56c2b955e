"""The suites of `bsk bench`, by name, and groups of them.

A module holds the problem (its inputs, its FLOPs and the check of results), the peers that compute
it, and the suites that combine both. Attention has its problem and its peers in two more files.
"""

from ..case import Suite
from . import (
    attention,
    bsr_training,
    decode,
    distributed,
    first_call,
    fp8,
    gated,
    gradients,
    host,
    jax_attention,
    matmul,
    mla,
    new_sizes,
    selection,
    serving,
    sparse_attention,
)

_MODULES = (
    *(matmul, bsr_training, attention, gradients, decode, serving, mla),
    *(
        fp8,
        sparse_attention,
        selection,
        gated,
        host,
        new_sizes,
        distributed,
        jax_attention,
        first_call,
    ),
)
SUITES: dict[str, Suite] = {suite.name: suite for module in _MODULES for suite in module.SUITES}
GROUPS = {
    **{
        group: [name for name in SUITES if name.startswith(f"{group}_")]
        for group in ("matmul", "attention")
    },
    # the original goals of the project
    "founding": ["matmul_founding", "attention_small", "attention_window"],
    "quick": ["matmul_founding", "attention_dense", "attention_window", "block_sparse", "host"],
    "all": list(SUITES),
}
