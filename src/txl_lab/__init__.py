"""The laboratory of `txl`: tables and claims of the paper, and speed beside other programs.

It stands above the command line, which finds its commands by an entry point; nothing in `txl` imports it.
"""
