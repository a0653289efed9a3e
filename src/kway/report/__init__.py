"""Records in, pictures and tables out. No torch."""
