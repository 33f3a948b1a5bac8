"""Recipes that name what they read without saying where it lies: what is published holds names and digests.

A person types paths; `strip_local_paths` moves them to the settings of the run and leaves in the recipe the name of
each file and the SHA-256 of its content. A recipe that states digests already (out of a manifest) is only run on that
very text: it is looked for under its name, or where the settings say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from quantforge.artifacts import manifest
from quantforge.errors import InputError, IntegrityError, UsageError
from quantforge.formats.gguf.importance_file import check_structure
from quantforge.formats.sources.adapter import open_adapter
from quantforge.recipe import NO_DATA, AdapterOptions, CalibrationOptions, Recipe
from quantforge.settings import Settings
from quantforge_files import roles

_WITHOUT_FILES = frozenset({"builtin", "self", NO_DATA})


def strip_local_paths(recipe: Recipe, settings: Settings) -> tuple[Recipe, Settings]:
    """Return a recipe that may be published, and settings that say where its text is.

    Raises:
        InputError: a text is missing or cannot be read; the hint says what to give.
        IntegrityError: it is not the text that the recipe states.
    """
    adapter, settings = _adapter(recipe.adapter, settings)
    recipe = replace(recipe, adapter=adapter)
    options = recipe.calibration
    if options.importance_file is not None:
        return replace(recipe, calibration=_importance(options, settings.imatrix)), settings
    typed = settings.calibration or options.source
    if typed in _WITHOUT_FILES and not options.sha256:
        return replace(recipe, calibration=replace(options, source=typed)), settings
    from quantforge_calibration import SourceError
    from quantforge_calibration.citation import cite, same

    settings = replace(settings, calibration=typed)
    try:
        if options.sha256:
            if not same(typed, options.source, options.sha256):
                raise _another(f"calibration {typed}", options)
            return recipe, settings
        found = cite(typed)
    except SourceError as error:
        raise InputError(f"calibration: {error.message}", _wanted(options) or error.hint) from error
    options = replace(options, source=found.source, sha256=found.digests)
    return replace(recipe, calibration=options), settings


def _adapter(options: AdapterOptions, settings: Settings) -> tuple[AdapterOptions, Settings]:
    """Cite an adapter: its name and digests stay in the recipe, its place goes to the settings."""
    typed = settings.adapter or (Path(options.source) if options.source else None)
    if typed is None:
        return options, settings
    hint = adapter_hint(options) if options.sha256 else "check the path"
    if not typed.is_dir():
        raise InputError(f"--adapter {typed}: no such directory", hint)
    found = open_adapter(typed)
    if options.sha256 and options.sha256 != found.digests:
        raise IntegrityError(f"--adapter {typed}: not the adapter that the recipe states", hint)
    name = options.source if options.sha256 else typed.resolve().name
    return AdapterOptions(name, found.digests), replace(settings, adapter=typed)


def common_adapter(options: Iterable[AdapterOptions]) -> Path | None:
    """Return where the adapter is that several recipes name; None where not all name the same."""
    source, *others = {one.source for one in options}
    return Path(source) if source and not others else None


def adapter_hint(options: AdapterOptions) -> str:
    """Return what to type where a recorded adapter has to be given."""
    wanted = "; ".join(digest.replace("  ", " is ") for digest in options.sha256)
    return f"--adapter DIR, of an adapter called {options.source}: SHA-256 {wanted}"


def check_adapter_given(stated: AdapterOptions, given: Path | None) -> None:
    """Refuse a recorded recipe whose adapter is not given: one of its name in the working directory is not looked for.

    Raises:
        InputError: saying what to give.
    """
    if stated.source and given is None:
        raise InputError(f"it was made with the adapter {stated.source}", adapter_hint(stated))


def _importance(options: CalibrationOptions, imatrix: Path | None) -> CalibrationOptions:
    """Return the options with the digest of an importance matrix, where its file is there."""
    if imatrix is None or not imatrix.exists():
        return options
    check_structure(imatrix)
    digest = manifest.sha256(imatrix, None, roles.IMATRIX)
    if options.sha256 and options.sha256[0].partition("  ")[0] != digest:
        raise _another(f"--imatrix {imatrix}", options)
    if options.sha256:
        return options
    return replace(options, sha256=(f"{digest}  {options.importance_file}",))


def _wanted(options: CalibrationOptions) -> str:
    """Say what a person has to give for a recipe that states digests; "" for another."""
    if not options.sha256:
        return ""
    if options.importance_file is not None:
        return f"--imatrix FILE, of SHA-256 {options.sha256[0].replace('  ', ', there called ')}"
    stated = "; ".join(digest.replace("  ", " is ") for digest in options.sha256)
    return f"--calibration '{options.source}', with the paths of its files here: SHA-256 {stated}"


def _another(what: str, options: CalibrationOptions) -> IntegrityError:
    return IntegrityError(f"{what}: not the content that the recipe states", _wanted(options))


def check_given(options: CalibrationOptions, settings: Settings) -> None:
    """Refuse a recorded recipe whose importance matrix is not given, and a text that it has no use for.

    Raises:
        InputError, UsageError: saying what to give.
    """
    name = options.importance_file
    if name is not None and settings.imatrix is None:
        raise InputError(
            f"it was made with the importance matrix {name}", _wanted(options) or "--imatrix FILE"
        )
    if settings.calibration and not (options.sha256 and name is None):
        raise UsageError(
            f"--calibration {settings.calibration}: it was made with the text {options.source}",
            "leave --calibration out: that text is known",
        )
