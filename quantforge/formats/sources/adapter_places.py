"""Places of the modules that an adapter changes in the files of a model: their stored names, and which way they lie."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from quantforge.architectures.match import Matched, Role
from quantforge.checkpoint.reader import Checkpoint


class Places:
    """Places of the modules of a running model in its files."""

    def __init__(self, checkpoint: Checkpoint, found: Matched) -> None:
        self._entries = checkpoint.entries
        self._found = found
        family = found.architecture
        self.head = f"{family.head}.weight" if family else "lm_head.weight"
        embedding = f"{family.embedding}.weight" if family else ""
        known = found.by_name.get(embedding)
        self.embedding = known.stored.name if known else ""

    def stored(self, name: str) -> str:
        """Return the stored name of a tensor."""
        known = self._found.by_name.get(name)
        return known.stored.name if known else name

    def base(self, name: str) -> str:
        """Return the stored name of the tensor that a change is of; "" where the model has none."""
        stored = self.stored(name)
        if stored in self._entries:
            return stored
        return self.embedding if self._found.tied and name == self.head else ""

    def turned(self, name: str, said: bool) -> bool:
        """Return whether the weight of a linear is stored ``[in, out]``; as the adapter ``said`` where nobody knows."""
        known = self._found.by_name.get(name)
        return known.transposed if known and self._found.architecture else said

    def of_linears(self, ends: Collection[str]) -> list[str]:
        """Return the stored weights of the linears whose module ends so, experts apart: PEFT finds these stacked."""
        wanted = frozenset(ends)
        return [
            tensor.stored.name
            for tensor in self._found.tensors
            if tensor.role is Role.LINEAR and "experts." not in tensor.name
            if not wanted.isdisjoint(_ends(tensor.name.removesuffix(".weight")))
        ]

    def stand_apart(self, touched: set[str]) -> bool:
        """Return whether a tied head has to be stored on its own: an adapter changes it or the embedding."""
        outer = {self.head, self.embedding}
        return (
            self._found.tied
            and bool(self.embedding)
            and bool({self.stored(name) for name in touched} & outer)
        )


def _ends(module: str) -> Iterator[str]:
    """Yield the name of a module and what follows each of its dots."""
    while module:
        yield module
        module = module.partition(".")[2]
