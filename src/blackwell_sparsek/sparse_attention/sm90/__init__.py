"""Sparse attention on Hopper."""
