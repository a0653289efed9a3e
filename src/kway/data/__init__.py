"""Which samples make which batch, how they are read, and where data sets come from."""
