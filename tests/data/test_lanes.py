from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from txl.data import lanes as module
from txl.data.lanes import LaneStream, StreamPosition, shuffled
from txl.data.prepared import Sentences, Tokens
from txl.errors import UserError


def epoch(stream: LaneStream, position: StreamPosition):
    segments = []
    while True:
        segment = stream.read(position)
        segments.append(segment)
        if segment.next.epoch != position.epoch:
            return segments, segment.next
        position = segment.next


def test_lanes_are_contiguous_and_every_target_comes_once_an_epoch():
    stream = LaneStream(np.arange(3 * 17 + 2), 3, 5)
    segments, following = epoch(stream, stream.start())
    tokens = torch.cat([segment.tokens for segment in segments], dim=1)
    targets = torch.cat([segment.targets for segment in segments], dim=1)
    assert [segment.tokens.shape[1] for segment in segments] == [5, 5, 5, 1]
    assert tokens.tolist() == [list(range(17 * lane, 17 * lane + 16)) for lane in range(3)]
    assert torch.equal(targets, tokens + 1)
    assert [segment.starts_epoch for segment in segments] == [True, False, False, False]
    assert following == StreamPosition(epoch=1, offset=0)
    stream = LaneStream(np.arange(2 * 11), 2, 5)  # no empty segment at the end of a lane of whole ones
    assert [segment.tokens.shape[1] for segment in epoch(stream, stream.start())[0]] == [5, 5]


@pytest.mark.parametrize(("shift", "begins"), [(0, [0, 0, 0, 0, 0]), (5, [0, 0, 0, 0, 0]), (5 + 2, [0, 2, 4, 1, 3])])
def test_each_pass_begins_later_by_the_shift_modulo_the_segment(shift, begins):
    stream, position = LaneStream(np.arange(2 * 13), 2, 5, shift=shift), StreamPosition()
    for begin in begins:
        segments, position = epoch(stream, position)
        assert [int(segment.tokens[0, 0]) for segment in segments] == list(range(begin, 12, 5))
        assert segments[0].starts_epoch


def test_a_position_is_all_that_need_be_saved():
    stream = LaneStream(np.arange(500), 2, 20, random_segments=True, seed=3)
    position = stream.start()
    for _ in range(4):
        position = stream.read(position).next
    saved = StreamPosition.from_dict(position.to_dict())
    again = LaneStream(np.arange(500), 2, 20, random_segments=True, seed=3)
    for _ in range(20):
        ours, theirs = stream.read(position), again.read(saved)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert ours.next == theirs.next
        position, saved = ours.next, theirs.next


def test_random_segments_vary_around_their_mean_and_cover_the_lane():
    stream = LaneStream(np.arange(20_000), 1, 70, random_segments=True, seed=1)
    segments, _ = epoch(stream, stream.start())
    widths = [segment.tokens.shape[1] for segment in segments[:-1]]
    assert len(set(widths)) > 5
    assert 60 < np.mean(widths) < 75
    assert any(width < 50 for width in widths)  # one in twenty is about half as long
    assert sum(segment.tokens.shape[1] for segment in segments) == 19_999


def test_another_seed_or_epoch_draws_other_lengths():
    tokens = np.arange(20_000)
    one = LaneStream(tokens, 1, 70, random_segments=True, seed=1)
    other = LaneStream(tokens, 1, 70, random_segments=True, seed=2)
    start, later = StreamPosition(), StreamPosition(epoch=1)
    drawn = {one.read(start).next.offset, other.read(start).next.offset, one.read(later).next.offset}
    assert len(drawn) == 3


def test_a_split_shorter_than_one_segment_is_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"20 tokens: 4 lanes of 5, but a segment of 5 needs lanes of 6"):
        LaneStream(np.arange(20), 4, 5)


def sentences(count: int, boundary: str) -> Tokens:
    """Return sentences of 1 to 6 words. Every word has an id of its own; the boundary has id 0."""
    ids, word = [0], 1
    for number in range(count):
        length = 1 + number * 7 % 6
        ids += [*range(word, word + length), 0]
        word += length
        if boundary == "both" and number < count - 1:
            ids.append(0)
    return Tokens(np.array(ids, dtype=np.uint32), "train", None, Sentences(0, boundary))


def as_sentences(ids: list[int]) -> list[tuple[int, ...]]:
    text = " ".join(map(str, ids))
    return [tuple(map(int, part.split())) for part in re.split(r"(?<!\d)0(?!\d)", text) if part.strip()]


@pytest.mark.parametrize("boundary", ["end", "both"])
def test_sentences_are_shuffled_anew_each_epoch_and_each_comes_whole_and_once(boundary):
    tokens = sentences(53, boundary)
    stream = LaneStream(tokens, 1, 7, seed=5)
    orders, ids = [], []
    position = stream.start()
    for number in range(3):
        segments, position = epoch(stream, position)
        assert position == StreamPosition(number + 1, 0)
        ids = [int(segments[0].tokens[0, 0]), *torch.cat([each.targets for each in segments], dim=1)[0].tolist()]
        assert sorted(ids) == sorted(np.asarray(tokens).tolist())
        orders.append(as_sentences(ids))
    original = as_sentences(np.asarray(tokens).tolist())
    assert all(sorted(order) == sorted(original) for order in orders)
    assert len({tuple(order) for order in [original, *orders]}) == 4
    # With both, the boundaries at the beginning and end of a sentence are targets; with end, only the end boundary.
    assert ids.count(0) == (54 if boundary == "end" else 106)


def test_a_position_among_shuffled_sentences_is_exact():
    tokens = sentences(211, "end")
    stream, again = (LaneStream(tokens, 3, 8, random_segments=True, seed=9) for _ in range(2))
    position, seen = stream.start(), []
    while position.epoch < 2:
        segment = stream.read(position)
        seen.append((position, segment))
        position = segment.next
    for position, segment in reversed(seen):
        assert torch.equal(again.read(position).tokens, segment.tokens)
        assert torch.equal(again.read(position).targets, segment.targets)
    assert not torch.equal(
        LaneStream(tokens, 3, 8, seed=8).read(stream.start()).tokens[:, :5], seen[0][1].tokens[:, :5]
    )


def test_lanes_of_shuffled_sentences_are_contiguous():
    tokens = sentences(101, "both")
    whole = LaneStream(tokens, 1, 11, seed=2)
    lanes = LaneStream(tokens, 4, 11, seed=2)
    flat = torch.cat([each.tokens for each in epoch(whole, whole.start())[0]], dim=1)[0]
    cut = torch.cat([each.tokens for each in epoch(lanes, lanes.start())[0]], dim=1)
    length = len(tokens) // 4
    for lane in range(4):
        assert torch.equal(cut[lane], flat[lane * length : lane * length + length - 1])


def test_the_order_of_sentences_is_fixed_for_all_versions():
    # Published test values of the generator splitmix64: the two numbers that follow state 1234567.
    states = np.array([1234567, 1234567 + 0x9E3779B97F4A7C15], dtype=np.uint64)
    assert module.splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973]
    assert shuffled(8, seed=1, epoch=0).tolist() == [2, 5, 6, 0, 3, 4, 1, 7]
    counts = np.zeros((6, 6))
    for number in range(600):
        counts[shuffled(6, number, 3), np.arange(6)] += 1
    assert counts.min() > 60  # 100 on average: every sentence is about equally likely at every place
