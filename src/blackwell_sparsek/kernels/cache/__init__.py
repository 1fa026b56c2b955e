"""Kernels that write and summarise KV caches."""
