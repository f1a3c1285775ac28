"""Claims about made-up results, whose verdicts are obvious or can be computed by hand."""

import math

import pytest

from txl_lab.paper.claims import above, all_of, below, difference, higher, lower, no_worse


def results(**rows):
    return {key: {"quality": values, "length": values} for key, values in rows.items()}


def outcome(judge, **rows):
    return judge(results(**rows), {}).outcome


def test_margin_is_half_of_students_confidence_interval():
    # Both rows have variance 0.02; pooled 0.02; standard error sqrt(0.02 * (1/2 + 1/2)); t(0.975, 2) = 4.30.
    found = difference([1.0, 1.2], [2.0, 2.2])
    assert found is not None
    assert found.value == pytest.approx(1.0)
    assert found.margin == pytest.approx(4.30 * math.sqrt(0.02))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((10.0, 10.1), (12.0, 12.1), "holds"),
        ((12.0, 12.1), (10.0, 10.1), "does not hold"),
        ((10.0, 12.0), (10.5, 12.6), "undecided"),
        ((10.0,), (12.0,), "undecided"),
    ],
)
def test_lower(ours, theirs, expected):
    assert outcome(lower("ours", "theirs"), ours=ours, theirs=theirs) == expected
    mirrored = {"holds": "does not hold", "does not hold": "holds"}.get(expected, expected)
    assert outcome(higher("ours", "theirs", measure="length"), ours=ours, theirs=theirs) == mirrored


def test_lower_than_each_of_several():
    judge = lower("ours", "first", "second")
    assert outcome(judge, ours=[1.0, 1.1], first=[3.0, 3.1], second=[4.0, 4.1]) == "holds"
    assert outcome(judge, ours=[1.0, 1.1], first=[3.0, 3.1], second=[0.2, 0.3]) == "does not hold"
    assert outcome(judge, ours=[1.0, 1.1], first=[3.0, 3.1], second=[1.0, 1.2]) == "undecided"


def test_what_is_missing_leaves_a_claim_undecided_and_is_named():
    verdict = lower("ours", "first", "second")(results(ours=[1.0, 1.1], first=[3.0, 3.1], second=[]), {})
    assert verdict.outcome == "undecided"
    assert "no result for second" in verdict.reason
    assert outcome(lower("ours", "first"), first=[1.0, 2.0]) == "undecided"


def test_a_missing_row_does_not_save_a_claim_that_another_refutes():
    refuted = {"ours": [3.0, 3.1], "first": [1.0, 1.1]}
    for second in ([], [1.0], [1.0, 1.1]):
        assert outcome(lower("ours", "first", "second"), **refuted, second=second) == "does not hold"
    verdict = lower("ours", "first", "second")(results(ours=[1.0, 1.1], first=[3.0, 3.1], second=[3.0]), {})
    assert verdict.outcome == "undecided"
    assert "second: one seed" in verdict.reason


def test_the_rows_that_have_one_seed_are_named():
    for ours, first, named in (
        ([1.0], [2.0, 3.0], "ours"),
        ([1.0, 1.1], [2.0], "first"),
        ([1.0], [2.0], "first, ours"),
    ):
        verdict = lower("ours", "first")(results(ours=ours, first=first), {})
        assert verdict.reason == f"{named}: one seed has no spread to judge by"


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ((1.00, 1.001), "holds"),
        ((1.005, 1.006), "holds"),
        ((1.02, 1.021), "does not hold"),
        ((0.95, 1.06), "undecided"),
        ((1.0,), "undecided"),
    ],
)
def test_no_worse_by_more_than_a_hundredth(ours, expected):
    assert outcome(no_worse("ours", "theirs", tolerance=0.01), ours=ours, theirs=(1.0, 1.001)) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1900.0, 1901.0), "holds"),
        ((1700.0, 1701.0), "does not hold"),
        ((1700.0, 1900.0), "undecided"),
        ((1900.0,), "undecided"),
        ((), "undecided"),
    ],
)
def test_above_a_number(values, expected):
    assert outcome(above("ours", 1800.0, "length"), ours=values) == expected
    mirrored = {"holds": "does not hold", "does not hold": "holds"}.get(expected, expected)
    assert outcome(below("ours", 1800.0), ours=values) == mirrored


def test_above_a_number_that_the_results_hold():
    judge = above("ours", "training", "attention")
    assert judge({"ours": {"attention": [96, 96], "training": [32, 32]}}, {}).outcome == "holds"
    assert judge({"ours": {"attention": [16, 16], "training": [32, 32]}}, {}).outcome == "does not hold"
    assert judge({"ours": {"attention": [32, 32], "training": [32, 32]}}, {}).outcome == "undecided"


def test_neighbours_on_a_grid_of_lengths_are_not_different():
    grids, longer = {"length": [50, 100, 150]}, higher("ours", "theirs", measure="length")
    agreed = {"theirs": {"length": [50, 50]}}
    assert longer({"ours": {"length": [100, 100]}} | agreed, {}).outcome == "holds"
    verdict = longer({"ours": {"length": [100, 100]}} | agreed, grids)
    assert verdict.outcome == "undecided"
    assert "no length between them" in verdict.reason
    assert longer({"ours": {"length": [150, 150]}} | agreed, grids).outcome == "holds"
    beyond = above("ours", 50.0, "length")
    assert beyond({"ours": {"length": [100, 100]}}, grids).outcome == "undecided"
    assert beyond({"ours": {"length": [150, 150]}}, grids).outcome == "holds"
    assert above("ours", 120.0, "length")({"ours": {"length": [100, 100]}}, grids).outcome == "undecided"


def test_a_whole_is_as_weak_as_its_weakest_part():
    holds, fails = above("a", 1.0, "length"), above("b", 1.0, "length")
    assert outcome(all_of(holds, fails), a=[2.0, 2.1], b=[0.1, 0.2]) == "does not hold"
    assert outcome(all_of(holds, fails), a=[2.0, 2.1], b=[0.5, 2.0]) == "undecided"
    assert outcome(all_of(holds, fails), a=[2.0, 2.1], b=[2.0, 2.1]) == "holds"


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([50, 150], [350, 50], "b − a = +100 ± 680"),
        ([1000, 1000.5], [2500, 2500.5], "b − a = +1,500 ± 1.5"),
        ([1.021, 1.023], [1.1, 1.103], "b − a = +0.0795 ± 0.0078"),
    ],
)
def test_numbers_are_written_out(ours, theirs, said):
    results = {"a": {"quality": ours}, "b": {"quality": theirs}}
    assert lower("a", "b")(results, {}).reason == said
