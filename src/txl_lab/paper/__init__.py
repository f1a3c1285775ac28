"""Reproduction of the paper's tables and figures: definitions, scales, measurements, and judgement of its claims."""
