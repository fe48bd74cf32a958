"""Facts about schedulers that are created and not stepped, for the rules about them."""

from sonde.rules.rule import NotEvaluated
from sonde.run_view import RunView

ENOUGH = 40  # updates: a shorter run is a trial, and warm-ups of ten or twenty updates are common
SMALL = 0.1  # of the initial rate: a warm-up begins there, a schedule that only reduces the rate does not
FEWEST_EPOCHS = 3
NOT_COUNTED = NotEvaluated("a scheduler of your own class has its own step(), whose calls are not counted")
NOT_OVERDUE = NotEvaluated("the first epoch is not over, and the scheduler may be stepped after it")


def is_overdue(view: RunView) -> bool:
    """A scheduler that is not stepped by now will not be stepped: an epoch is over, or the program."""
    epochs, has_finished = view.epochs, view.schedule.has_finished
    if epochs.loaders or epochs.framework.num:
        return epochs.is_beyond_first(view.calls["backwards"]) and (has_finished or epochs.num >= FEWEST_EPOCHS)
    return has_finished or epochs.evaluations.num > FEWEST_EPOCHS
