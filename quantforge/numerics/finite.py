"""Checks of values: that they are numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def finite(values: Tensor) -> bool:
    """Return whether no value is a NaN or an infinity; nothing as large as ``values`` is made."""
    return not values.numel() or all(math.isfinite(limit) for limit in values.aminmax())
