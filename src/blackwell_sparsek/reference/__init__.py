"""Oracles: plain, slow, fp64-capable PyTorch that says what every operation means."""
