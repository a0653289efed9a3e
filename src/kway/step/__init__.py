"""One optimizer step over one device's share of the global batch: the arithmetic of "the same result"."""
