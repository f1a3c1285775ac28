"""Bodies and answers as JSON: large ones are read and written in slices, and bodies that take long are refused."""

from __future__ import annotations

import json
import random
import re

import pytest

from txl.serving import requests
from txl.serving.requests import ApiError, dumps, json_response, parsed

KEY = "k"


def value(chance: random.Random, depth: int = 0):
    kind = chance.randrange(8)
    if kind == 0:
        return "".join(chance.choice('a"\\\n,[]{}1 \u20ac\u00e9\U0001f600') for _ in range(chance.randrange(300)))
    if kind == 1:
        return [chance.randrange(100_000) for _ in range(chance.randrange(300))]
    if kind == 2 and depth < 4:
        return {f'{KEY}{number}"\\': value(chance, depth + 1) for number in range(chance.randrange(4))}
    if kind == 3 and depth < 4:
        return [value(chance, depth + 1) for _ in range(chance.randrange(5))]
    return chance.choice([1, -2, 1.5e3, True, None, "x", "[1,2,3,4,5,6,7,8,9,10,11]", "NaN", []])


@pytest.fixture
def tiny_slices(monkeypatch):
    monkeypatch.setattr(requests, "AT_ONCE", 100)
    monkeypatch.setattr(requests, "_LISTED", 3)
    monkeypatch.setattr(requests, "_IDS", re.compile(r"\[\s*[0-9][0-9,\s]{10,}\]", re.ASCII))


def test_slices_make_no_difference(tiny_slices):
    chance = random.Random(1)
    for _ in range(300):
        given = {"a": value(chance), "b": value(chance), "c": value(chance)}
        indent, separators = chance.choice([None, 2]), chance.choice([None, (",", ":")])
        body = json.dumps(given, ensure_ascii=chance.random() < 0.5, indent=indent, separators=separators).encode()
        assert parsed(body) == given
        whole = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
        assert json_response(given).body == whole.encode()
        assert dumps(given) == json.dumps(given, separators=(",", ":"))
        damaged = bytearray(body)
        damaged[chance.randrange(len(body))] = chance.choice(b'",[]\\1 n{}:')
        try:
            expected = json.loads(damaged)
            json.dumps(expected, ensure_ascii=False).encode()  # raises for half a surrogate pair, also a ValueError
        except ValueError:
            expected = None
        if isinstance(expected, dict):
            assert parsed(bytes(damaged)) == expected
        else:
            with pytest.raises(ApiError):
                parsed(bytes(damaged))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_stands_for_taken_parts_is_refused_in_a_body(number):
    body = f'{{"tokens": [{"1," * 50_000}1], "n": {number}}}'.encode()
    with pytest.raises(ApiError, match="no numbers of JSON"):
        parsed(body)


@pytest.mark.parametrize("end", [",]", ",,1]", ",01]", ",1 2]", ", ]"])
@pytest.mark.parametrize("length", [100, 200_000])
def test_lists_that_are_no_json(end, length):
    body = f'{{"tokens": [{"1," * length}1{end}, "more": "{"x" * 100_000}"}}'.encode()
    with pytest.raises(ApiError, match="not JSON"):
        parsed(body)


def test_large_lists_and_strings():
    text = 'one \\ "two"\n\U0001f600 ' * 20_000
    given = {"prompt": [list(range(100_000)), list(range(5000))], "stop": text, "tokens": list(range(300_000))}
    for ascii_only in (True, False):
        assert parsed(json.dumps(given, ensure_ascii=ascii_only).encode()) == given
    assert dumps(given) == json.dumps(given, separators=(",", ":"))


def repeated(part: str) -> str:
    return part * (1_000_000 // len(part))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f'{{"prompt": [{repeated("[],")}1]}}', "outside of strings"),
        ("[" * 1_000_000, "outside of strings"),
        ("".join(f'{{"{number}":' for number in range(100_000)), "outside of strings"),
        (f'{{"prompt": [{repeated(chr(34) * 2 + ",")}1]}}', "outside of strings"),
        (f'{{"prompt": [{repeated("{},")}1]}}', "outside of strings"),
        (f'{{"prompt": [{repeated("1.5,")}1]}}', "outside of strings"),
        (f'{{"prompt": [{repeated("-1,")}1]}}', "outside of strings"),
        (f'{{"prompt": [{repeated("true,")}1]}}', "outside of strings"),
        (f'{{"prompt":{" " * 1_000_000}"a"}}', "outside of strings"),
        (f'{{"n": {"9" * 1_000_000}}}', "outside of strings"),
    ],
)
def test_bodies_that_take_long_are_refused_before_they_are_read(body, reason, monkeypatch):
    monkeypatch.setattr(requests.json, "loads", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ApiError, match=reason) as refused:
        parsed(body.encode())
    assert refused.value.status == 400
    assert len(refused.value.message) < 200


def test_half_a_surrogate_pair_is_refused_by_field():
    with pytest.raises(ApiError) as refused:
        parsed(('{"prompt": 1, "stop": ["' + "a" * 100_000 + '\\ud83d"]}').encode())
    assert (refused.value.status, refused.value.param) == (400, "stop")
