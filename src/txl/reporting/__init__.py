"""What is shown of a run: figures, the report, the summary."""
