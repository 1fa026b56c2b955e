"""Bridges to other libraries. Each is imported only when asked for."""
