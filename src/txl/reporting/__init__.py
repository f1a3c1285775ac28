"""Figures and pages about runs."""
