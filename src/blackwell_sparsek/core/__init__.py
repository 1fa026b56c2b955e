"""The lowest layer: errors, checks, environment, versions, architectures, PyTorch state."""
