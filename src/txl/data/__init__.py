"""From raw text to contiguous lanes of token ids."""
