"""Separate local paths from recipes: a recipe holds names and digests of the files it uses, settings hold their paths.

A user types paths; `strip_local_paths` moves them to the settings of the run and leaves each file's name and SHA-256 in
the recipe, which may then be published. A recipe that already has digests (from a manifest) only runs on files with
that content, found under their names or at the paths in the settings.
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

_SOURCES_WITHOUT_FILES = frozenset({"builtin", "self", NO_DATA})


def strip_local_paths(recipe: Recipe, settings: Settings) -> tuple[Recipe, Settings]:
    """Return a recipe without local paths, and settings that hold them.

    Raises:
        InputError: a file is missing or cannot be read; the hint says what to give.
        IntegrityError: a file's content does not match the digest in the recipe.
    """
    adapter, settings = _strip_adapter_path(recipe.adapter, settings)
    recipe = replace(recipe, adapter=adapter)
    options = recipe.calibration
    if options.importance_file is not None:
        return replace(
            recipe, calibration=_with_imatrix_digest(options, settings.imatrix)
        ), settings
    source = settings.calibration or options.source
    if source in _SOURCES_WITHOUT_FILES and not options.sha256:
        return replace(recipe, calibration=replace(options, source=source)), settings
    from quantforge_calibration import SourceError
    from quantforge_calibration.citation import cite, matches_citation

    settings = replace(settings, calibration=source)
    try:
        if options.sha256:
            if not matches_citation(source, options.source, options.sha256):
                raise _content_mismatch(f"calibration {source}", options)
            return recipe, settings
        citation = cite(source)
    except SourceError as error:
        raise InputError(
            f"calibration: {error.message}", _required_files_hint(options) or error.hint
        ) from error
    options = replace(options, source=citation.source, sha256=citation.digests)
    return replace(recipe, calibration=options), settings


def _strip_adapter_path(
    options: AdapterOptions, settings: Settings
) -> tuple[AdapterOptions, Settings]:
    """Return the adapter's name and digests for the recipe, and settings with its path."""
    path = settings.adapter or (Path(options.source) if options.source else None)
    if path is None:
        return options, settings
    hint = adapter_hint(options) if options.sha256 else "check the path"
    if not path.is_dir():
        raise InputError(f"--adapter {path}: no such directory", hint)
    adapter = open_adapter(path)
    if options.sha256 and options.sha256 != adapter.digests:
        raise IntegrityError(f"--adapter {path}: not the adapter that the recipe states", hint)
    name = options.source if options.sha256 else path.resolve().name
    return AdapterOptions(name, adapter.digests), replace(settings, adapter=path)


def shared_adapter_path(options: Iterable[AdapterOptions]) -> Path | None:
    """Return the path of the adapter that all recipes use, or None if they do not share one."""
    source, *other_sources = {adapter.source for adapter in options}
    return Path(source) if source and not other_sources else None


def adapter_hint(options: AdapterOptions) -> str:
    """Return a hint that says which adapter to give for a recipe with digests."""
    digests = "; ".join(digest.replace("  ", " is ") for digest in options.sha256)
    return f"--adapter DIR, of an adapter called {options.source}: SHA-256 {digests}"


def check_adapter_given(recorded: AdapterOptions, path: Path | None) -> None:
    """Refuse to repeat a recorded recipe without the path of its adapter; the name alone is not looked up.

    Raises:
        InputError: saying which adapter to give.
    """
    if recorded.source and path is None:
        raise InputError(f"it was made with the adapter {recorded.source}", adapter_hint(recorded))


def _with_imatrix_digest(options: CalibrationOptions, imatrix: Path | None) -> CalibrationOptions:
    """Return calibration options with the digest of an importance file, if the file exists."""
    if imatrix is None or not imatrix.exists():
        return options
    check_structure(imatrix)
    digest = manifest.sha256(imatrix, None, roles.IMATRIX)
    if options.sha256 and options.sha256[0].partition("  ")[0] != digest:
        raise _content_mismatch(f"--imatrix {imatrix}", options)
    if options.sha256:
        return options
    return replace(options, sha256=(f"{digest}  {options.importance_file}",))


def _required_files_hint(options: CalibrationOptions) -> str:
    """Return a hint that says which files a recipe with digests needs; "" for other recipes."""
    if not options.sha256:
        return ""
    if options.importance_file is not None:
        return f"--imatrix FILE, of SHA-256 {options.sha256[0].replace('  ', ', there called ')}"
    digests = "; ".join(digest.replace("  ", " is ") for digest in options.sha256)
    return f"--calibration '{options.source}', with the paths of its files here: SHA-256 {digests}"


def _content_mismatch(subject: str, options: CalibrationOptions) -> IntegrityError:
    return IntegrityError(
        f"{subject}: not the content that the recipe states", _required_files_hint(options)
    )


def check_calibration_given(options: CalibrationOptions, settings: Settings) -> None:
    """Refuse to repeat a recorded recipe without its importance file, or with a calibration text that it does not need.

    Raises:
        InputError: the importance file is not given.
        UsageError: a text is given, although the recorded one is known.
    """
    name = options.importance_file
    if name is not None and settings.imatrix is None:
        raise InputError(
            f"it was made with the importance matrix {name}",
            _required_files_hint(options) or "--imatrix FILE",
        )
    if settings.calibration and not (options.sha256 and name is None):
        raise UsageError(
            f"--calibration {settings.calibration}: it was made with the text {options.source}",
            "leave --calibration out: that text is known",
        )
