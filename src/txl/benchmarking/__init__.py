"""Speed, always beside the machine's own matrix-multiplication rate measured in the same run."""

TABLE_9 = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""The paper's slowdowns of a vanilla Transformer by attention length, on one GPU."""
