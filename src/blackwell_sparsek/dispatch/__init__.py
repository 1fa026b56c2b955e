"""The choice of an operator's implementation, with reasons, and the definition of operators."""
