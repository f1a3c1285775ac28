"""Speed, always beside the machine's own matrix-multiplication rate measured in the same run."""
