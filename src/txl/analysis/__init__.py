"""Analysis of trained models: their attention, and the text that they generate."""
