"""Clients of others, unchanged, against a server that is started for them: ``make conformance``.

A model of 135M parameters answers nonsense, so what is judged is the protocol: statuses, shapes, streams, objects that
a grammar forces. Each client is a program in ``programs``, run by an interpreter with that client's own packages.
"""
