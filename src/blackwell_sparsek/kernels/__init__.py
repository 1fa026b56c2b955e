"""Triton and Gluon entry kernels with their launchers."""
