"""What a model costs on one device: steps timed by share size, and by layer; bytes; what several devices add."""
