"""Portable Triton kernels of attention, sm_80 and newer."""
