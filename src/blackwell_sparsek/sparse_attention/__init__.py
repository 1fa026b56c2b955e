"""Attention over keys that each query token has chosen."""
