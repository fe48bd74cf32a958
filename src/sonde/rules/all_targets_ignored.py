"""Every label of a batch is ignored, so the loss is a mean over nothing.

What it finds    cross_entropy or nll_loss whose every target is ignore_index (a batch of padding, a window without labels).
Why it matters   0 / 0 is NaN: averages and early stopping break, and with an update the weights may follow.
How it knows     the look back found the loss function that made the NaN and counted its targets.
Known problems   none known.
Fix              skip such batches, or use reduction="sum" and divide by the number of targets that count, at least one.
"""

from __future__ import annotations

from typing import ClassVar

from sonde.rules.origins import OfAnOrigin


class AllTargetsIgnored(OfAnOrigin):
    name: ClassVar[str] = "all-targets-ignored"
