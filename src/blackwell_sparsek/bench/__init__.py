"""Benchmarks: run this package and its peers on the same problems, and time them."""
