"""The gradient leaps far above the usual while the loss does not, and the samples and the layer that make it do so.

What it finds    a step whose gradient norm is many times what it was in the steps before: a sample near a steep place of the loss (a
                 root at zero, a division by little), a value that the model has not met yet.
Why it matters   the update is as large as the gradient: one of them can undo a training, and nothing of it is seen in the loss before.
How it knows     a norm is a spike if, in logarithms, it leaves the range of the last 64 by four times the width of that range, and is
                 twenty times the usual. Before the update the step is run again without parts of its batch: the samples that make up the
                 gradient are named, and the layer whose gradient they change most.
Known problems   gradients are judged as the optimizer is given them: what was clipped is no spike. One that passes is only mentioned; it is
                 a warning where samples of the data make it three times or more, and an error where they made it and the loss never
                 came back. exploding-gradient speaks of norms that leap all the time.
Fix              clip gradients; look at the samples that are named, and at the arithmetic of the layer.
"""

from __future__ import annotations

from typing import ClassVar

from sonde.rules.spike_words import UNDONE, OfLeaps


class GradientSpike(OfLeaps):
    name: ClassVar[str] = "gradient-spike"
    explains: ClassVar[tuple[str, ...]] = ("loss-spike", *UNDONE)
    what: ClassVar[str] = "gradient"
