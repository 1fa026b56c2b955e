"""Attention whose keys have a gate that follows from a score of each key and a threshold."""
