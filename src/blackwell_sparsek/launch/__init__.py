"""Launching kernels: compiled variants, workspaces, descriptors, and replay of launches."""
