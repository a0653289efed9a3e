"""One file an experiment, with an ``EXPERIMENT``."""
