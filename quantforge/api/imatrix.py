"""Importance of columns, observed on calibration text and written for llama.cpp's tools and for us."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quantforge.api.plan import plan
from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.execution.progress import phase, report_to
from quantforge.files.disk import check_new
from quantforge.files.hub import resolve
from quantforge.formats.match_quantized import drop_tied_copy
from quantforge.formats.open_model import open_plain_source
from quantforge.planning.format_choice import choose_format
from quantforge.planning.local_paths import strip_local_paths
from quantforge.planning.planner import make_plan
from quantforge.planning.source_views import single_experts
from quantforge.quantizers import RTN
from quantforge.recipe import IMATRIX, NO_DATA, Recipe
from quantforge.settings import Settings, check_device


def with_importance(
    model: str | Path, recipe: Recipe, settings: Settings, given: str | Path | None
) -> tuple[Recipe, Settings]:
    """Take importance from a file, which is made first where it is missing; errors as `plan` and `make_imatrix`."""
    if given is None:
        return recipe, settings
    file = Path(given)
    known = replace(recipe, calibration=replace(recipe.calibration, source=f"{IMATRIX}{file.name}"))
    if not file.exists():
        check_new(file, "--imatrix")
        plan(model, known, settings)  # refuses before anything is observed
        text = recipe.calibration
        text = replace(text, source="builtin") if text.source == NO_DATA else text
        with phase("importance", 0.5):
            make_imatrix(model, replace(recipe, calibration=text), file, settings)
        settings.note(f"--imatrix {file}: made, by {text.source}; quantforge inspect {file}")
    return known, replace(settings, imatrix=file)


@check_arguments()
@torch_defaults()
def make_imatrix(model: str | Path, recipe: Recipe, out: str | Path, settings: Settings) -> None:
    """Observe the importance of columns on calibration text, and write it for llama.cpp's tools and for us.

    Raises:
        QuantForgeError: as `quantize`; a family that GGUF has no names for.
    """
    check_device(settings.device)
    from quantforge.execution.calibration import draw_calibration_data
    from quantforge.execution.importance import observe_importance
    from quantforge.formats.gguf.importance_file import write_imatrix
    from quantforge.numerics.threads import reproducible

    recipe, settings = strip_local_paths(recipe, settings)
    checkpoint = open_plain_source(resolve(str(model), settings.offline), settings.adapter)
    wanted = replace(recipe, method=RTN, scales="search")
    checkpoint = single_experts(checkpoint, choose_format(wanted)[0].format, wanted)
    planned = make_plan(wanted, checkpoint)
    planned = replace(planned, model_layout=drop_tied_copy(planned.model_layout, checkpoint))
    with report_to(settings.progress), reproducible():
        calibrated = draw_calibration_data(checkpoint, planned, settings)
        place = Path(out).absolute().parent if settings.activations == "disk" else None
        found = observe_importance(checkpoint, planned, calibrated.sample, settings.device, place)
    write_imatrix(Path(out), found)
