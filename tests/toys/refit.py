"""Refit of one scale for each group, as toy grids share it."""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.packers.hessian_refit import FixedCodes, ScaleMoments


def refit_scale(scales: Tensor, values: Tensor, held: FixedCodes, dtype: torch.dtype) -> Tensor:
    """Fit the scale of one group, where values are ``scale * value``; return what that gains (see `Refit`).

    Args:
        scales: float32 ``[rows, groups]``, changed in place.
        values: of the codes that are held, in units of the scale, ``[columns, rows]``.
        held: the codes' group.
        dtype: that scales are stored in.
    """
    moments, old = ScaleMoments(values, held), scales[:, held.group].double()
    fitted = moments.fit(old).to(dtype)
    gain = moments.gain(old, fitted.double())
    better = (gain > 0) & fitted.isfinite() & (fitted != 0)
    scales[:, held.group] = torch.where(better, fitted, scales[:, held.group])
    return torch.where(better, gain, 0)
