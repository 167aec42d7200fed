"""Slipstream beside what one would install instead, and under the load clients of others."""
