"""Verify: whether a finished artifact, ours or anyone's, is what it says it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.hub import resolve
from quantforge.execution.progress import Listener, followed, ignore, phase
from quantforge.formats.engine_families import TRANSFORMERS
from quantforge.formats.targets import target_of
from quantforge.model import lean_imports as lean
from quantforge.settings import check_device
from quantforge.verbs.caller_state import torch_defaults
from quantforge.verbs.given_options import checks_options
from quantforge_files.roles import KEY

if TYPE_CHECKING:
    from quantforge.verification.findings import Report


@checks_options()
@torch_defaults()
def verify(
    path: str | Path,
    source: str | Path | None = None,
    *,
    engine: str | None = None,
    forward: bool = True,
    device: str = "cpu",
    key: str | Path | None = None,
    adapter: str | Path | None = None,
    offline: bool = False,
    progress: Listener = ignore,
) -> Report:
    """Check files, structure, every number and one forward pass of a model directory or a GGUF file.

    Args:
        path: the artifact.
        source: the model that it was made from, to compare with.
        engine: one that has to load it.
        forward: run the model once.
        device: where it runs.
        key: public key (PEM) that the signature has to be of.
        adapter: directory of the adapter that was merged into the source.
        offline: never ask the hub.
        progress: told how far it is.

    Raises:
        InputError: there is no such artifact, the source or the key cannot be read, or an adapter is missing.
        IntegrityError: the adapter is not the one that the manifest states, or it states none.
        UsageError: an adapter is given without a source, no engine has that name, there is no such device, or the
            library for signatures is not installed.
    """
    place = Path(path) if Path(path).exists() else resolve(str(path), offline)
    original = resolve(str(source), offline) if source else None
    check_device(device)  # with torch, which takes seconds
    merged, public = (Path(one) if one else None for one in (adapter, key))
    if engine is not None and target_of(engine).judged == TRANSFORMERS:
        lean.forbid()  # its quantizers ask for packages that we never use
    if public is not None:
        FILES.read(public, KEY, None)
    from quantforge.verification.verify import VerificationOptions
    from quantforge.verification.verify import verify as check

    with followed(progress), phase("verifying", 1.0):
        return check(place, VerificationOptions(original, engine, forward, device, public, merged))
