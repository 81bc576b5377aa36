"""One bounded reader for each kind of outside input, with typed errors; free of torch."""
