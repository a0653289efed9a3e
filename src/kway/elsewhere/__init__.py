"""Machines that are not here: estimated from their descriptions, in the form of what is measured here."""
