"""Products of `torch.sparse_bsr` tensors through this package, on request."""

from .routes import enable_torch_sparse, is_enabled

__all__ = ["enable_torch_sparse", "is_enabled"]
