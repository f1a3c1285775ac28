"""Commands of the laboratory, found by `txl.cli` through the entry-point group `txl.commands`.

As in `txl.commands`, heavy packages are imported inside functions, so that `txl --help` is quick.
"""

COMMANDS = ("txl_lab.commands.reproduce", "txl_lab.commands.bench")
