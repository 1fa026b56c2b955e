"""Benchmarks: what runs here, against what, and how long it takes."""
