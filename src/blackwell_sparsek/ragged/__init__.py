"""Packed queries of different lengths over caches, or over packed keys with further options."""
