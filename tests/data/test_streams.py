from __future__ import annotations

import numpy as np
import pytest
import torch

from txl.data.streams import LaneStream, StreamPosition
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


def test_a_lane_of_whole_segments_has_no_empty_one_at_its_end():
    stream = LaneStream(np.arange(2 * 11), 2, 5)
    segments, _ = epoch(stream, stream.start())
    assert [segment.tokens.shape[1] for segment in segments] == [5, 5]


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
