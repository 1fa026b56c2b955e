"""Block-sparse matrices: the format, its pattern, conversions, validation."""
