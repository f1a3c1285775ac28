"""Routes of the server with models of characters, words and BPE tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import txl
from tests.serving.conftest import Running, running
from txl.config import TransformerXLConfig
from txl.data.bpe import BpeVocabulary
from txl.data.characters import CharVocabulary
from txl.data.vocabulary import Vocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError
from txl.evaluation.surprisal import surprisals
from txl.models import build_model
from txl.serving.service import Served, Service
from txl.serving.texts import Texts

LENGTHS: dict[str, Any] = {"mem_len": 12, "window": 12}
TEXT = "The river rose — “how long?”\nNobody knew, and so they waited."
WORDS = ["<eos>", "<unk>", "The", "river", "rose", "—", "“how", "long?”", "Nobody", "knew,", "and", "so", "they"]
VOCABULARIES = {
    "char": lambda: CharVocabulary(sorted(set(TEXT) - {"w"})),
    "closed": lambda: CharVocabulary("abcdefghijklmnopqrstuvwxyz ", unknown=False),
    "word": lambda: WordVocabulary(WORDS),
    "punctuation": lambda: WordVocabulary([*WORDS, "\u2060,", "knew", "\u2060?", "long"], rule="punctuation"),
    "bpe": lambda: BpeVocabulary.train([TEXT * 20], 270),
}


@pytest.fixture(scope="module", params=list(VOCABULARIES))
def server(request) -> Iterator[Running]:
    vocabulary: Vocabulary = VOCABULARIES[request.param]()
    config = TransformerXLConfig(
        n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=24, mem_len=12, window=12, dropout=0.0
    )
    torch.manual_seed(1)
    model = build_model(config, len(vocabulary)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    with running(Service(Served(model, vocabulary, request.param, max_streams=3, **LENGTHS))) as found:
        yield found


def prompt(server: Running) -> str:
    return "the river rose in the night" if server.service.model_id == "closed" else TEXT


def test_the_text_of_txl_generate(server):
    served, text = server.service.served, prompt(server)
    expected = "".join(txl.generate(served.model, served.vocabulary, text, max_tokens=40, seed=2, **LENGTHS))
    value = {"prompt": text, "max_tokens": 40, "seed": 2}
    assert server.complete(**value)[0]["text"] == expected
    assert "".join(chunk["choices"][0]["text"] for chunk in server.events("/v1/completions", value)) == expected


def test_tokens_stand_where_their_text_does(server):
    served, text = server.service.served, prompt(server)
    [choice] = server.complete(prompt=text, max_tokens=20, seed=4, echo=True, logprobs=3)
    assert choice["text"].startswith(text)
    found = choice["logprobs"]
    for token, at, data in zip(found["tokens"], found["text_offset"], found["bytes"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][at : at + len(token)] == token  # the token's place in the text, also for `<unk>`
            assert bytes(data).decode() == token
    for token, log_prob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        if top is not None:
            assert top[token] == log_prob  # also for unknown words, which `tokens` shows as they are in the text
    n_prompt = len(server.post("/tokenize", {"prompt": text})["tokens"])
    rows = list(surprisals(served.model, served.vocabulary, text, **LENGTHS))[:n_prompt]
    bits = [-log_prob / math.log(2) for log_prob in found["token_logprobs"][1 : len(rows)]]
    assert bits == pytest.approx([row.surprisal for row in rows[1:]], abs=1e-5)


def test_streams_and_token_ids(server):
    text = prompt(server)
    ids = server.post("/tokenize", {"prompt": text})["tokens"]
    [by_text], [by_ids] = (server.complete(prompt=given, max_tokens=9, seed=3, logprobs=0) for given in (text, ids))
    assert by_text["logprobs"]["token_ids"] == by_ids["logprobs"]["token_ids"]
    made = server.post("/v1/streams", {"tokens": ids, "seed": 3, "logprobs": 1})
    stream = made["stream"]["id"]
    assert [token["id"] for token in made["tokens"]] == ids
    drawn = server.post(f"/v1/streams/{stream}/generate", {"max_tokens": 9, "logprobs": 2})
    assert [token["id"] for token in drawn["tokens"]] == by_text["logprobs"]["token_ids"]
    assert "".join(token["piece"] for token in drawn["tokens"]) == drawn["text"]
    assert by_text["text"].startswith(drawn["text"])
    server.client.delete(f"/v1/streams/{stream}")


def test_what_the_vocabulary_lacks(server):
    value = {"prompt": "the \u4e2d", "max_tokens": 1, "echo": True, "logprobs": 0}
    if server.service.model_id == "closed":
        assert "U+4E2D" in server.refused(400, "/v1/completions", value)["message"]
    else:
        assert server.complete(**value)[0]["text"].startswith("the \u4e2d")


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_a_text_without_borders_is_refused_before_it_is_encoded(kind, monkeypatch):
    texts = Texts(VOCABULARIES[kind](), kind)
    monkeypatch.setattr(texts.vocabulary, "encode", lambda text: pytest.fail("it was encoded"))
    longest = {"word": 1 << 16, "bpe": 1 << 18}[kind]
    for text in ("x" * 2 * longest, "a b " * 10_000 + "!" * 2 * longest, ("x" * 2 * longest + " ") * 3):
        with pytest.raises(UserError, match="are one word, or all white space"):
            texts.refuse_long(text, 10**9)
    texts.refuse_long("a b " * longest, 10**9)
    texts.refuse_long("x" * longest, 10**9)
    for between in ("\t", "\r\n"):  # a table, or lines of another system
        texts.refuse_long(f"12{between}" * longest, 10**9)
