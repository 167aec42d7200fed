"""Grammars compiled, and which tokens they allow at every node of a tree. llguidance, no torch.

The router compiles a grammar to refuse bad ones early, the target to constrain the answer.

N nodes of a tree · V vocabulary · W = ceil(V / 32) words of a mask
"""
