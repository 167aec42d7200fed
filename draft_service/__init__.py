"""The draft service: it receives commits of targets, grows draft trees, and sends growth."""
