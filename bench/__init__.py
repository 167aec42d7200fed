"""Measurements that a command prints again."""
