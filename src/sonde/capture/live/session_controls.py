"""What a session offers while it runs: thirteen switches, numbers of the user's own, and conditions that flip the switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sonde.capture.live.switches import Switches
from sonde.capture.live.triggers import Triggers
from sonde.config import DebugConfig
from sonde.errors import SondeError
from sonde.runlog.switch_file import known


class Controls:
    """What `DebugSession` adds to watching: flipping, while training runs. See `sonde.runlog.switch_file.SWITCHES` for their names."""

    def __init__(self, config: DebugConfig) -> None:
        self._switches = Switches(config)
        self._triggers = Triggers(self._switches, self)

    def enable_debugging(self, switches: str | Iterable[str] | None = None) -> None:
        """Turn switches on, all of them where none is named; from the next step on where one is under way."""
        self._switches.ask(switches, True, "session")

    def disable_debugging(self, switches: str | Iterable[str] | None = None) -> None:
        """Turn switches off again, all of them where none is named."""
        self._switches.ask(switches, False, "session")

    def get_debugging_status(self) -> dict[str, dict[str, Any]]:
        """For each switch: is it on, since which step, by whom, what has it cost (Sonde's own time), how many lines did it write."""
        return self._switches.status()

    def metric(self, name: str, function: Callable[..., Any], *, every: int = 1) -> None:
        """Keep a number of your own with the steps: what `function()` or `function(session)` returns after every n-th of them. What it does
        with the model is not taken for training; an error of its own does not reach the training."""
        self._triggers.add_metric(name, function, every)

    def when(self, condition: str, then: str | Iterable[str], *, for_steps: int = 20) -> None:
        """Turn switches on when a condition holds at the end of a step, and off again when it has not held for so many steps.

        "loss_spike", "gradient_spike", "nonfinite", "slow_step", or one of your own: "loss > 3 and step > 100".
        """
        switches = known(then)
        if not switches:
            raise SondeError(f"nothing would happen when {condition}: name the switches to turn on, as in then=['gradient_norms'].")
        self._triggers.add_trigger(condition, switches, for_steps)
