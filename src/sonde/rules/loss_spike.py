"""The loss leaps far above the usual, and the samples that make it do so.

What it finds    a step whose loss is many times what it was in the steps before: a mislabelled or damaged sample, a batch in other units, a
                 learning rate that was raised too fast.
Why it matters   one such batch can undo hours of training, and every epoch meets it again.
How it knows     a loss is a spike if it leaves the range of the last 64 by ten times the width of that range, grows by half, and undoes
                 a quarter of what has been learnt. Before backward the step is run again without parts of its batch: the samples without
                 which the loss is usual are named, and the input, target or layer in which they depart from the others.
Known problems   a spike that passes is only mentioned. It is a warning where samples of the data make it three times or more, and an error
                 where they made it and the loss never came back. Where a task changes or a learning rate restarts, no sample is to
                 blame, and it stays a mention. Losses on a device are only known later: then nobody can look back.
Fix              look at the samples that are named; clip gradients, so that one batch cannot undo the training.
"""

from __future__ import annotations

from typing import ClassVar

from sonde.rules.spike_words import UNDONE, OfLeaps


class LossSpike(OfLeaps):
    name: ClassVar[str] = "loss-spike"
    explains: ClassVar[tuple[str, ...]] = ("gradient-spike", *UNDONE)
    what: ClassVar[str] = "loss"
