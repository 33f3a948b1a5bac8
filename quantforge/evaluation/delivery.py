"""Delivery of an evaluation: its figures stay kept until what is written of them is written, which may fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantforge.errors import GateError

if TYPE_CHECKING:
    from quantforge.evaluation.evaluate import Evaluation
    from quantforge.evaluation.kept_rows import KeptRows


@dataclass(frozen=True, slots=True)
class Delivery:
    """Evaluations that have ended in the body of `delivery`, and their rows that are kept."""

    found: list[Evaluation] = field(default_factory=list)
    kept: list[KeptRows] = field(default_factory=list)

    def end(self) -> None:
        """Remove the rows: nobody has to come back for them."""
        for rows in self.kept:
            rows.remove()


_OPEN: ContextVar[Delivery | None] = ContextVar("delivery", default=None)


@contextmanager
def delivery() -> Iterator[Delivery]:
    """Keep the rows of evaluations in the body until all of it has ended well; the outermost one decides.

    A gate that fails ends it well: what is to be written is written before.
    """
    outer = _OPEN.get()
    if outer is not None:
        yield outer
        return
    own = Delivery()
    before = _OPEN.set(own)
    try:
        yield own
    except GateError:
        own.end()
        raise
    except BaseException as error:
        if count := sum(rows.count() for rows in own.kept):
            error.add_note(f"all {count} models are kept: the same command writes what is missing")
        raise
    else:
        own.end()
    finally:
        _OPEN.reset(before)


def hand_over(rows: KeptRows) -> None:
    """Leave the rows of an evaluation that has ended to the delivery, which removes them; at once without one."""
    now = _OPEN.get()
    if now is None:
        rows.remove()
    else:
        now.kept.append(rows)
