"""The public functions: validation, defaults, documentation."""
