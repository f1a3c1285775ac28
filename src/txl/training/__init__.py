"""Training: the loop, optimisers, learning rate schedules, and checkpoints from which a run resumes exactly."""
