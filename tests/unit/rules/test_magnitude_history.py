"""How large a tensor was in the last observed steps."""

from sonde.events import Kind
from sonde.rules._shared.magnitude_history import NUM_STEPS, MagnitudeHistory
from synthetic_steps import LAYERS, row, training, view_of


def history(step=11, **given):
    frames = lambda at: {Kind.ACTIVATION: {path: row(min=-1.0 - at, max=0.5) for path in LAYERS}}  # noqa: E731
    with view_of(training(40, frames=frames)) as view:
        return MagnitudeHistory.of(view, Kind.ACTIVATION, "model.head", step=step, **given)


def test_it_holds_the_last_observed_steps_up_to_a_step():
    found = history()
    assert [each.step for each in found.magnitudes] == list(range(12 - NUM_STEPS, 12))
    assert found.magnitudes[-1].largest == 12.0


def test_a_size_that_is_known_for_a_step_without_observation_ends_it():
    found = history(step=13, magnitude_now=900.0)
    assert [(each.step, each.largest) for each in found.magnitudes[-2:]] == [(11, 12.0), (13, 900.0)]
    assert "went from 6 at step 5 to 900 at step 13" in found.growth


def test_a_size_that_hardly_changes_is_no_growth():
    assert history().growth == ""


def test_a_tensor_that_was_not_measured_has_none():
    with view_of(training(40)) as view:
        assert MagnitudeHistory.of(view, Kind.ACTIVATION, "model.nobody", step=11) is None
