"""Tools for testing kernels: error budget, poison, guards, offline compiler."""
