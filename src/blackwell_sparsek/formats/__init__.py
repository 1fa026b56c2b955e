"""Data formats: block-sparse matrices, block masks, bands, packed sequences."""
