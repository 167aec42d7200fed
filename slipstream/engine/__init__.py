"""One device, one model: batches, KV slots, attention, decoders. No network, no sessions.

Dimension key, used in every shape comment of this package:

B segments, one a session · T query rows (ragged) · N nodes of one tree, root included · M tokens · R rows with logits ·
S slots in the pool · V vocabulary · H hidden · F feature width · L layers · Q, G query / KV heads · D head size
"""
