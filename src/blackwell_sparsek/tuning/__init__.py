"""What a choice of implementation or configuration may depend on, and the choices."""
