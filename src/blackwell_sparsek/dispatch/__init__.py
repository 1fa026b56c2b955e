"""Which implementation of an operator runs, why not the others, and operators themselves."""
