"""Commands of `txl`: each module has `add_parser(commands)` and the functions that run its commands.

The modules import heavy packages (torch, matplotlib) inside their functions, so that `txl --help` is quick.
"""
