"""The plan of a GGUF file beside which its vision tower is written, in a file of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quantforge.errors import UsageError
from quantforge.formats import format_of
from quantforge.formats.gguf.projector_file import OPTION, projector_file
from quantforge.planning.gguf import LANGUAGE_ONLY
from quantforge.plans import Plan
from quantforge.results.significant import size

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint
    from quantforge.planning.conversion import Conversion


def with_tower(plan: Plan, checkpoint: Checkpoint, *, wanted: bool) -> Plan:
    """Return a plan that says, where it is wanted, that the vision tower is written beside its file, with the bytes.

    Raises:
        UsageError: the result is no such file.
        RefusedError, InputError: as `projector_file`.
    """
    if not wanted:
        return plan
    if not format_of(plan.format).ABOUT.one_file:
        raise UsageError(
            f"{OPTION}: llama.cpp reads the tower beside a GGUF file, and the result would be {plan.format},"
            " which holds it",
            f"add --format gguf, or leave {OPTION} out",
        )
    beside = projector_file(checkpoint, "")
    nbytes, work = beside.plan.size, plan.work
    said = f"{LANGUAGE_ONLY}; {OPTION} writes that of pictures, {size(nbytes)}"
    return replace(
        plan,
        tensors=tuple(
            replace(tensor, rule=f"not of this file: {OPTION} writes it")
            if tensor.name in beside.tensors else tensor
            for tensor in plan.tensors
        ),
        substitutions=(*plan.substitutions, *beside.events),
        notes=tuple(said if note.startswith(LANGUAGE_ONLY) else note for note in plan.notes),
        work=work and replace(work, output_bytes=work.output_bytes + nbytes),
    )  # fmt: skip


def move_tower(conversion: Conversion, *, wanted: bool) -> None:
    """Let the plan of a conversion say the same, with what is less than asked for; errors as `with_tower`."""
    before = len(conversion.plan.substitutions)
    conversion.plan = with_tower(conversion.plan, conversion.checkpoint, wanted=wanted)
    conversion.events.extend(conversion.plan.substitutions[before:])
