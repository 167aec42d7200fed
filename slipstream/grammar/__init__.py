"""Grammars compiled, and which tokens they allow at every node of a tree. llguidance, no torch.

The router compiles to refuse, the target to answer.

N nodes of a tree · V vocabulary · W = ceil(V / 32) words of a mask
"""
