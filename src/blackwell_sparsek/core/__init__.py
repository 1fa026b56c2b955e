"""Ground floor: errors, checks, environment, versions, architectures, launch helpers."""
