"""Modules of one command each, with `add_parser(commands)` and the function that it runs.

The modules import what is heavy (torch, matplotlib) inside their functions, so that `txl --help` is quick.
"""
