"""Oracles: plain, slow, fp64-capable PyTorch that defines what every operation computes."""
