"""Text: templates, tokens, stop strings, and what a model marks in its answer."""
