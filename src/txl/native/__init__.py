"""Code for the processor at hand: compiled when it is first needed, kept in the user's cache, replaced by PyTorch's."""
