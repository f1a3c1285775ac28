"""Text out of a model: one stream or many, token by token."""
