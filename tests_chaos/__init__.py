"""Random faults under random traffic, and a checker of all that was answered (``make test-chaos``)."""
