"""Runs kernels for Hopper on a CPU: an emulator of the PTX that Triton and Gluon make."""
