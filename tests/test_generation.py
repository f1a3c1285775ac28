"""Generation: drawn tokens, emitted text, and prompts of any length."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Generator
from typing import Any, cast

import numpy as np
import pytest
import torch

import txl
from txl.config import TransformerXLConfig
from txl.data.characters import ByteVocabulary, CharVocabulary
from txl.data.word_vocabulary import WordVocabulary
from txl.errors import UserError
from txl.generation.sampling import chances, permitted
from txl.generation.text import Sampling, StopStrings, generate, generate_samples, generate_tokens
from txl.models import build_model
from txl.models.language_model import LanguageModel
from txl.models.vanilla import NoMemory

LETTERS = CharVocabulary("abcdefgh .")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = TransformerXLConfig(n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=24, mem_len=6, window=7, dropout=0.4)
    model = build_model(shape, len(LETTERS))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.4)
    return model.double()


def text(model, prompt="abc", **given) -> str:
    settings: dict[str, Any] = {"max_tokens": 40, "seed": 1} | given
    return "".join(generate(model, LETTERS, prompt, **settings))


def test_the_same_seed_gives_the_same_text_and_another_does_not(model):
    assert text(model) == text(model)
    assert text(model) != text(model, seed=2)
    assert len(text(model)) == 40
    assert text(model, seed=None) != text(model, seed=None)


def test_greedy_takes_the_likeliest_by_hand(model):
    model.eval()
    ids = [int(token) for token in LETTERS.encode("abc")]
    for _ in range(10):
        log_probs, _ = model.log_probs(torch.tensor([ids]), model.init_state(1))
        ids.append(1 + int(log_probs[0, -1, 1:].argmax()))  # id 0 is <unk>, which has no text
    assert text(model, temperature=0, max_tokens=10) == LETTERS.decode(ids[3:])


def test_a_prompt_longer_than_memory_and_segment_equals_reading_it_token_by_token(model, monkeypatch):
    prompt = "abcdefgh. " * 13
    expected = text(model, prompt)
    monkeypatch.setattr("txl.generation.engine.PROMPT_SEGMENT", 1)
    assert text(model, prompt) == expected
    # Tokens beyond the reach of two layers with window 7 change nothing.
    assert text(model, prompt[-14:]) == expected


def test_sample_b_of_seed_s_is_what_seed_s_plus_b_gives_alone(model):
    together = generate_samples(model, LETTERS, "abc", samples=3, max_tokens=25, seed=5)
    assert together == [text(model, max_tokens=25, seed=seed) for seed in (5, 6, 7)]
    assert len(set(together)) == 3


def test_dropout_is_off_and_the_mode_is_put_back_even_if_the_caller_stops_early(model):
    model.train()
    pieces = generate(model, LETTERS, "abc", max_tokens=1000, seed=1)
    first = list(itertools.islice(pieces, 3))
    assert model.training
    cast(Generator[str], pieces).close()
    assert model.training
    model.eval()
    assert list(itertools.islice(generate(model, LETTERS, "abc", max_tokens=3, seed=1), 3)) == first


def draws(sampling: Sampling, probabilities: list[float], n: int = 2000) -> np.ndarray:
    log_probs = torch.tensor([probabilities]).log()
    allowed, obstacles = permitted(log_probs)
    assert not obstacles.any()
    drawn = sampling.pick(allowed.expand(n, -1), chances(torch.zeros(n, dtype=torch.int64), torch.arange(n)))
    return np.bincount(drawn, minlength=len(probabilities)) / n


PROBABILITIES = [0.1, 0.4, 0.05, 0.3, 0.15]


def test_sampling_follows_the_distribution_and_its_cuts():
    assert np.abs(draws(Sampling(None), PROBABILITIES) - PROBABILITIES).max() < 0.03
    top_two = draws(Sampling(top_k=2), PROBABILITIES)
    assert np.abs(top_two - np.array([0, 4 / 7, 0, 3 / 7, 0])).max() < 0.03
    nucleus = draws(Sampling(None, top_p=0.75), PROBABILITIES)  # 0.4 + 0.3 < 0.75, so a third token is included
    assert nucleus[[0, 2]].sum() == 0
    assert nucleus[4] > 0.1
    assert (draws(Sampling(None, top_p=1e-9), PROBABILITIES) == [0, 1, 0, 0, 0]).all()
    assert (draws(Sampling(temperature=0), PROBABILITIES) == [0, 1, 0, 0, 0]).all()
    cold = draws(Sampling(None, temperature=0.5), PROBABILITIES)
    squares = np.square(PROBABILITIES) / np.square(PROBABILITIES).sum()
    assert np.abs(cold - squares).max() < 0.03


def test_forbidden_tokens_are_never_drawn(model):
    drawn = [int(token) for token in generate_tokens(model, [1], max_tokens=200, seed=0, forbidden=[0, 2, 3])]
    assert not {0, 2, 3} & set(drawn)


def test_stop_strings_end_the_text_and_are_not_part_of_it(model):
    whole = text(model, max_tokens=200)
    stop = whole[50:53]
    assert text(model, max_tokens=200, stop=[stop]) == whole[: whole.index(stop)]
    assert text(model, max_tokens=200, stop=["never to be seen"]) == whole


def test_stop_strings_hold_back_only_what_may_be_their_beginning():
    stop = StopStrings(["END", "\n\n"])
    shown = [stop.push(piece) for piece in ("abE", "x", "\n", "E", "N", "Q")]
    assert shown == ["ab", "Ex", "", "\n", "", "ENQ"]
    assert [stop.push("one E"), stop.push("ND two"), stop.found] == ["one ", "", True]
    other = StopStrings(["xyz"])
    assert other.push("axy") + other.flush() == "axy"


def test_several_bytes_of_a_character_appear_as_one_piece():
    class Spelling(LanguageModel[NoMemory]):
        """Model that predicts the same text again and again."""

        vocab_size = 256

        def __init__(self):
            super().__init__()
            self.anchor = torch.nn.Parameter(torch.zeros(1))
            self.said = "é🦆.".encode()

        def init_state(self, batch_size, mem_len=None, window=None, clamp_len=None):
            return NoMemory(batch_size)

        def nll(self, tokens, targets, state):
            raise NotImplementedError

        def log_probs(self, tokens, state):
            following = self.said[(self.said.index(int(tokens[0, -1])) + 1) % len(self.said)]
            return torch.eye(256)[following].log()[None, None], state

    assert list(generate(Spelling(), ByteVocabulary(), ".", max_tokens=7, top_k=1)) == ["é", "🦆", "."]


def test_words_are_separated_from_the_prompt():
    vocabulary = WordVocabulary(["<eos>", "<unk>", "the", "mill"])
    torch.manual_seed(0)
    model = build_model(TransformerXLConfig(n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8, mem_len=4), 4)
    model.softmax.bias.data[:] = torch.tensor([-50.0, -50.0, -50.0, 50.0])
    assert "".join(generate(model, vocabulary, "the", max_tokens=2)) == " mill mill"
    assert "".join(generate(model, vocabulary, "the\n", max_tokens=2)) == "mill mill"


@pytest.mark.parametrize(("rule", "drawn"), [("whitespace", True), ("punctuation", False)])
def test_unknown_words_are_drawn_only_as_words_of_the_text_and_unless_forbidden(rule, drawn):
    vocabulary = WordVocabulary(["<eos>", "<unk>", "the", "mill"], rule=rule)
    torch.manual_seed(0)
    model = build_model(TransformerXLConfig(n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8, mem_len=4), 4)
    model.softmax.bias.data[:] = torch.tensor([-50.0, 50.0, -50.0, 0.0])
    assert ("<unk>" in "".join(generate(model, vocabulary, "the", max_tokens=4))) == drawn
    assert "".join(generate(model, vocabulary, "the", max_tokens=2, forbid_unknown=True)) == " mill mill"
    settings = {"samples": 2, "max_tokens": 2, "forbid_unknown": True}
    assert generate_samples(model, vocabulary, "the", **settings) == [" mill mill"] * 2


def test_several_samples_end_when_all_have_met_a_stop_string(model):
    whole = generate_samples(model, LETTERS, "abc", samples=2, max_tokens=300, seed=5)
    stop = "a"
    texts = generate_samples(model, LETTERS, "abc", samples=2, max_tokens=10**9, seed=5, stop=[stop])
    assert texts == [text[: text.index(stop)] for text in whole]


def test_no_temperature_is_too_low_and_damaged_weights_are_named(model):
    assert text(model, temperature=1e-300) == text(model, temperature=0)
    damaged = copy.deepcopy(model)
    next(damaged.parameters()).data.fill_(torch.nan)
    with pytest.raises(UserError, match="not numbers; its weights are damaged"):
        text(damaged)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"max_tokens": 0}, "max_tokens is 0; expected 1 or more"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 2.5}, "top_k is 2.5; expected a whole number"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": "1"}, "top_p is '1'"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": None}, "temperature is none"),
        ({"stop": [""]}, "a stop string is empty"),
        ({"mem_len": 2}, "window 7 needs at least 6 positions"),
    ],
)
def test_bad_settings_are_refused_before_the_first_token(model, settings, message):
    with pytest.raises(UserError, match=message):
        generate(model, LETTERS, **({"prompt": "abc", "max_tokens": 5} | settings))


def test_characters_that_the_vocabulary_lacks_are_read_as_unknown(model):
    assert text(model, "abcXdef") == "".join(
        LETTERS.characters[int(ids[0]) - 1]
        for ids in generate_tokens(model, [1, 2, 3, 0, 4, 5, 6], max_tokens=40, seed=1, forbidden=[0])
    )


def test_a_model_without_a_vocabulary_generates_ids_but_no_text(model):
    with pytest.raises(UserError, match="no vocabulary"):
        generate(model, None, "abc", max_tokens=5)
    assert len(list(generate_tokens(model, [1, 2], max_tokens=5))) == 5
    with pytest.raises(UserError, match="outside of the model's vocabulary, 0 to 10"):
        generate_tokens(model, [11], max_tokens=5)


def test_the_public_interface_of_the_design(trained):
    model, vocabulary = txl.load(trained)
    pieces = list(txl.generate(model, vocabulary, "The ", max_tokens=20, top_k=40, seed=1))
    assert all(isinstance(piece, str) for piece in pieces)
    assert "".join(pieces) == "".join(txl.generate(model, vocabulary, "The ", max_tokens=20, top_k=40, seed=1))
