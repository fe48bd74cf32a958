"""What a rule is: a fold over steps that can be asked for its answer at any time.

A rule sees every step in order and keeps bounded state, so the same code judges a run that is still going and one that ended, a hundred
steps or a million. It has three answers: it *found* something, all is *clear*, or it could not tell and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from sonde.events import Finding, Step


@dataclass(frozen=True, slots=True)
class Clear:
    """The rule had what it needs and found nothing."""


@dataclass(frozen=True, slots=True)
class NotEvaluated:
    """The rule could not tell."""

    reason: str  # reads well after "not evaluated: "


Answer = Sequence[Finding] | Clear | NotEvaluated


class Rule(Protocol):
    """One defect. The module's docstring is its page (`sonde explain`)."""

    name: ClassVar[str]
    explains: ClassVar[tuple[str, ...]]  # rules whose findings are mere consequences when this one found something

    def see(self, step: Step) -> None: ...

    def answer(self) -> Answer: ...
