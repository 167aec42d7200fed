"""Whether drafting pays, how many nodes to draft and how long to wait: measured beliefs and the decisions that follow.
Pure."""
