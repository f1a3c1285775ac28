"""Untrusted files: code in a file never runs, and a damaged file raises only errors of this package."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import random
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interop.test_hub import model_files
from txl import load
from txl.cli import main
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError
from txl.interop import import_run as import_module
from txl.interop.import_run import import_run
from txl.interop.original import _modules, read_weights
from txl.interop.safe_pickle import SafeUnpickler, StandIn, UnsafePickle
from txl.interop.torch_files import read_torch_file
from txl.interop.vocabulary_files import read_vocabulary, vocabulary_of

GOLDEN = Path(__file__).parent / "golden"


def loads(data: bytes) -> object:
    return SafeUnpickler(io.BytesIO(data)).load()


class Calls:
    """An object whose pickle calls a given function with given arguments."""

    def __init__(self, function: Any, *arguments: Any):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def by_name(module: str, name: str, *arguments: Any, protocol: int = 2) -> bytes:
    """Return a pickle that calls a function by name; the function need not exist on this machine."""
    call = f"c{module}\n{name}\n".encode() + pickle.dumps(arguments, protocol=0)[:-1] + b"R."
    return call if protocol == 0 else b"\x80\x02" + call


def mark(tmp_path: Path) -> str:
    return f"touch {tmp_path / 'ran'}"


def programs(tmp_path: Path) -> dict[str, bytes]:
    """Return malicious pickles of the known kinds by name. If a command or code in one runs, the file `ran` appears."""
    command = mark(tmp_path)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    nested = pickle.dumps(Calls(os.system, command))
    chain = (
        b"\x80\x02cbuiltins\ngetattr\n(cbuiltins\n__import__\n(X\x02\x00\x00\x00ostRX\x06\x00\x00\x00systemtR"
        + b"("
        + b"X"
        + struct.pack("<I", len(command))
        + command.encode()
        + b"tR."
    )
    return {
        "os.system": pickle.dumps(Calls(os.system, command)),
        "posix.system": by_name("posix", "system", command),
        "eval": pickle.dumps(Calls(eval, code)),
        "eval, protocol 0": by_name("__builtin__", "eval", code, protocol=0),
        "getattr chain": chain,
        "__import__": by_name("builtins", "__import__", "this"),
        "torch.load inside": by_name("torch.serialization", "load", str(tmp_path / "inner.pt")),
        "pickle inside": by_name("pickle", "loads", nested),
        "numpy of an allowed name": by_name("numpyx", "load", str(tmp_path / "inner.npy")),
        "torch.nn like": by_name("torch.nnx", "load", "x"),
        "attribute of an allowed name": b"\x80\x04\x8c\x0bcollections\x8c\x15OrderedDict.__class__\x93.",
        "INST": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + command.encode() + b"'\no.",
        "extension registry": b"\x80\x02\x82\x01.",
        "BUILD of a class": b"\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.",
        "persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
        "key whose hash overflows the stack": b"\x80\x02})" + b"\x85" * 400_000 + b"Ns.",
        "key whose hash never ends": b"\x80\x02})" + b"2\x86" * 60 + b"Ns.",
        "several such keys": b"\x80\x02}(NN)" + b"2\x86" * 60 + b"Nu.",
        "a dictionary of such a key": b"\x80\x02()" + b"2\x86" * 60 + b"Nd.",
        "an OrderedDict of such a key": b"\x80\x02ccollections\nOrderedDict\n])" + b"2\x86" * 60 + b"N\x86a\x85R.",
        "a set of such an element": b"\x80\x04cbuiltins\nset\n])" + b"2\x86" * 60 + b"a\x85R.",
        "elements added to a set": b"\x80\x04\x8f()" + b"2\x86" * 60 + b"\x90.",
        "a frozenset of such an element": b"\x80\x04()" + b"2\x86" * 60 + b"\x91.",
    }


NAMES = list(programs(Path("x")))


@pytest.mark.parametrize("wrapping", ["bare", "zip", "stream"])
@pytest.mark.parametrize("name", NAMES)
def test_malicious_checkpoints_are_refused_and_nothing_runs(name, wrapping, tmp_path, capsys):
    program = programs(tmp_path)[name]
    path = tmp_path / "model.pt"
    if wrapping == "bare":
        path.write_bytes(program)
    elif wrapping == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model/data.pkl", program)
    else:
        head = b"".join(pickle.dumps(each, 2) for each in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
        path.write_bytes(head + program + pickle.dumps([], 2))
    assert main(["import", str(path), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("txl: error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", NAMES)
def test_malicious_vocabularies_are_refused_and_nothing_runs(name, tmp_path, capsys):
    (tmp_path / "vocab.pkl").write_bytes(programs(tmp_path)[name])
    words = ["import", str(GOLDEN / "plain.pt"), "--out", str(tmp_path / "run")]
    assert main([*words, "--vocabulary", str(tmp_path / "vocab.pkl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_the_programs_of_these_tests_would_run(tmp_path):
    """The tests above prove something only if `pickle.loads` runs these programs."""
    for name in ("os.system", "posix.system", "eval", "getattr chain", "pickle inside", "INST", "OBJ"):
        pickle.loads(programs(tmp_path)[name])
        assert (tmp_path / "ran").exists(), name
        (tmp_path / "ran").unlink()


def test_harmless_pickles_are_read():
    value = {
        "list": [1, 2.5, None, True, "é"],
        "set": {1},
        "bytes": b"ab",
        "ordered": OrderedDict(a=1),
        "n": Counter("aab"),
    }
    for protocol in range(6):
        assert loads(pickle.dumps(value, protocol=protocol)) == {**value, "n": {"a": 2, "b": 1}}


def test_objects_of_known_modules_become_stand_ins():
    program = b"\x80\x02cmem_transformer\nMemTransformerLM\n)\x81}X\x01\x00\x00\x00aK\x05sb."
    value: Any = loads(program)
    assert value.origin == "mem_transformer.MemTransformerLM"
    assert value.attribute("a") == 5
    assert type(value).__mro__[1].__module__ == "txl.interop.safe_pickle"


def storage_lies(
    numel: int,
    actual: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    before: bytes = b"",
    behind: bytes = b"",
) -> bytes:
    """Return torch's zip file of `actual` elements, whose pickle states `numel` elements and a tensor of any shape.

    `before` and `behind` are opcodes around those of the tensor.
    """
    out = io.BytesIO()
    torch.save({"x": torch.zeros(actual)}, out)
    pickled = [
        b"\x80\x02}X\x01\x00\x00\x00x" + before,
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n",
    ]
    pickled.append(b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + pickle.dumps(numel, 2)[2:-1] + b"tQ")
    pickled.append(pickle.dumps(offset, 2)[2:-1] + pickle.dumps(size, 2)[2:-1] + pickle.dumps(stride, 2)[2:-1])
    pickled.append(b"\x89ccollections\nOrderedDict\n)RtR" + behind + b"s.")
    with zipfile.ZipFile(io.BytesIO(out.getvalue())) as theirs:
        data = theirs.read(next(name for name in theirs.namelist() if name.endswith("/data/0")))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", b"".join(pickled))
        archive.writestr("archive/data/0", data)
    return made.getvalue()


def test_a_storage_that_tells_the_truth_is_read(tmp_path):
    (tmp_path / "x.pt").write_bytes(storage_lies(6, 6, (2, 3), (3, 1), 0))
    found: Any = read_torch_file(tmp_path / "x.pt")
    assert torch.equal(found["x"], torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("numel", "actual", "size", "stride", "offset"),
    [
        (10**12, 6, (2, 3), (3, 1), 0),
        (6, 6, (2, 3), (10**9, 1), 0),
        (6, 6, (10**6, 10**6), (0, 1), 0),
        (6, 6, (7,), (1,), 0),
        (6, 6, (6,), (1,), 1),
        (6, 6, (-6,), (1,), 0),
        (6, 6, (6,), (-1,), 5),
        (-6, 6, (6,), (1,), 0),
        (6, 6, (6,), (1, 1), 0),
        (5, 6, (5,), (1,), 0),
    ],
)
def test_storages_that_lie_about_their_size_are_refused(numel, actual, size, stride, offset, tmp_path):
    (tmp_path / "x.pt").write_bytes(storage_lies(numel, actual, size, stride, offset))
    with pytest.raises(UserError, match="refused"):
        read_torch_file(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["torch\nSize", "builtins\nset", "builtins\nfrozenset", "collections\nOrderedDict"])
@pytest.mark.parametrize(("mark", "call"), [(b"(", b"tR"), (b"(", b"t\x81"), (b"", b"R"), (b"", b"\x81")])
def test_a_tensor_is_no_container_whose_rows_are_made(name, mark, call, tmp_path):
    data = storage_lies(6, 6, (10**6, 0), (1, 1), 0, f"c{name}\n".encode() + mark, call)
    (tmp_path / "x.pt").write_bytes(data)
    began = time.perf_counter()
    with pytest.raises(UserError, match="refused"):
        read_torch_file(tmp_path / "x.pt")
    assert time.perf_counter() - began < 0.5  # a million rows take seconds


def test_elements_are_not_added_to_a_tensor(tmp_path):
    (tmp_path / "x.pt").write_bytes(storage_lies(6, 6, (6, 1), (1, 1), 0, b"", b"(K\x01\x90"))
    with pytest.raises(UserError, match="adds to a Tensor"):
        read_torch_file(tmp_path / "x.pt")


def test_compressed_records_are_refused_before_they_are_unpacked(tmp_path):
    """A compressed record of a few kilobytes may unpack to gigabytes."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x00" * 10**7)
    with pytest.raises(UserError, match="is compressed"):
        read_torch_file(tmp_path / "x.pt")


@pytest.mark.parametrize("count", [0, 2])
def test_archives_without_one_pickle_are_refused(count, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for number in range(count):
            archive.writestr(f"{number}/data.pkl", pickle.dumps(1))
        archive.writestr("other", b"")
    with pytest.raises(UserError, match=f"an archive with {count} data.pkl"):
        read_torch_file(tmp_path / "x.pt")


SMALL = ("plain.pt", "clamp-and-window.legacy.pt")


def error_of(action: Callable[[], object]) -> Exception | None:
    """Return the exception that an action raises, or None."""
    try:
        action()
    except Exception as error:
        return error
    return None


def imported(content: bytes, path: Path) -> object:
    path.write_bytes(content)
    return import_module.converted(import_module.read_source(path), {})


@pytest.mark.parametrize("file", SMALL)
def test_truncated_files_are_refused_at_every_hundredth(file, tmp_path):
    content = (GOLDEN / file).read_bytes()
    for percent in range(100):
        path = tmp_path / f"{percent}.pt"
        path.write_bytes(content[: len(content) * percent // 100])
        with pytest.raises(UserError):
            import_run(path, tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("file", SMALL)
def test_flipped_bytes_lead_to_our_own_errors_only(file, tmp_path):
    """The import succeeds or raises UserError; any other exception is a bug of this package."""
    content, generator, refused = (GOLDEN / file).read_bytes(), random.Random(0), 0
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(generator.choice((1, 1, 3, 20))):
            # Mostly in the first half, which holds the pickle: a flipped weight is still a valid weight.
            place = generator.randrange(len(content) if generator.random() < 0.3 else len(content) // 2)
            changed[place] ^= 1 << generator.randrange(8)
        error = error_of(partial(imported, bytes(changed), tmp_path / "x.pt"))
        assert isinstance(error, UserError | None), repr(error)
        refused += error is not None
    assert refused > 30, "most of the file is no weights"


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_lead_to_our_own_errors_only(tail):
    for head in (b"", b"\x80\x02", b"\x80\x04", b"PK\x03\x04"):
        error = error_of(partial(loads, head + tail))
        assert isinstance(error, UnsafePickle | None), repr(error)


@given(st.lists(st.sampled_from(pickletools.opcodes), max_size=30), st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_random_programs_lead_to_our_own_errors_only(opcodes, tail):
    program = b"\x80\x02" + b"".join(op.code.encode("latin1") + tail[: n % 7] for n, op in enumerate(opcodes)) + b"."
    error = error_of(partial(loads, program))
    assert isinstance(error, UnsafePickle | None), repr(error)


def test_symbols_that_utf_8_cannot_write_are_refused():
    with pytest.raises(UserError, match=r"a word vocabulary holds '.ud800', which UTF-8 cannot write"):
        vocabulary_of(["<eos>", "<unk>", "\ud800x"], "vocab.pkl")


def test_a_tensor_that_repeats_its_storage_is_refused(tmp_path):
    torch.save({"word_emb.emb_layers.0.weight": torch.zeros(1, 8).as_strided((10**7, 8), (0, 1))}, tmp_path / "bomb.pt")
    assert (tmp_path / "bomb.pt").stat().st_size < 10_000
    with pytest.raises(UserError, match="repeats numbers of its storage"):
        import_run(tmp_path / "bomb.pt", tmp_path / "run")


def test_an_object_may_have_an_attribute_of_any_name(tmp_path):
    class Module(StandIn):
        pass

    module = Module()
    module.__dict__.update(attribute=5, _modules={})
    assert StandIn.attribute(module, "attribute") == 5
    assert _modules(module) == {}


def test_a_symbol_of_many_digits_is_a_word():
    assert isinstance(vocabulary_of(["1" * 5000, "<eos>", "<unk>"], "here"), WordVocabulary)


def test_an_index_that_names_no_files_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(UserError, match="names files outside of its directory"):
        read_weights(tmp_path)


def laughs(depth: int = 39) -> list[object]:
    """Return a list of few objects that stands for 10**depth elements."""
    value: list[object] = ["ha"]
    for _ in range(depth):
        value = [value] * 10
    return value


def hanging(tmp_path: Path) -> list[str]:
    """Write small files that once made the import print, or walk through, more elements than anybody can wait for."""
    files = {}
    for name in ("cutoffs", "dropout", "attn_type", "tgt_len", "mem_len", "n_layer", "same_length", "pre_lnorm"):
        files[name] = tmp_path / f"{name}.pt"
        torch.save({"model_state": {}, "model_config": {name: laughs()}}, files[name])
    for name in ("idx2sym", "encoder", "vocab", "tokenizer"):
        files[name] = tmp_path / f"{name}.pt"
        torch.save({"model_state": {}, "model_config": {}, "vocab": {name: laughs(), "bpe_ranks": {}}}, files[name])
    files["keys"] = tmp_path / "keys.pt"
    head = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {}, [laughs()])
    files["keys"].write_bytes(b"".join(pickle.dumps(each, 2) for each in head))
    files["names"] = tmp_path / "names.pt"
    torch.save({"module." * 300_000 + "x": torch.zeros(1)}, files["names"])
    # 16 levels of modules, each with ten times the same module inside.
    program = b"\x80\x02cmem_transformer\nMemTransformerLM\n)\x81q\x00"
    for level in range(30):
        inner = b"".join(b"X\x01\x00\x00\x00%dh%c" % (each, level) for each in range(10))
        program += b"cmem_transformer\nM\n)\x81}X\x08\x00\x00\x00_modules}(" + inner + b"usbq" + bytes([level + 1])
    files["modules"] = tmp_path / "modules.pt"
    files["modules"].write_bytes(program + b".")
    for name in ("pipe.pt", "config/config.json", "part/part.safetensors"):
        files[name] = (tmp_path / name).parent if "/" in name else tmp_path / name
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    (files["part/part.safetensors"] / "config.json").write_text('{"model_type": "transfo-xl"}')
    index = files["part/part.safetensors"] / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "part.safetensors"}}')
    return [*map(str, files.values())]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_small_files_do_not_make_an_import_hang(tmp_path):
    """One process of its own with a time limit; each file gives one line and no run."""
    paths = hanging(tmp_path)
    code = "import sys; from txl.cli import main; [main(['import', each, '--out', each + '-run']) for each in sys.argv[1:]]"
    ended = subprocess.run(
        [sys.executable, "-c", code, *paths], timeout=100, capture_output=True, text=True, check=False
    )
    lines = ended.stderr.splitlines()
    assert [line.partition(str(tmp_path))[0] for line in lines if not line.startswith("txl: error: ")] == []
    assert len(lines) == len(paths), lines
    assert max(map(len, lines)) < 2100
    assert ended.returncode == 0
    assert list(tmp_path.glob("*-run")) == []


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02\x8b\x00\x00\x00\x40.",  # LONG4 of a gigabyte
        b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x40.",  # BYTEARRAY8 of 2**62 bytes
    ],
)
def test_sizes_in_opcodes_allocate_nothing(program):
    with pytest.raises(UnsafePickle, match="which no checkpoint needs"):
        loads(program)


def test_an_index_that_is_nested_without_end_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="not JSON"):
        read_weights(tmp_path)


HOSTILE = ("null", "[]", "{}", "1e999", "-1", "18446744073709551615", '"x"', "[[[]]]", '"\\ud800"', "9" * 50, "{")


@pytest.mark.parametrize("name", ["config.json", "added_tokens.json", "vocab.json", "model.safetensors.index.json"])
def test_mutated_json_of_a_directory_gives_our_own_errors_only(name, tmp_path):
    """Each value of the file is replaced; whatever is imported can be loaded again."""
    files = model_files(16)
    files |= {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "model.safetensors"}}).encode()}
    files |= {"added_tokens.json": b'{"<formula>": 29}'}
    config: dict[str, Any] = json.loads(files.get(name, b'{"a": 0, "b": 1}'))
    folder = tmp_path / "theirs"
    folder.mkdir()
    for each, content in files.items():
        (folder / each).write_bytes(content)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").rename(folder / "part.safetensors")
    for number, key in enumerate(config):
        for value in HOSTILE:
            text = json.dumps(config | {key: "@"}).replace('"@"', value)
            (folder / name).write_text(text)
            given = [] if name != "vocab.json" else [read_vocabulary]
            error = error_of(partial(import_run, folder, tmp_path / f"run{number}"))
            assert isinstance(error, UserError | None), (text, repr(error))
            for read in given:
                assert isinstance(error_of(partial(read, folder / name)), UserError | None), text
            if error is None:
                load(tmp_path / f"run{number}")
                shutil.rmtree(tmp_path / f"run{number}")
