"""The source as a recipe changes all of it, before anything else sees it: fewer heads and experts, then transforms."""

from __future__ import annotations

from quantforge.checkpoint.fewer_experts import Removed, fewer_experts, pruning_of
from quantforge.checkpoint.fewer_heads import fewer_heads
from quantforge.checkpoint.reader import Checkpoint
from quantforge.errors import UsageError
from quantforge.quantizers import prepared, source_transforms
from quantforge.recipe import NO_DATA, CalibrationOptions


def changed(
    source: Checkpoint,
    method: str,
    share: str | None,
    calibration: CalibrationOptions,
    removed: Removed | None = None,
) -> Checkpoint:
    """Return the source with experts removed and transforms of the whole applied.

    This view is planned, quantized and compared with. A quantized source is returned as it is: planning refuses it.

    Args:
        source: with its experts as files are to hold them.
        method: whose transforms of the whole source apply.
        share: of the experts of every layer that is removed, ``25%``; None for none.
        calibration: what experts are judged by.
        removed: the experts that go; None where they are not chosen yet, so that nothing they change may be read.

    Raises:
        UsageError: there is nothing to judge experts by; or as `pruning_of`.
        RefusedError: as `pruning_of`.
        InputError: as `SourceTransform.prepare`.
    """
    if share and "quantization_config" not in source.config:
        if calibration.importance_file is not None or calibration.source == NO_DATA:
            raise UsageError(
                "--prune-experts: experts are judged by what they do on a text, and none is given",
                "--calibration builtin, or a text of yours",
            )
        pruning = pruning_of(source, share)
        gone = pruning.undecided() if removed is None else removed
        source = fewer_experts(source, gone, decided=removed is not None)
    return prepared(source, source_transforms(method))


def heads_as_asked(source: Checkpoint, mtp: str) -> Checkpoint:
    """Return the source, without its heads for several tokens where ``mtp`` drops them; errors as `fewer_heads`."""
    if mtp == "drop" and "quantization_config" not in source.config:
        return fewer_heads(source)
    return source
