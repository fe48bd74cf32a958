"""`sonde explain`: the page of a rule."""

import difflib

import click

from sonde.cli._terminal import open_terminal
from sonde.errors import SondeError


@click.command()
@click.argument("rule", required=False)
def explain(rule: str | None) -> None:
    """Show what a rule finds, how, and what to do.

    \b
    Example:  sonde explain                      (all rules)
              sonde explain missing-zero-grad
    """
    from sonde.comparison import baseline_check
    from sonde.render.terminal.rule_page import RuleIndex, RulePage
    from sonde.rules.registry import all_rules

    pages = {each.name: (each.explains, each.page) for each in all_rules()}
    pages[baseline_check.RULE] = ((), baseline_check.__doc__ or "")  # evaluated only if a baseline is given
    if rule is None:
        open_terminal().print(RuleIndex([(name, page) for name, (_, page) in pages.items()]))
        return
    name = rule.strip().lower().replace("_", "-")
    if name not in pages:
        near = difflib.get_close_matches(name, pages, n=3, cutoff=0.4)
        hint = f"Nearest: {', '.join(near)}" if near else "All of them: sonde explain"
        raise SondeError(f"there is no rule {rule!r}.\n{hint}")
    explains, page = pages[name]
    open_terminal().print(RulePage(name, page, explains))
