"""Choosing: a token from a row of logits, exactly and keyed: penalties, filters, noise. torch, no model.

Three callers choose with it: our engine's target, a drafter that predicts the target's choices, and our code inside
another engine (vLLM). So it imports nothing of the engine.

R rows with logits · V vocabulary · K candidates
"""
