"""What this machine has: CPUs, GPUs, how they reach each other, and which device set a user named."""
