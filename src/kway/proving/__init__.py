"""The proof that k devices give what one device gives."""
