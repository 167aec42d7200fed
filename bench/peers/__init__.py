"""Slipstream beside what one would install instead."""
