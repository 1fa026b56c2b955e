"""Compile cases, one file for each operation, with its kernels as they are launched."""
