"""Blocks of observed steps: what belongs to a step, and where a block ends."""

from __future__ import annotations

import numpy as np
import pytest
from handmade_logs import WEIGHTS, HandmadeLog

from sonde.events import Kind
from sonde.run_view import Block, Reduction, layer_statistics_in_blocks
from sonde.runlog import log_file_reader


@pytest.fixture
def log(tmp_path):
    return HandmadeLog(tmp_path)


def contents(view, *kinds):
    """The blocks as plain values: the steps, then by kind the sites and the norms."""
    return [
        (block.numbers.tolist(), {kind: (table.site_ids.tolist(), table["l2"].tolist()) for kind, table in block.tables.items()})
        for block in view.blocks(*kinds)
    ]


def test_steps_with_the_same_sites_are_one_block(log):
    for number in range(5):
        if number % 2 == 0:
            log.frame(number, {100: number, 101: 10 + number})
        log.step(number, {"loss": number / 10, "backwards": 1})
    (block,) = log.view().blocks(Kind.GRADIENT)
    assert block.rows.tolist() == block.numbers.tolist() == [0, 2, 4]
    assert block[Kind.GRADIENT]["l2"].tolist() == [[0, 10], [2, 12], [4, 14]]
    assert block.scalar("loss").tolist() == [0.0, 0.2, 0.4]
    assert block.counts("backwards").tolist() == [1, 1, 1]
    assert block[Kind.GRADIENT].sites == [WEIGHTS[100], WEIGHTS[101]]


def test_a_block_ends_where_the_sites_change(log):
    for number, sites in enumerate([(100,), (100,), (100, 101), (100,)]):
        log.frame(number, dict.fromkeys(sites, float(number)))
        log.step(number)
    assert contents(log.view(), Kind.GRADIENT) == [
        ([0, 1], {Kind.GRADIENT: ([100], [[0], [1]])}),
        ([2], {Kind.GRADIENT: ([100, 101], [[2, 2]])}),
        ([3], {Kind.GRADIENT: ([100], [[3]])}),
    ]


def test_a_kind_that_some_steps_lack_is_absent_in_their_blocks(log):
    for number in range(4):
        log.frame(number, {100: number})
        if number in (1, 2):
            log.frame(number, {100: -number}, kind=Kind.UPDATE)
        log.step(number)
    view = log.view()
    assert contents(view, Kind.GRADIENT, Kind.UPDATE) == [
        ([0], {Kind.GRADIENT: ([100], [[0]])}),
        ([1, 2], {Kind.GRADIENT: ([100], [[1], [2]]), Kind.UPDATE: ([100], [[-1], [-2]])}),
        ([3], {Kind.GRADIENT: ([100], [[3]])}),
    ]
    assert [block.numbers.tolist() for block in view.blocks(Kind.UPDATE)] == [[1, 2]]
    first = next(view.blocks(Kind.GRADIENT, Kind.UPDATE))
    assert first.get(Kind.UPDATE) is None
    assert Kind.UPDATE not in first


def test_frames_of_an_incomplete_step_are_left_out(log):
    log.frame(0, {100: 1})
    log.step(0)
    log.frame(1, {100: 2})  # the step after it never ends
    log.frame(2, {100: 3})
    log.step(2)
    log.frame(3, {100: 4})
    assert contents(log.view(), Kind.GRADIENT) == [([0, 2], {Kind.GRADIENT: ([100], [[1], [3]])})]


def test_a_frame_that_follows_the_end_of_its_step_is_not_part_of_it(log):
    log.step(0)
    log.frame(0, {100: 1})
    log.step(1)
    assert contents(log.view(), Kind.GRADIENT) == []


def test_of_a_repeated_step_the_first_row_and_its_frames_count(log):
    for norm in (1, 2):
        log.frame(7, {100: norm})
        log.step(7, {"loss": norm})
    log.frame(8, {100: 3})
    log.step(8)
    assert contents(log.view(), Kind.GRADIENT) == [([7, 8], {Kind.GRADIENT: ([100], [[1], [3]])})]


def test_of_two_frames_of_a_kind_in_one_step_the_last_one_counts(log):
    log.frame(0, {100: 1})
    log.frame(0, {100: 2})
    log.step(0)
    assert contents(log.view(), Kind.GRADIENT) == [([0], {Kind.GRADIENT: ([100], [[2]])})]


def test_a_site_that_the_log_does_not_describe_is_unknown(log):
    log.frame(0, {100: 1, 555: 2})
    log.step(0)
    (block,) = log.view().blocks(Kind.GRADIENT)
    assert block[Kind.GRADIENT].sites == [WEIGHTS[100], None]
    assert block[Kind.GRADIENT].is_known.tolist() == [True, False]


def test_blocks_are_limited_in_bytes(log, monkeypatch):
    for number in range(10):
        log.frame(number, {100: number})
        log.step(number)
    whole = next(log.view().blocks(Kind.GRADIENT))[Kind.GRADIENT]["l2"]
    monkeypatch.setattr(layer_statistics_in_blocks, "MAX_BYTES", 3 * _length_of_a_frame(log))
    found = list(log.view().blocks(Kind.GRADIENT))
    assert [len(block) for block in found] == [3, 3, 3, 1]
    assert np.array_equal(np.concatenate([block[Kind.GRADIENT]["l2"] for block in found]), whole)


def _length_of_a_frame(log):
    (process,) = log.run().processes
    return int(process.segments[0].index().lengths[0])


def test_a_frame_longer_than_the_limit_is_a_block_of_its_own(log, monkeypatch):
    monkeypatch.setattr(layer_statistics_in_blocks, "MAX_BYTES", 1)
    for number in range(3):
        log.frame(number, {100: number, 101: number})
        log.step(number)
    assert [len(block) for block in log.view().blocks(Kind.GRADIENT)] == [1, 1, 1]


def test_frames_beyond_the_limit_of_layouts_are_read_one_by_one(log, monkeypatch):
    monkeypatch.setattr(log_file_reader, "MAX_LAYOUT_BYTES", 0)
    for number in range(3):
        log.frame(number, {100: number, 101: 2 * number})
        log.step(number)
    assert contents(log.view(), Kind.GRADIENT) == [
        ([number], {Kind.GRADIENT: ([100, 101], [[number, 2 * number]])}) for number in range(3)
    ]


def test_values_of_a_file_that_was_cut_short_are_nan(log):
    for number in range(3):
        log.frame(number, {100: 1.0})
        log.step(number)
    view = log.view()
    log.path.write_bytes(log.path.read_bytes()[:-200])
    norms = np.concatenate([block[Kind.GRADIENT]["l2"][:, 0] for block in view.blocks(Kind.GRADIENT)])
    assert norms[0] == 1.0
    assert np.isnan(norms[-1])


# ---- reductions


def collecting(*kinds):
    """A reduction that lists the steps of its blocks."""

    def reduce(block: Block, state: list) -> list:
        return [*state, *block.numbers.tolist()]

    return Reduction(kinds, list, reduce)


def test_reductions_of_several_kinds_get_the_steps_that_concern_them(log):
    for number in range(4):
        log.frame(number, {100: number}, kind=Kind.GRADIENT if number % 2 else Kind.ACTIVATION)
        log.step(number)
    view = log.view()
    gradients, activations, both = collecting(Kind.GRADIENT), collecting(Kind.ACTIVATION), collecting(Kind.GRADIENT, Kind.ACTIVATION)
    view.reduce_together([gradients, activations, both])
    assert [view.reduced(each) for each in (gradients, activations, both)] == [[1, 3], [0, 2], [0, 1, 2, 3]]


def test_a_reduction_without_blocks_has_its_initial_state(log):
    log.step(0)
    assert log.view().reduced(collecting(Kind.GRADIENT)) == []


def test_a_reduction_is_computed_once(log):
    log.frame(0, {100: 1})
    log.step(0)
    view, calls = log.view(), []
    counting = Reduction((Kind.GRADIENT,), int, lambda block, state: calls.append(block) or state + 1)
    view.reduce_together([counting])
    assert (view.reduced(counting), view.reduced(counting), len(calls)) == (1, 1, 1)


def test_the_error_of_a_reduction_is_raised_to_its_own_rule_only(log):
    log.frame(0, {100: 1})
    log.step(0)
    view = log.view()
    failing, healthy = Reduction((Kind.GRADIENT,), list, lambda block, state: 1 / 0), collecting(Kind.GRADIENT)
    view.reduce_together([failing, healthy])
    assert view.reduced(healthy) == [0]
    with pytest.raises(ZeroDivisionError):
        view.reduced(failing)
