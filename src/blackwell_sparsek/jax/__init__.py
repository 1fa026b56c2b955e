"""Block-sparse products and attention for JAX: functions of `jax.Array` with gradients.

Import it by name, `import blackwell_sparsek.jax as bsk_jax`; torch is not imported. Matrices and
masks are pytrees, made on the host from NumPy, JAX or torch arrays. See docs/jax.md.
"""

# isort: off
from .version import MIN_JAX as MIN_JAX

# isort: on
from .attention import attention
from .block_mask import BlockMask
from .bsr import BSRMatrix
from .choice import explain
from .decode import attention_decode
from .matmul import matmul, sddmm

__all__ = [
    "BSRMatrix",
    "BlockMask",
    "attention",
    "attention_decode",
    "explain",
    "matmul",
    "sddmm",
]
