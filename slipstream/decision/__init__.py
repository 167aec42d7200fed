"""Whether drafting pays, how much and how long to wait: beliefs that were measured, and what follows. Pure."""
