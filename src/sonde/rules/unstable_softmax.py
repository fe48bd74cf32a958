"""A softmax or a log-sum-exp written by hand overflows.

What it finds    exp(), then a sum, then a division or a logarithm, on scores that are too large for exp().
Why it matters   exp(89) is Inf in float32 (exp(12) in float16), and Inf / Inf is NaN: the loss is gone as soon as the scores grow.
How it knows     the look back found that exp() made the first bad number, and that it is part of such a formula.
Known problems   scores that grow without bound because the training diverges end here too; then lr-divergence is named first.
Fix              torch.softmax, torch.log_softmax, torch.logsumexp or F.cross_entropy on the scores themselves.
"""

from __future__ import annotations

from typing import ClassVar

from sonde.rules.origins import OfAnOrigin


class UnstableSoftmax(OfAnOrigin):
    name: ClassVar[str] = "unstable-softmax"
