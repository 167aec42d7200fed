"""A few questions of our own, for measurements when nobody gives any: everyday, of several kinds, easy to answer.

It knows nothing about models.
"""

from __future__ import annotations

QUESTIONS = (
    "Why does bread rise when it is baked?",
    "Write a Python function that counts the words of a text.",
    "A box holds 12 pens and costs 6 euros. What do 30 pens cost?",
    "Write a short letter to a neighbour who watered the plants.",
    "Name three ways to travel from one city to another, and what speaks for each.",
    "Explain to a child how the moon shines.",
)
