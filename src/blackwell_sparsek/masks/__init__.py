"""Which keys a query sees: bands, block masks, patterns, and the kernels that build them."""
