"""Importance matrices (imatrix): measured on calibration text, written in llama.cpp's format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quantforge.api.plan import plan
from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.files.disk import check_new_file
from quantforge.files.hub import resolve_model
from quantforge.formats.match_quantized import drop_tied_copy
from quantforge.formats.open_model import open_plain_source
from quantforge.planning.format_choice import choose_format
from quantforge.planning.local_paths import strip_local_paths
from quantforge.planning.planner import make_plan
from quantforge.planning.source_views import single_experts
from quantforge.progress import phase, report_to
from quantforge.quantizers import RTN
from quantforge.recipe import IMATRIX, NO_DATA, Recipe
from quantforge.settings import Settings, check_device


def add_importance_file(
    model: str | Path, recipe: Recipe, settings: Settings, path: str | Path | None
) -> tuple[Recipe, Settings]:
    """Return recipe and settings that use an imatrix file, made first if missing; errors as `make_imatrix`."""
    if path is None:
        return recipe, settings
    imatrix_path = Path(path)
    recipe_with_file = replace(
        recipe, calibration=replace(recipe.calibration, source=f"{IMATRIX}{imatrix_path.name}")
    )
    if not imatrix_path.exists():
        check_new_file(imatrix_path, "--imatrix")
        plan(model, recipe_with_file, settings)  # raises before anything is measured
        calibration = recipe.calibration
        calibration = (
            replace(calibration, source="builtin") if calibration.source == NO_DATA else calibration
        )
        with phase("importance", 0.5):
            make_imatrix(model, replace(recipe, calibration=calibration), imatrix_path, settings)
        settings.note(
            f"--imatrix {imatrix_path}: made, by {calibration.source}; quantforge inspect {imatrix_path}"
        )
    return recipe_with_file, replace(settings, imatrix=imatrix_path)


@check_arguments()
@torch_defaults()
def make_imatrix(model: str | Path, recipe: Recipe, out: str | Path, settings: Settings) -> None:
    """Measure the importance of input columns on calibration text, and write it as an imatrix file.

    Raises:
        QuantForgeError: as `quantize`, or GGUF has no tensor names for the model family.
    """
    check_device(settings.device)
    from quantforge.execution.calibration import draw_calibration_data
    from quantforge.execution.importance import observe_importance
    from quantforge.formats.gguf.importance_file import write_imatrix
    from quantforge.numerics.threads import reproducible

    recipe, settings = strip_local_paths(recipe, settings)
    checkpoint = open_plain_source(resolve_model(str(model), settings.offline), settings.adapter)
    plain_recipe = replace(recipe, method=RTN, scales="search")
    checkpoint = single_experts(checkpoint, choose_format(plain_recipe)[0].format, plain_recipe)
    planned = make_plan(plain_recipe, checkpoint)
    planned = replace(planned, model_layout=drop_tied_copy(planned.model_layout, checkpoint))
    with report_to(settings.progress), reproducible():
        calibration = draw_calibration_data(checkpoint, planned, settings)
        scratch = Path(out).absolute().parent if settings.activations == "disk" else None
        importance = observe_importance(
            checkpoint, planned, calibration.sample, settings.device, scratch
        )
    write_imatrix(Path(out), importance)
