"""Text generation: one stream or many, token by token."""
