"""Algorithms that propose trees, behind one small protocol (``base.Drafter``)."""
