"""What needs several stages at once: a job brought to its devices, trained, evaluated, proved."""
