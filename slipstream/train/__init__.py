"""Making a draft head for a target: generate, train, evaluate, export. ``slipstream train-head`` is its command."""
