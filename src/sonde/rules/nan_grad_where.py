"""torch.where() hides a NaN in the forward, and the backward brings it back.

What it finds    where(x > 0, sqrt(x), 0) and the like: the branch that is not chosen is computed all the same.
Why it matters   its gradient is zero times infinity, which is NaN. The loss of that step looks normal; one update later every weight is
                 NaN.
How it knows     the look back ran the backward again: the operation that made the first NaN was given a gradient of zero by a where().
Known problems   none known.
Fix              make the argument safe before the operation: sqrt(where(x > 0, x, 1)), and choose afterwards.
"""

from __future__ import annotations

from typing import ClassVar

from sonde.rules.origins import OfAnOrigin


class NanGradWhere(OfAnOrigin):
    name: ClassVar[str] = "nan-grad-where"
