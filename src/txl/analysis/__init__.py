"""What a trained model does: where its heads look, what each token costs it, what it writes."""
