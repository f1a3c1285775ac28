"""Evaluation: losses, perplexity and surprisal of trained models, one module for each way of measuring."""
