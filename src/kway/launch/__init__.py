"""Who starts the ranks of a job, and where a process stands among them."""
