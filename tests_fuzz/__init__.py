"""Coverage-guided fuzzing of everything that takes bytes from outside (``make fuzz``), and the corpus that it keeps."""
