"""What drafters are worth on questions, and that they change no answer."""
