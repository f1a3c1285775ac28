"""`python -m txl` is the command `txl`."""

import sys

from txl.cli import main

if __name__ == "__main__":
    sys.exit(main())
