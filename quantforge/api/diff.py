"""``diff``: compare two models of any formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.files.hub import resolve_model
from quantforge.formats.open_model import open_model
from quantforge.progress import ProgressListener, ignore_progress, phase, report_to

if TYPE_CHECKING:
    from quantforge.verification.difference import Difference


@check_arguments()
@torch_defaults()
def diff(
    first: str | Path,
    second: str | Path,
    *,
    offline: bool = False,
    progress: ProgressListener = ignore_progress,
) -> Difference:
    """Compare the manifests, tensors, decoded values and files of two models; ``progress`` gets progress reports.

    Raises:
        InputError: a model is missing or cannot be read.
    """
    paths = [resolve_model(str(model), offline) for model in (first, second)]
    for path in paths:
        open_model(path)  # raises for unreadable headers before torch is imported
    from quantforge.verification.difference import difference

    with report_to(progress), phase("comparing", 1.0):
        return difference(*paths)
