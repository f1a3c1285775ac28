"""Vocabularies that the authors' code pickles for one's own text: lower case, no <unk>, no <eos>, any symbols."""

from __future__ import annotations

import collections
import json
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch

import txl
from tests.serving.conftest import running
from txl.cli import main
from txl.data.vocabularies import vocabulary_from_json
from txl.errors import UserError
from txl.interop.import_run import import_run
from txl.interop.vocabulary_files import read_vocabulary, vocabulary_of
from txl.serving.service import Served, Service

GOLDEN = Path(__file__).parent / "golden"
SIZE = 29
"""Symbols of the golden checkpoints."""


class Vocab:
    """State of the authors' `Vocab`, and plain equations of how it reads a text."""

    def __init__(self, symbols: list[str], lower_case: bool, delimiter: str | None = None):
        self.counter = collections.Counter(symbols)
        self.special, self.min_freq, self.max_size, self.vocab_file = ["<eos>"], 0, None, None
        self.lower_case, self.delimiter = lower_case, delimiter
        self.idx2sym = symbols
        self.sym2idx = collections.OrderedDict((symbol, number) for number, symbol in enumerate(symbols))

    def ids(self, text: str) -> list[int]:
        found = []
        for line in text.split("\n")[:-1]:
            line = line.strip().lower() if self.lower_case else line.strip()
            symbols = list(line) if self.delimiter == "" else line.split(self.delimiter)
            symbols += ["<eos>"] * ("<eos>" in self.sym2idx)
            found += [self.sym2idx[each if each in self.sym2idx else "<unk>"] for each in symbols]
        return found


@pytest.fixture
def pickled(tmp_path, monkeypatch):
    """Function that pickles a `Vocab` under the name of the authors' class."""
    module = types.ModuleType("vocabulary")
    monkeypatch.setitem(sys.modules, "vocabulary", module)
    monkeypatch.setattr(Vocab, "__module__", "vocabulary")
    monkeypatch.setattr(module, "Vocab", Vocab, raising=False)

    def write(vocab: Vocab) -> Path:
        (tmp_path / "vocab.pkl").write_bytes(pickle.dumps(vocab))
        return tmp_path / "vocab.pkl"

    return write


def filled(*symbols: str) -> list[str]:
    return [*symbols, *(f"w{number}" for number in range(SIZE - len(symbols)))]


LINES = "The first Of\n\n  the GAME w1\n"
CASES = {
    "ptb": (Vocab(filled("<eos>", "the", "first", "of", "game"), True), LINES),
    "lower case with <unk>": (Vocab(filled("<eos>", "the", "<unk>", "of"), True), LINES),
    "wikitext-2": (Vocab(filled("<eos>", "The", "first", "Of", "the", "GAME"), False), LINES),
    "numbers": (Vocab([str(number) for number in range(240, 240 + SIZE)], True), "240 256\n 260\n"),
    "numbers with <eos>": (Vocab(["<eos>", *map(str, range(SIZE - 1))], True), "1 2\n\n17\n"),
    "events": (Vocab(filled("NOTE_ON<60>", "Time-Shift_4", "NOTE_OFF<60>"), False), "NOTE_ON<60> Time-Shift_4\nw1\n"),
    "characters": (Vocab(["<eos>", *map(chr, range(ord("一"), ord("一") + SIZE - 1))], True), "一 丁\n丂\n"),
    "undivided": (Vocab(["<eos>", "<unk>", " ", *map(chr, range(97, 97 + SIZE - 3))], True, ""), "a Bé\nc\n"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_import_reads_and_writes_text_as_the_authors_code_does(name, pickled, tmp_path, data_dir, capsys):
    vocab, text = CASES[name]
    run, file, data = str(tmp_path / "run"), tmp_path / "text.txt", ["--data-dir", str(data_dir)]
    file.write_text(text, encoding="utf-8")
    assert main(["import", str(GOLDEN / "plain.pt"), "--out", run, "--vocabulary", str(pickled(vocab))]) == 0
    model, vocabulary = txl.load(run)
    assert vocabulary is not None
    assert vocabulary.encode(text).tolist() == vocab.ids(text)
    assert vocabulary_from_json(vocabulary.to_json()) == vocabulary
    capsys.readouterr()

    assert main(["score", run, str(file), "--format", "jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    words = [row["token"] for row in rows if not row["token"].isspace() and row["token"] != "\\n"]
    assert words == (list(text.replace("\n", "").replace(" ", "")) if vocab.delimiter == "" else text.split())
    for row in rows:
        part = text.encode()[row["start"] : row["end"]].decode()
        assert part == row["token"].replace("\\n", "\n")
    ids = torch.tensor([vocab.ids(text)])
    with torch.no_grad():
        nll, _ = model.nll(ids[:, :-1], ids[:, 1:], model.init_state(1))
    found = torch.tensor([row["surprisal"] for row in rows[1:]])
    torch.testing.assert_close(found, nll[0] / torch.log(torch.tensor(2.0)), rtol=0, atol=1e-4)
    (from_python,) = [[row.surprisal for row in txl.surprisals(model, vocabulary, text)]]
    assert from_python[1:] == pytest.approx(found.tolist(), abs=1e-6)

    options = ["--data.corpus", str(file), "--split", "all", "--batch", "1", "--json", *data]
    assert main(["eval", run, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == len(vocab.ids(text)) - 1
    assert result["nll"] == pytest.approx(float(nll.mean()), abs=1e-5)
    assert main(["generate", run, "--prompt", text, "--max-tokens", "5", "--seed", "1", "--json"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample

    service = Service(Served(model, vocabulary, "imported", 1, None))
    with running(service) as server:
        answer = server.post("/v1/completions", {"prompt": text, "max_tokens": 2, "echo": True, "logprobs": 0})
        (choice,) = answer["choices"]
        assert choice["text"].startswith(text)
        assert answer["usage"]["prompt_tokens"] == len(vocab.ids(text))
        assert server.get("/tokenizer_info")["eos_token"] in ("<eos>", None)
        if vocabulary.unk_id is None:
            assert "lacks" in server.refused(400, "/v1/completions", {"prompt": "Unheard"})["message"]

    assert main(["export", run, "--format", "huggingface", "--out", str(tmp_path / "exported")]) == 0
    assert "no tokenizer" not in capsys.readouterr().out
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "exported" / "tokenizer.json"))
    assert tokenizer.encode(text).ids == vocab.ids(text)
    import_run(tmp_path / "exported", tmp_path / "again")
    assert txl.load(tmp_path / "again")[1] == vocabulary


def test_what_is_lacking_is_named_where_no_symbol_stands_for_it(pickled, tmp_path, capsys):
    run, file = str(tmp_path / "run"), tmp_path / "text.txt"
    file.write_text("the Flood rose\nthe mill\n")
    vocabulary = pickled(Vocab(filled("<eos>", "the"), True))
    assert main(["import", str(GOLDEN / "plain.pt"), "--out", run, "--vocabulary", str(vocabulary)]) == 0
    data = ["--data.corpus", str(file), "--split", "all", "--data-dir", str(tmp_path / "data")]
    for words in (["score", run, str(file)], ["eval", run, *data], ["generate", run, "--prompt", "the Flood rose"]):
        capsys.readouterr()
        assert main(words) == 2
        shown = capsys.readouterr()
        assert "the text has words that the vocabulary lacks: flood, rose" in shown.err
        assert shown.out == ""


def test_symbols_that_cannot_be_read_are_refused_by_name():
    with pytest.raises(UserError, match=r"vocab.pkl: its delimiter is '\\t'"):
        vocabulary_of(["<eos>", "New York"], "vocab.pkl", delimiter="\t")
    with pytest.raises(UserError, match="its symbols are characters"):
        vocabulary_of(["<eos>", "ab"], "vocab.pkl", delimiter="")
    with pytest.raises(UserError, match="vocab.pkl: a word vocabulary holds a word twice"):
        vocabulary_of(["<eos>", "ab", "ab"], "vocab.pkl")


def test_bytes_are_not_lower_cased(pickled):
    """The authors' code has `lower_case` set for enwik8, whose symbols are numbers."""
    vocabulary = read_vocabulary(pickled(Vocab([str(number) for number in range(128)], True)))
    assert (vocabulary.kind, vocabulary.lower) == ("byte", False)
    assert vocabulary.decode(vocabulary.encode("Mill")) == "Mill"


def test_unknown_words_can_be_forbidden_in_the_command(pickled, tmp_path, capsys):
    run = str(tmp_path / "run")
    vocabulary = pickled(Vocab(filled("<eos>", "<unk>"), False))
    assert main(["import", str(GOLDEN / "plain.pt"), "--out", run, "--vocabulary", str(vocabulary)]) == 0
    words = ["generate", run, "--prompt", "w1", "--max-tokens", "300", "--top-k", "none", "--seed", "1", "--json"]
    for option, drawn in (([], True), (["--no-unk"], False)):
        capsys.readouterr()
        assert main([*words, *option]) == 0
        result = json.loads(capsys.readouterr().out)
        assert ("<unk>" in result["samples"][0], result["forbid_unknown"]) == (drawn, not drawn)
