"""Training: the loop, its optimisers and schedules, and checkpoints from which it goes on exactly."""
