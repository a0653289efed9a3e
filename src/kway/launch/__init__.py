"""Who starts the ranks, and where a process stands among them. The only room that reads rank variables."""
