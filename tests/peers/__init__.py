"""Test suites of other projects, run with this package in place of what they test."""
