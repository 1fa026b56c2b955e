"""Calls: tensors and options, checked once and passed on as one object."""
