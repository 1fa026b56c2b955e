"""Sparse attention in plain PyTorch, with work in proportion to the chosen keys."""
