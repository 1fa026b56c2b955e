"""fp32 is judged as fp32: on a GPU jax multiplies in TF32 unless it is told otherwise."""

import pytest

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

jax.config.update("jax_default_matmul_precision", "highest")
