"""Attention of a few queries over a KV cache."""
