"""Choosing: a token from a row of logits, exactly and keyed: penalties, filters, noise. torch, no model.

Whoever runs the model chooses with it: our engine's target, a drafter that ranks as the target will choose, and our
half inside somebody else's engine. So it stands below the engine and imports nothing of it.

R rows with logits · V vocabulary · K candidates
"""
