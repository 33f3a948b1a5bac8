"""``verify``: check a quantized model, made by any tool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.engines import target_of
from quantforge.files.hub import resolve_model
from quantforge.files.opener import FILES
from quantforge.numerics.allocator import return_freed_memory
from quantforge.progress import ProgressListener, ignore_progress, phase, report_to
from quantforge.settings import Settings, check_device
from quantforge_files.roles import KEY

if TYPE_CHECKING:
    from quantforge.verification.findings import Report


@check_arguments()
@torch_defaults()
def verify(
    path: str | Path,
    source: str | Path | None = None,
    *,
    engine: str | None = None,
    forward: bool = True,
    device: str = "cpu",
    threads: int | None = None,
    key: str | Path | None = None,
    adapter: str | Path | None = None,
    offline: bool = False,
    progress: ProgressListener = ignore_progress,
) -> Report:
    """Check files, structure, every number and one forward pass of a model directory or a GGUF file.

    Args:
        path: the model.
        source: the model that it was made from, to compare with.
        engine: an engine that must be able to load it.
        forward: run the model once.
        device: device to run on.
        threads: CPU threads; None for all.
        key: public key (PEM) to check the signature with.
        adapter: directory of the adapter that was merged into the source.
        offline: never access the hub.
        progress: called with progress reports.

    Raises:
        InputError: the model, the source or the key cannot be read, or an adapter is missing.
        IntegrityError: the adapter is not the one in the manifest, or the manifest has none.
        UsageError: an adapter is given without a source, the engine or device is unknown, the number of threads is out
            of range, or the library for signatures is not installed.
    """
    Settings(device=device, threads=threads)  # checks them
    artifact = Path(path) if Path(path).exists() else resolve_model(str(path), offline)
    original = resolve_model(str(source), offline) if source else None
    check_device(device)  # imports torch, which takes seconds
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    adapter_path, public_key = (Path(argument) if argument else None for argument in (adapter, key))
    if engine is not None:
        target_of(engine)  # refuse an unknown name before the work
    if public_key is not None:
        FILES.read(public_key, KEY, None)
    return_freed_memory()
    from quantforge.verification.verify import verify as check

    with report_to(progress), phase("verifying", 1.0):
        return check(
            artifact,
            original,
            engine=engine,
            forward=forward,
            device=device,
            key=public_key,
            adapter=adapter_path,
        )
