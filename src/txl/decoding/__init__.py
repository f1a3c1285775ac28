"""Tokens one by one, for many streams at once, in constant memory."""
