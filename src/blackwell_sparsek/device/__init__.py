"""Device functions: `@triton.jit` building blocks that every kernel is composed of."""
