"""What this machine does in how long, each figure beside the limit of the hardware. Experiments are data."""
