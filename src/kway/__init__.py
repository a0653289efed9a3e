"""Train a plain PyTorch model on any number of devices: the number changes the time, never the result."""

__version__ = "0.1.0"
