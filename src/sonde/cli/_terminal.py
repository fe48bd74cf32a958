"""The terminal that commands print on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonde.render.terminal.console import Terminal


def open_terminal(*, stderr: bool = False) -> Terminal:
    """A console on stdout or stderr. Characters that the locale cannot encode are written as escapes."""
    from sonde.render.terminal.console import Terminal

    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    return Terminal(stream)
