"""Slipstream compared with other systems."""
