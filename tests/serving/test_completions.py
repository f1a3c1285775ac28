"""`/v1/completions`: the protocol that clients expect, and the results of `txl generate` and `txl score`."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch

import txl
from tests.serving.conftest import LENGTHS, wait_for
from txl.cli import main
from txl.evaluation.surprisal import surprisals

PROMPT = "12. The river rose — “how long?”"


def generated(served, prompt: str, seed: int, max_tokens: int = 40, **settings) -> str:
    given = {"max_tokens": max_tokens, "seed": seed, **LENGTHS, **settings}
    return "".join(txl.generate(served.model, served.vocabulary, prompt, **given))


def test_the_text_of_txl_generate(server, served, trained, capsys):
    found = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "seed": 3})
    text = generated(served, PROMPT, 3)
    assert found["choices"] == [{"text": text, "index": 0, "logprobs": None, "finish_reason": "length"}]
    n_prompt = len(PROMPT.encode())
    assert found["usage"] == {"prompt_tokens": n_prompt, "completion_tokens": 40, "total_tokens": n_prompt + 40}
    words = ["generate", str(trained), "--prompt", PROMPT, "--seed", "3", "--max-tokens", "40", "--json"]
    assert main(words) == 0
    assert text == json.loads(capsys.readouterr().out)["samples"][0]


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 12}, {"temperature": 0.7, "top_p": 0.8, "top_k": 12}),
        ({"top_k": 0}, {"top_k": None}),
        ({"top_k": -1}, {"top_k": None}),
        ({"temperature": 0}, {"temperature": 0.0}),
    ],
)
def test_sampling_settings_are_those_of_txl_generate(server, served, given, same):
    found = server.complete(prompt=PROMPT, max_tokens=30, seed=4, **given)
    assert found[0]["text"] == generated(served, PROMPT, 4, 30, **same)


def test_the_same_text_alone_and_among_32_others(server, served):
    prompts = [f"{number}. " + PROMPT * (1 + number % 9) for number in range(33)]

    def ask(number: int) -> str:
        value = {"prompt": prompts[number], "max_tokens": 20 + number, "seed": number, "logprobs": number % 3 or None}
        return server.complete(**value)[0]["text"]

    with ThreadPoolExecutor(33) as pool:
        together = list(pool.map(ask, range(33)))
    assert together == [generated(served, prompt, number, 20 + number) for number, prompt in enumerate(prompts)]
    assert server.is_empty()


def test_choices_of_one_prompt_and_of_several(server, served):
    ids = list(PROMPT.encode())
    expected = [generated(served, prompt, 7 + sample, 12) for prompt in (PROMPT, "Nobody") for sample in range(3)]
    for prompts in ([PROMPT, "Nobody"], [ids, list(b"Nobody")]):
        found = server.post("/v1/completions", {"prompt": prompts, "max_tokens": 12, "seed": 7, "n": 3})
        assert [choice["index"] for choice in found["choices"]] == list(range(6))
        assert [choice["text"] for choice in found["choices"]] == expected
        assert found["usage"]["prompt_tokens"] == len(ids) + 6
        assert found["usage"]["completion_tokens"] == 72
    assert server.complete(prompt=ids, max_tokens=12, seed=7)[0]["text"] == expected[0]


def test_scores_are_those_of_txl_score(server, served):
    text = "".join(f"{number}. {PROMPT}\n" for number in range(12))  # longer than memory and segments
    expected = [row.surprisal for row in surprisals(served.model, served.vocabulary, text, segment=8, **LENGTHS)]
    n = len(text.encode())
    for max_tokens in (0, 1):
        [choice] = server.complete(prompt=text, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0)
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(found["text_offset"]) == len(found["top_logprobs"]) == n + max_tokens
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        bits = [-log_prob / math.log(2) for log_prob in found["token_logprobs"][1:n]]
        assert bits == pytest.approx(expected[1:], abs=1e-5)
        assert bytes(value for data in found["bytes"][:n] for value in data) == text.encode()
        assert choice["text"].startswith(text)
        for log_prob, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
            assert log_prob in top.values()  # exactly equal, because lm-evaluation-harness compares them
            assert 2 <= len(top) <= 3
        if max_tokens:
            assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())


def test_offsets_are_those_of_characters(server):
    [choice] = server.complete(prompt="a — b", echo=True, logprobs=0, max_tokens=30, seed=5)
    found = choice["logprobs"]
    assert found["tokens"][:7] == ["a", " ", "bytes:\\xe2", "bytes:\\x80", "bytes:\\x94", " ", "b"]
    assert found["text_offset"][:7] == [0, 1, 2, 2, 2, 3, 4]
    for token, at in zip(found["tokens"], found["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][at : at + len(token)] == token
    data = bytes(value for data in found["bytes"] for value in data)
    assert choice["text"] == data.decode("utf-8", errors="replace")


def test_a_character_is_never_cut(server):
    """Check prompts that end inside a character, and texts that are drawn byte by byte."""
    data = "“how long?” — she asked".encode()
    for end in range(1, 4):
        value = {"prompt": list(data[:end]), "max_tokens": 50, "seed": end, "logprobs": 0}
        choices = [chunk["choices"][0] for chunk in server.events("/v1/completions", value)]
        text = "".join(choice["text"] for choice in choices)
        drawn = bytes(value for choice in choices for data in choice["logprobs"]["bytes"] for value in data)
        assert (data[:end] + drawn).decode("utf-8", errors="replace").endswith(text)
        if end == 3:
            assert text == drawn.decode("utf-8", errors="replace")


def test_stop_strings(server, served):
    value = {"prompt": PROMPT, "max_tokens": 60, "seed": 9}
    text = server.complete(**value)[0]["text"]
    stop = text[20:23]
    expected = text[: text.index(stop)]
    assert expected == generated(served, PROMPT, 9, 60, stop=[stop])
    for given in ({"stop": stop}, {"stop": ["\x00\x01", stop], "logprobs": 0}):
        [choice] = server.complete(**value, **given)
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        if "logprobs" in given:
            assert all(at < len(expected) for at in choice["logprobs"]["text_offset"])
        chunks = [chunk["choices"][0] for chunk in server.events("/v1/completions", value | given)]
        assert "".join(chunk["text"] for chunk in chunks) == expected
        assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["stop"]


def test_streamed_is_what_is_not_streamed(server):
    value = {"prompt": [PROMPT, "Nobody"], "n": 2, "max_tokens": 25, "seed": 2, "echo": True, "logprobs": 1}
    whole = server.post("/v1/completions", value)
    chunks = server.events("/v1/completions", value | {"stream_options": {"include_usage": True}})
    assert chunks.pop()["usage"] == whole["usage"]
    for expected in whole["choices"]:
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        for name, values in expected["logprobs"].items():
            assert [entry for part in parts for entry in part["logprobs"][name]] == values
        assert parts[-1]["finish_reason"] == "length"


def test_the_openai_client(server, served):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["small"]
    found = client.completions.create(model="small", prompt=PROMPT, max_tokens=30, seed=1, logprobs=2, echo=True)
    assert found.choices[0].text == PROMPT + generated(served, PROMPT, 1, 30)
    assert found.choices[0].logprobs is not None
    assert found.usage is not None
    assert found.usage.completion_tokens == 30
    pieces = client.completions.create(model="small", prompt=PROMPT, max_tokens=30, seed=1, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == generated(served, PROMPT, 1, 30)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="small", prompt=PROMPT, max_tokens=-1)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.NotFoundError, match="/v1/completions"):
        client.chat.completions.create(model="small", messages=[{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"max_token": 3}, "max_token"), ({"best_of": 4}, "best_of"), ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"), ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {"the": -100}}, "logit_bias"), ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"256": -100}}, "logit_bias"),
        ({"logit_bias": {str(token): -100 for token in range(256)}}, "logit_bias"),
        ({"logit_bias": {str(token): -100 for token in range(1025)}}, "logit_bias"),
        ({"max_tokens": 10**9}, "max_tokens"), ({"max_tokens": "3"}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"), ({"temperature": 10**400}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"), ({"n": 0}, "n"), ({"stop": ["1", "2", "3", "4", "5"]}, "stop"), ({"stop": ""}, "stop"),
        ({"stop": "x" * 1025}, "stop"), ({"logprobs": 101}, "logprobs"), ({"echo": "yes"}, "echo"),
        ({"stream_options": {"include_usage": True}}, "stream_options"), ({"seed": "x"}, "seed"),
        ({"stream": True, "stream_options": {"usage": True}}, "usage"), ({"prompt": ["a"] * 100, "n": 2}, None),
        ({"prompt": None}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [256]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [10**30]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(server, value, param):
    error = server.refused(400, "/v1/completions", {"prompt": "a"} | value)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert server.is_empty()


def test_values_that_ask_for_nothing_are_fine(server):
    plain = {"prompt": "a", "max_tokens": 2, "seed": 1}
    asked = {"best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "me", "logit_bias": {"7": 0}}
    asked |= {"suffix": None, "stop": None, "stream": False, "min_p": None}
    assert server.complete(**plain, **asked) == server.complete(**plain)


def test_banned_tokens_are_never_drawn(server):
    value = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 0}
    drawn = server.complete(**value)[0]["logprobs"]["token_ids"]
    common = max(set(drawn), key=drawn.count)
    drawn = server.complete(**value, logit_bias={str(common): -100})[0]["logprobs"]["token_ids"]
    assert common not in drawn
    assert len(drawn) == 40


def test_seed_minus_one_is_random(server):
    assert len({server.complete(prompt="a", max_tokens=30, seed=-1)[0]["text"] for _ in range(4)}) > 1
    made = [server.post("/v1/streams", {"seed": -1}) for _ in range(2)]
    assert len({stream["seed"] for stream in made} | {-1}) == 3
    for stream in made:
        server.client.delete(f"/v1/streams/{stream['id']}")


def test_other_routes(server):
    assert server.get("/health") == {"status": "ok"}
    [model] = server.get("/v1/models")["data"]
    assert model["txl"]["memory"] == 15
    assert server.get("/v1/models/small") == model
    tokens = server.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False})["tokens"]
    assert tokens == list(PROMPT.encode())
    assert server.post("/detokenize", {"tokens": tokens}) == {"prompt": PROMPT}
    assert server.post("/tokenize", {"prompt": ""})["tokens"] == []
    about = server.get("/tokenizer_info")
    assert (about["bos_token"], about["eos_token"], about["vocab_size"]) == ("\n", None, 256)
    for path in ("/v1/completion", "/v2"):
        assert server.refused(404, path, {})["message"]
    assert "/v1/completions" in server.refused(404, "/v1/chat/completions", {})["message"]
    server.complete(prompt=PROMPT, max_tokens=3)
    assert '\ntxl_requests_total{route="/v1/completions",status="200"}' in server.client.get("/metrics").text
    page = server.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_a_prompt_that_is_read_holds_nobody_up(server):
    """Short requests are answered while a long prompt is read; reading stops when the client disconnects."""
    before = server.service.metrics.tokens_read._value.get()
    with server.connection("/v1/completions", {"prompt": "x" * 1_000_000, "max_tokens": 1}):
        wait_for(lambda: server.service.scheduler._reading)
        server.complete(prompt="short", max_tokens=5)
        assert server.service.scheduler._reading
    wait_for(server.is_empty)
    assert server.service.metrics.tokens_read._value.get() - before < 1_000_000


def test_a_long_text_waits_for_others_without_a_thread_and_not_at_all_once_its_client_has_left(server, monkeypatch):
    """Long texts of one client do not take the threads of other requests."""
    texts, gate, encoded = server.service.texts, threading.Event(), []

    def encode(text):
        encoded.append(len(text))
        if len(text) > 300_000:
            gate.wait(30)
        return torch.zeros(1, dtype=torch.int64)

    monkeypatch.setattr(texts, "encode", encode)
    connections = [server.connection("/tokenize", {"prompt": "x" * n}) for n in range(300_001, 300_041)]
    wait_for(lambda: server.service.encoder._work_queue.qsize() == 39)
    assert server.post("/tokenize", {"prompt": "x" * 100_000})["count"] == 1
    for connection in connections:
        connection.close()
    wait_for(lambda: server.app.state.guard._active == 0)
    server.get("/health")  # answered in a later turn of the event loop than the one that cancels
    gate.set()
    assert server.post("/tokenize", {"prompt": "x" * 300_000})["count"] == 1
    assert len([n for n in encoded if n > 300_000]) == 1


@pytest.mark.parametrize(
    ("route", "value"),
    [
        ("completions", {"prompt": "a" * 100, "n": 8, "echo": True, "logprobs": 9, "max_tokens": 1}),
        ("streams", {"text": "a" * 64, "logprobs": 99}),
        ("streams", {"text": "a" * 64, "logprobs": 99, "stream": True}),
        ("streams/ID/generate", {"max_tokens": 64, "logprobs": 99}),
    ],
)
def test_many_log_probabilities_of_few_tokens_are_written_beside_the_event_loop(server_with, monkeypatch, route, value):
    server, threads = server_with(segment=64), set()
    stream = server.post("/v1/streams", {"text": "a"})["stream"]["id"]
    for module in ("completions", "stream_routes"):
        seen = lambda value: value and (threads.add(threading.current_thread().name) or value)  # noqa: E731
        monkeypatch.setattr(f"txl.serving.{module}.finite", seen)
    assert server.client.post(f"/v1/{route.replace('ID', stream)}", json=value).is_success
    assert threads
    assert all(name.startswith("asyncio_") for name in threads)


def test_more_than_a_request_may_ask_is_refused_before_it_is_read(server, monkeypatch):
    asked = {"prompt": "a" * 20_000, "max_tokens": 0, "echo": True, "logprobs": 100}
    message = server.refused(400, "/v1/completions", asked)["message"]
    assert "2,020,000" in message
    assert "1,048,576" in message
    assert server.post("/v1/completions", asked | {"prompt": "a" * 200})["usage"]["total_tokens"] == 200
    server.refused(400, "/v1/completions", {"prompt": "a", "max_tokens": 65_536, "logprobs": 100})
    server.refused(400, "/v1/completions", {"prompt": [0] * (2**20 + 1)})
    monkeypatch.setattr(server.service.texts, "encode", lambda text: pytest.fail("it was read"))
    assert "200 prompts" in server.refused(400, "/v1/completions", {"prompt": ["a"] * 200})["message"]
