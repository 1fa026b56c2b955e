"""Portable Triton kernels of block-sparse products."""
