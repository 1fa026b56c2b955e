"""SparseK: the weights of about k entries of each row, and their thresholds."""
