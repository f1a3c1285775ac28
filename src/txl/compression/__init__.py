"""Lossless compression with a language model's probabilities: a fixed model, one that adapts, or a new one."""
