"""Choosing: a token from a row of logits, exactly and keyed: penalties, filters, noise. torch, no model.

Three kinds of code use it: our engine's target, drafters, which rank tokens as the target will choose, and our adapters
in other engines. So it is below the engine and imports nothing of it.

R rows with logits · V vocabulary · K candidates
"""
