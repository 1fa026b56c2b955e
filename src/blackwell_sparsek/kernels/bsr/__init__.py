"""Portable Triton kernels of the BSR products, their plans and their configurations."""
