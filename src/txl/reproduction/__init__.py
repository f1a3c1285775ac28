"""The paper's tables and figures, run again: definitions, scales, measurements, and the judgement of its claims."""
