"""How long an epoch is, in updates, as far as the run knows: from the passes over a DataLoader, from what a framework says, or from how far
evaluations lie apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sonde.events import Step
from sonde.rules.activity import count

FEWEST = 3  # beginnings: two of them may be a trial and the first epoch
MAX_LOADERS = 50
MAX_MADE_ANEW = 2000  # as many passes as are told


@dataclass(slots=True)
class Spacing:
    """Beginnings at different steps: how many, from where to where."""

    num: int = 0
    first: int = -1
    last: int = -1

    def see(self, step: int) -> None:
        if step == self.last:
            return
        if self.num == 0:
            self.first = step
        self.num += 1
        self.last = step

    @property
    def length(self) -> float:
        return (self.last - self.first) / (self.num - 1) if self.num >= FEWEST else 0.0


@dataclass(slots=True)
class Rounds:
    """The loop of epochs in the user's code, around one loader."""

    planned: int
    loop: str
    breaks: list[str]
    num: int = 0  # passes, one in each round
    regular: bool = True


@dataclass(slots=True)
class Epochs:
    loaders: dict[int, Spacing] = field(default_factory=dict)
    rounds: dict[int, Rounds] = field(default_factory=dict)
    num_batches: dict[int, int] = field(default_factory=dict)
    framework: Spacing = field(default_factory=Spacing)
    evaluations: Spacing = field(default_factory=Spacing)
    made_anew: dict[int, int] = field(default_factory=dict)  # loaders of later rounds, and the one of the first that they stand for

    def see(self, step: Step) -> None:
        for event in step.events:
            if event.kind == "pass":
                self._pass(event.step, event.data)
            elif event.kind == "epoch":
                self.framework.see(event.step)
        if count(step, "eval_forwards"):
            self.evaluations.see(step.number)

    def _pass(self, step: int, data: Mapping[str, Any]) -> None:
        loader = data.get("loader")
        if not isinstance(loader, int):
            return
        again = self._made_again(loader, data)
        loader = again if again is not None else loader
        if loader not in self.loaders and len(self.loaders) >= MAX_LOADERS:
            return
        self.loaders.setdefault(loader, Spacing()).see(step)
        if isinstance(num_batches := data.get("num_batches"), int):
            self.num_batches[loader] = num_batches
        planned, at = data.get("planned"), data.get("at")
        known = self.rounds.get(loader)
        if known is None:
            named = [str(each) for each in data.get("breaks", ())]
            known = self.rounds[loader] = Rounds(planned if isinstance(planned, int) else 0, str(data.get("loop", "")), named)
        is_next = at == known.num and (again is not None or data.get("num") == known.num + 1) and not data.get("last_told")
        known.regular = known.regular and planned == known.planned and is_next
        known.num += 1

    def _made_again(self, loader: int, data: Mapping[str, Any]) -> int | None:
        """`for x, y in DataLoader(…):` makes another loader in each round of the loop of epochs: the one of the first round, or None."""
        if loader not in self.loaders and loader not in self.made_anew and data.get("loop") and len(self.made_anew) < MAX_MADE_ANEW:
            for first, rounds in self.rounds.items():
                is_alike = rounds.loop == data["loop"] and self.num_batches.get(first) == data.get("num_batches")
                if is_alike and rounds.regular and rounds.num == data.get("at") and data.get("num") == 1:
                    self.made_anew[loader] = first
                    break
        return self.made_anew.get(loader)

    @property
    def sure_length(self) -> float:
        """Updates in a pass over the data; 0 where it is not known."""
        # Beside the loader that trains there may be others that are short and begun more often.
        return max((spacing.length for spacing in self.loaders.values()), default=0.0) or self.framework.length

    @property
    def length(self) -> float:
        """The same, or from evaluation to evaluation, which most loops make once per epoch."""
        return self.sure_length or self.evaluations.length

    @property
    def num(self) -> int:
        """Epochs that were begun; 0 where that is not known."""
        spacings = [*self.loaders.values(), self.framework, self.evaluations]
        return next((each.num for each in spacings if each.length and each.length == self.length), 0)

    @property
    def course(self) -> Rounds | None:
        """The last loop of epochs, where one is known: with a loader that is begun once in each of its rounds."""
        known = [each for each in self.rounds.values() if each.regular and each.planned > 0 and each.num]
        return max((each for each in known if each.loop == known[-1].loop), key=lambda each: each.num, default=None)

    @property
    def planned(self) -> int:
        return self.course.planned if self.course else 0

    def is_beyond_first(self, num_backwards: int) -> bool:
        """At least one pass over the data is known to be over; True also where nothing is known of passes."""
        if any(spacing.num >= FEWEST for spacing in (*self.loaders.values(), self.framework)):
            return True
        if self.loaders:
            return bool(self.num_batches) and num_backwards >= max(self.num_batches.values())
        return True
