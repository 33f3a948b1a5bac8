"""Recipes that name what they read without saying where it lies: what is published holds names and digests.

A person types paths; `cited` moves them to the settings of the run and leaves in the recipe the name of each file and
the SHA-256 of its content. A recipe that states digests already (out of a manifest) is only run on that very text: it
is looked for under its name, or where the settings say.
"""

from __future__ import annotations

from dataclasses import replace

from quantforge.errors import InputError, IntegrityError, UsageError
from quantforge.formats.gguf.importance_file import check_head
from quantforge.planning.planner import IMATRIX, NO_DATA
from quantforge.recipe import Recipe
from quantforge.results import manifest
from quantforge.settings import Settings
from quantforge_files import roles

_WITHOUT_FILES = frozenset({"builtin", "self", NO_DATA})


def cited(recipe: Recipe, settings: Settings) -> tuple[Recipe, Settings]:
    """Return a recipe that may be published, and settings that say where its text is.

    Raises:
        InputError: a text is missing or cannot be read; the hint says what to give.
        IntegrityError: it is not the text that the recipe states.
    """
    options = recipe.calibration
    if options.source.startswith(IMATRIX):
        return _importance(recipe, settings), settings
    typed = settings.calibration or options.source
    if typed in _WITHOUT_FILES and not options.sha256:
        return replace(recipe, calibration=replace(options, source=typed)), settings
    from quantforge_calibration import SourceError
    from quantforge_calibration.citation import cite, same

    settings = replace(settings, calibration=typed)
    try:
        if options.sha256:
            if not same(typed, options.source, options.sha256):
                raise _another(f"calibration {typed}", recipe)
            return recipe, settings
        found = cite(typed)
    except SourceError as error:
        raise InputError(f"calibration: {error.message}", _wanted(recipe) or error.hint) from error
    options = replace(options, source=found.source, sha256=found.digests)
    return replace(recipe, calibration=options), settings


def _importance(recipe: Recipe, settings: Settings) -> Recipe:
    """Return the recipe with the digest of an importance matrix, where its file is there."""
    options = recipe.calibration
    if settings.imatrix is None or not settings.imatrix.exists():
        return recipe
    check_head(settings.imatrix)
    digest = manifest.sha256(settings.imatrix, None, roles.IMATRIX)
    if options.sha256 and options.sha256[0].partition("  ")[0] != digest:
        raise _another(f"--imatrix {settings.imatrix}", recipe)
    if options.sha256:
        return recipe
    stated = f"{digest}  {options.source.removeprefix(IMATRIX)}"
    return replace(recipe, calibration=replace(options, sha256=(stated,)))


def _wanted(recipe: Recipe) -> str:
    """Say what a person has to give for a recipe that states digests; "" for another."""
    options = recipe.calibration
    if not options.sha256:
        return ""
    if options.source.startswith(IMATRIX):
        return f"--imatrix FILE, of SHA-256 {options.sha256[0].replace('  ', ', there called ')}"
    stated = "; ".join(digest.replace("  ", " is ") for digest in options.sha256)
    return f"--calibration '{options.source}', with the paths of its files here: SHA-256 {stated}"


def _another(what: str, recipe: Recipe) -> IntegrityError:
    return IntegrityError(f"{what}: not the content that the recipe states", _wanted(recipe))


def check_given(recipe: Recipe, settings: Settings) -> None:
    """Refuse a recorded recipe whose importance matrix is not given, and a text that it has no use for.

    Raises:
        InputError, UsageError: saying what to give.
    """
    options = recipe.calibration
    if options.source.startswith(IMATRIX) and settings.imatrix is None:
        name = options.source.removeprefix(IMATRIX)
        raise InputError(
            f"it was made with the importance matrix {name}", _wanted(recipe) or "--imatrix FILE"
        )
    if settings.calibration and not (options.sha256 and not options.source.startswith(IMATRIX)):
        raise UsageError(
            f"--calibration {settings.calibration}: it was made with the text {options.source}",
            "leave --calibration out: that text is known",
        )
