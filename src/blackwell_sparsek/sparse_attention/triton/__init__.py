"""Portable kernels of sparse attention."""
