"""Tools that tests of kernels lean on: error budget, poison, guards, offline compiler."""
