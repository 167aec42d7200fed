"""The command line, and the code that starts services on one machine."""
