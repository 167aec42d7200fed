"""Slipstream: speculative decoding taken apart into a draft service, a target service and a router."""

__version__ = "0.1.0"
