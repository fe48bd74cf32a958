"""Reports, runs and profiles as text and pictures."""

import random

# rich draws a number from Python's generator when it is imported: a script that prints a report must go on with its own numbers.
_state = random.getstate()
import rich.style  # noqa: E402, F401

random.setstate(_state)
