"""Choosing keys for each query token by scores."""
