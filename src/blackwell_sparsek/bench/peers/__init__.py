"""Who computes the cases: this package and everybody else that can be imported."""
