import bz2
import lzma
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

import pytest

from txl.reporting import compression
from txl.reporting.compression import compress, lzma_after


@pytest.fixture(scope="module")
def source() -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:12])


def blocks(text: bytes, size: int):
    return (text[start : start + size] for start in range(0, len(text), size))


@pytest.mark.parametrize("size", [997, 65_536, 10**9])
@pytest.mark.parametrize("limit", [None, 0, 1, 5003, 200_000, 10**9])
def test_sizes_are_those_of_the_whole_text_at_once(source, size, limit):
    found, whole = compress(blocks(source, size), limit), source[:limit]
    assert found.text == len(whole)
    assert found.zlib == len(zlib.compress(whole, level=9))
    assert found.bz2 == len(bz2.compress(whole, 9))
    assert found.lzma == len(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME))


def test_bits_per_byte(source):
    found = compress([source])
    assert found.bits_per_byte("zlib") == 8 * len(zlib.compress(source, level=9)) / len(source)
    assert 0.5 < found.bits_per_byte("lzma") < found.bits_per_byte("zlib") < 8


def test_behind_a_text_lzma_pays_for_what_is_new(source, monkeypatch):
    text = source[-20_000:]
    alone = compress([text]).lzma
    assert lzma_after([], text) == pytest.approx(alone, abs=100)
    assert lzma_after(blocks(source, 997), text) < 0.02 * alone  # it has been there before
    preset = 9 | lzma.PRESET_EXTREME
    grown = len(lzma.compress(source + source[::-1], preset=preset)) - len(lzma.compress(source, preset=preset))
    assert lzma_after(blocks(source, 65_536), source[::-1]) == grown
    # What the dictionary does not reach back to is new.
    monkeypatch.setattr(compression, "_LARGEST_DICTIONARY", 65_536)
    assert lzma_after([text, bytes(60_000)], text) > 0.7 * alone
    assert lzma_after([bytes(60_000), text], text) < 0.02 * alone


def test_reads_no_further_than_the_limit():
    def endless():
        while True:
            yield b"abc" * 1000

    assert compress(endless(), 10_001).text == 10_001


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc to know its own size")
def test_a_short_text_does_not_take_the_memory_of_the_largest_dictionary():
    code = """
import resource
from txl.reporting import compression
from txl.reporting.compression import compress, lzma_after
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 64 * 2**20,) * 2)
print(compress((bytes(2**16) for _ in range(100)), 2**20).text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{2**20}\n", "")
