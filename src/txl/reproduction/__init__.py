"""The paper's tables and figures, run again: what is compared, at which scale, and whether the paper's claims hold."""
