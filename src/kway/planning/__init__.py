"""Which layout is fastest, and why: candidates as data, priced in named terms, ranked, explained. No I/O, no ranks."""
