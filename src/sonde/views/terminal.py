"""What the views draw on: colours where somebody looks, plain text elsewhere, no wider than a person reads."""

from __future__ import annotations

from typing import IO, NoReturn

from rich.console import Console

WIDEST = 100  # characters; longer lines are hard to follow


class Terminal(Console):
    """A console that takes nothing for markup, and tells its caller when nobody reads any more."""

    def __init__(self, file: IO[str]) -> None:
        super().__init__(file=file, highlight=False, markup=False, emoji=False)
        self.width = min(self.width, WIDEST) if self.is_terminal else WIDEST

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
