"""The overhead budget, with steps whose cost a test decides."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sonde.capture.choose_observed_steps import FIRST_STEPS, MAX_DUE, START_NS, OverheadBudget, is_milestone

MS = 1_000_000


def simulate(
    budget: OverheadBudget,
    num_steps: int,
    *,
    step_ns: float,
    plain_ns: float,
    observed_ns: float,
    first: int = 0,
    stalls_ns: Mapping[int, float] | None = None,
) -> list[bool]:
    """Which steps are observed, if the training itself takes `step_ns`, and Sonde `plain_ns`, or `observed_ns` where it observes; and as
    much more as it is held up at that step."""
    observed_steps = []
    for step in range(first, first + num_steps):
        observed = budget.should_observe(step)
        own = (observed_ns if observed else plain_ns) + (stalls_ns or {}).get(step, 0)
        budget.on_step_end(step_ns=step_ns + own, own_ns=own, observed=observed)
        observed_steps.append(observed)
    return observed_steps


def overhead(observed_steps: list[bool], *, step_ns: float, plain_ns: float, observed_ns: float) -> float:
    own = sum(observed_ns if observed else plain_ns for observed in observed_steps)
    return own / (len(observed_steps) * step_ns)


def test_the_first_steps_are_always_observed() -> None:
    observed_steps = simulate(OverheadBudget(0.001), 50, step_ns=MS, plain_ns=0, observed_ns=1000 * MS)
    assert observed_steps[:FIRST_STEPS] == [True] * FIRST_STEPS
    assert [step for step in range(FIRST_STEPS, 50) if observed_steps[step]] == [3, 4, 6, 8, 12, 16, 24, 32, 48]  # and milestones


@pytest.mark.parametrize("every", [1, 2, 7])
def test_a_fixed_interval_is_followed_whatever_it_costs(every: int) -> None:
    observed_steps = simulate(OverheadBudget(0.001, every), 30, step_ns=MS, plain_ns=MS, observed_ns=1000 * MS)
    assert observed_steps == [step % every == 0 for step in range(30)]


@given(
    budget=st.floats(0.005, 0.2),
    step_ms=st.floats(1, 500),
    observed_share=st.floats(0.01, 2.0),
    plain_share=st.floats(0.0, 0.002),
)
def test_over_a_long_run_the_overhead_stays_within_the_budget(
    budget: float, step_ms: float, observed_share: float, plain_share: float
) -> None:
    step_ns = step_ms * MS
    costs = {"step_ns": step_ns, "plain_ns": plain_share * step_ns, "observed_ns": (plain_share + observed_share) * step_ns}
    observed_steps = simulate(OverheadBudget(budget), 3000, **costs)
    num_owed = 3 * FIRST_STEPS + sum(map(is_milestone, range(3000)))
    start = (START_NS + num_owed * costs["observed_ns"]) / (3000 * step_ns)  # what a run may spend at any price
    assert overhead(observed_steps, **costs) <= budget + start + 1e-9


@given(stalls_ms=st.dictionaries(st.integers(0, 900), st.floats(0.1, 500), max_size=10))
@example(stalls_ms={757: 20})  # just before a step that was going to be observed
@example(stalls_ms={5: 100})  # the first that is not observed
@example(stalls_ms={756: 1.5, 757: 7})
@example(stalls_ms={488: 374.0, 757: 88.0})  # the average is below an observed step, but not by much
def test_steps_that_were_slow_by_chance_do_not_make_observing_seem_free(stalls_ms: dict[int, float]) -> None:
    costs = {"step_ns": 8 * MS, "plain_ns": MS / 10, "observed_ns": 2 * MS}
    usual = simulate(OverheadBudget(0.02), 3000, **costs)
    observed_steps = simulate(OverheadBudget(0.02), 3000, **costs, stalls_ns={step: ms * MS for step, ms in stalls_ms.items()})
    assert sum(observed_steps[1000:]) < 1.5 * sum(usual[1000:])


def test_cheap_observing_happens_at_every_step() -> None:
    assert all(simulate(OverheadBudget(0.02), 200, step_ns=100 * MS, plain_ns=0, observed_ns=MS))


def test_expensive_observing_still_happens_now_and_then() -> None:
    observed_steps = simulate(OverheadBudget(0.02), 2000, step_ns=10 * MS, plain_ns=MS // 10, observed_ns=5 * MS)
    assert 10 < sum(observed_steps[100:]) < 200


def test_where_plain_steps_use_up_the_budget_some_steps_are_still_observed() -> None:
    observed_steps = simulate(OverheadBudget(0.02), 5000, step_ns=MS, plain_ns=MS // 20, observed_ns=MS)
    assert sum(observed_steps[1000:]) >= 10


def test_a_long_pause_buys_no_burst_of_slow_steps() -> None:
    budget = OverheadBudget(0.02)
    simulate(budget, 200, step_ns=10 * MS, plain_ns=0, observed_ns=20 * MS)
    budget.on_step_end(step_ns=3600e9, own_ns=0, observed=False)  # an hour of validation
    observed_steps = simulate(budget, 20, first=201, step_ns=10 * MS, plain_ns=0, observed_ns=20 * MS)
    assert sum(observed_steps) <= 4


def test_after_a_change_the_next_steps_are_observed_again() -> None:
    budget = OverheadBudget(0.001)
    simulate(budget, 50, step_ns=MS, plain_ns=0, observed_ns=1000 * MS)
    budget.observe_closely()
    observed_steps = simulate(budget, 10, first=50, step_ns=MS, plain_ns=0, observed_ns=1000 * MS)
    assert observed_steps == [True] * FIRST_STEPS + [False] * (10 - FIRST_STEPS)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3])
def test_a_sampling_rate_is_the_share_of_all_steps_if_the_budget_allows_it(rate: float) -> None:
    costs = {"step_ns": 100 * MS, "plain_ns": 0.0, "observed_ns": MS}  # 1 % of a step, so the budget of 2 % allows every one
    observed_steps = simulate(OverheadBudget(0.02, sampling_rate=rate), 300, **costs)
    assert sum(observed_steps) == round(300 * rate)
    last = observed_steps[150:]
    assert sum(last) == pytest.approx(150 * rate, abs=1)  # evenly spread
    assert all(sum(last[i : i + 21]) for i in range(0, 126, 21))


def test_a_budget_that_allows_less_than_the_sampling_rate_is_kept() -> None:
    costs = {"step_ns": float(MS), "plain_ns": 0.0, "observed_ns": 2.0 * MS}
    sampled = simulate(OverheadBudget(0.02, sampling_rate=0.5), 3000, **costs)
    assert sampled[100:] == simulate(OverheadBudget(0.02), 3000, **costs)[100:]


def test_a_pause_does_not_make_the_sampling_rate_observe_step_after_step_for_long() -> None:
    costs = {"step_ns": 100.0 * MS, "plain_ns": 0.0, "observed_ns": MS}
    budget = OverheadBudget(0.02, sampling_rate=0.1)
    simulate(budget, 1000, step_ns=MS, plain_ns=0, observed_ns=1000 * MS)  # nothing can be afforded
    assert sum(simulate(budget, 1000, first=1000, **costs)) <= 100 + MAX_DUE + 1
