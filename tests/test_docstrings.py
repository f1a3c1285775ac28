"""Every docstring begins with a verb or a noun phrase, not in the middle of a sentence."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
_UNCLEAR = re.compile(r'^\s*"""(What|Whether|How|Of|Those|That|Itself)\b', re.MULTILINE)


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    found = [
        f"{path.relative_to(SOURCE)}: {match[0].strip()}"
        for path in files
        for match in _UNCLEAR.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
