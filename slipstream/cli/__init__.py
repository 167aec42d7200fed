"""The command line, and the roots that put services together."""
