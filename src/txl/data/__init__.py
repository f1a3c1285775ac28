"""Preparation of raw text, and the contiguous lanes of token ids that training reads."""
