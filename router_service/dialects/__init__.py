"""What clients speak: the fields of their requests, how answers and errors are written."""
