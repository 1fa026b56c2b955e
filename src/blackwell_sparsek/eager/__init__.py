"""Plain-PyTorch implementations whose work follows the kept blocks; the default on CPU."""
