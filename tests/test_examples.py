"""The examples run as their docstrings say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_training_in_one_file(story, data_dir):
    sizes = "--steps 60 --batch-size 4 --segment 32 --n-layer 2 --d-model 32 --eval-tokens 2000 --max-tokens 20"
    command = [sys.executable, EXAMPLES / "train.py", "--corpus", story, "--data-dir", data_dir, *sizes.split()]
    done = subprocess.run([*command, "--prompt", "The river"], capture_output=True, text=True, check=True)
    losses = [float(found) for found in re.findall(r"step +\d+: ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] < 8.5  # a uniform model has 8 bits
    measured = re.findall(r"memory +(\d+): ([\d.]+) bits a byte on ([\d,]+) tokens", done.stdout)
    assert [int(mem_len) for mem_len, _, _ in measured] == [0, 32, 64]
    assert len({n_token for _, _, n_token in measured}) == 1
    assert all(float(bits) < losses[0] for _, bits, _ in measured)
    assert done.stdout.split(" tokens of the test split\n")[-1].strip("\n")  # what was generated
