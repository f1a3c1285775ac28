"""`python -m txl` is the command `txl`, for torchrun too."""

from __future__ import annotations

import os
import sys

from txl.cli import main

if __name__ == "__main__":
    code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # gloo's threads do not always survive the interpreter's end, and an abort then would look like a failed run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
