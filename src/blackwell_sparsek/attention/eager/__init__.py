"""Attention in plain PyTorch, with work proportional to what is visible."""
