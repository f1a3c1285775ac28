"""Import of checkpoints of earlier implementations, read safely and converted exactly; export of runs."""
