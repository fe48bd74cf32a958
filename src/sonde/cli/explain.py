"""`sonde explain`: the page of a rule."""

from __future__ import annotations

import difflib
import sys

import click

from sonde.cli._reading import screen
from sonde.errors import SondeError


@click.command()
@click.argument("rule", required=False)
def explain(rule: str | None) -> None:
    """Show what a rule finds, how it knows, and what to do.

    \b
    Example:  sonde explain                      (all rules)
              sonde explain missing-zero-grad
    """
    from sonde.comparison import departure
    from sonde.rules import RULES
    from sonde.views.page import Index, Page

    # The docstring of a rule's module is its page.
    pages = {each.name: (each.explains, sys.modules[each.__module__].__doc__ or "") for each in RULES}
    pages[departure.RULE] = ((), departure.__doc__ or "")  # judged where a baseline is given, so not one of all runs' rules
    if rule is None:
        screen().print(Index([(name, page) for name, (_, page) in pages.items()]))
        return
    name = rule.strip().lower().replace("_", "-")
    if name not in pages:
        near = difflib.get_close_matches(name, pages, n=3, cutoff=0.4)
        hint = f"Nearest: {', '.join(near)}" if near else "All of them: sonde explain"
        raise SondeError(f"there is no rule {rule!r}.\n{hint}")
    explains, page = pages[name]
    screen().print(Page(name, page, explains))
