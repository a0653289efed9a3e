"""Which of several ways to take the same step is fastest here, by measurement. Candidates are data."""
