"""Checkpoints of the earlier implementations: read safely, converted exactly."""
