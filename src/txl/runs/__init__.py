"""A run on disk: its directory, checkpoints, log and status."""
