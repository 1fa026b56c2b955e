"""Attention: dense, banded, block-sparse and packed, with gradients."""
