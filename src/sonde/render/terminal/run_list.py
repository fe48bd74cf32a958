"""The list of runs that `sonde runs` prints: steps and ending of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult

from sonde.formatting import counted
from sonde.render.terminal.console import line, paragraph

if TYPE_CHECKING:
    from sonde.runlog.reader import Run

COLORS = {"finished": "green", "running": "cyan", "exception": "red", "killed": "red", "interrupted": "yellow"}


class RunList:
    """Rows of (name, run or the reason why it cannot be read)."""

    def __init__(self, rows: Sequence[tuple[str, Run | str]], *, num_more: int = 0) -> None:
        self.rows, self.num_more = rows, num_more

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(len(name) for name, _ in self.rows) + 2
        for name, run in self.rows:
            if isinstance(run, str):
                yield from paragraph(run, options.max_width, label=(name, ""), indent=width, style="red")
                continue
            ended = run.ended
            steps = counted(run.last_step + 1, "step")
            how = f"{ended.how}: {ended.exception}" if ended.exception else f"{ended.how} by {ended.signal}" if ended.signal else ended.how
            yield from paragraph(
                how,
                options.max_width,
                label=(f"{name:<{width}}{steps:>14}  ", ""),
                indent=width + 16,
                style=COLORS.get(ended.how, ""),
            )
        if self.num_more:
            yield line((f"and {counted(self.num_more, 'run')} more: sonde runs -n {len(self.rows) + self.num_more}", "dim"))
