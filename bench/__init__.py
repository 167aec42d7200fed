"""Benchmarks: each is a command that measures and prints its table."""
