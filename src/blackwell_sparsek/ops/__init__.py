"""Operators `bsk::*`: schemas, fakes, autograd, dispatch."""
