"""Code compiled for this processor at first use and kept in the user's cache; where it is missing, PyTorch is used."""
