"""Vision towers as llama.cpp reads them from a file of their own: names, shapes and keys, with the projector's.

A family's file says this of its own family, by a function that returns a `Projector` for a configuration;
`quantforge.formats.gguf.projector_file` writes files by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.errors import InputError, RefusedError

_MOST = {"depth": 1000, "num_hidden_layers": 1000}
_LIMIT = 1 << 20
_ALIKE = object()  # transformers takes what llama.cpp takes
# It tells by the width of `down` whether an old converter has exchanged the two.
SWAPPED = "another intermediate_size than hidden_size; of equal ones it exchanges up and down"
Value = bool | int | float | tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class TowerTensor:
    """One tensor of a tower or of its projector.

    Attributes:
        name: in checkpoints, after `Projector.renamed`.
        held: its name in the file; of several, it is cut into as many equal parts along ``axis``, which vanishes where
            a part has a size of one there.
        shape: in checkpoints.
        axis: see ``held``.
        wide: always float32; norms and biases are anyway.
        plus_one: stored plus one.
        heads: of so many heads rows are reordered from halves to pairs, as llama.cpp rotates them; 0: they are not.
        pixels: a matrix of patches of so many pixels a side, of each its colours, which is stored as a convolution is.
    """

    name: str
    held: tuple[str, ...]
    shape: tuple[int, ...]
    axis: int = 0
    wide: bool = False
    plus_one: bool = False
    heads: int = 0
    pixels: int = 0


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The embedding of a token of the decoder that is stored with a tower.

    Attributes:
        token: its text.
        held: the name in the file.
        size: columns of the decoder.
    """

    token: str
    held: str
    size: int


@dataclass(frozen=True, slots=True)
class Projector:
    """Tower and projector of one model.

    Attributes:
        kind: ``clip.projector_type``.
        keys: the keys of ``clip.``, behind that word; integers are counts.
        tensors: all of them.
        renamed: beginnings of names in checkpoints that stand for others, tried one after the other.
        unread: regular expressions of (renamed) tensors that nothing computes with.
        row: the embedding of a token that is stored beside them.
        mean, deviation: of the three colours, by which pictures are shifted and divided where no settings say so.
        normalizes: whether they are where settings do not say.
        left_out: regular expressions of (renamed) tensors of towers that are in no file.
        differs: what llama.cpp is known to make of pictures otherwise; "" for nothing.
    """

    kind: str
    keys: Mapping[str, Value]
    tensors: tuple[TowerTensor, ...]
    renamed: tuple[tuple[str, str], ...]
    unread: tuple[str, ...] = ()
    row: TokenRow | None = None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    deviation: tuple[float, float, float] = (0.5, 0.5, 0.5)
    normalizes: bool = True
    left_out: tuple[str, ...] = ()
    differs: str = ""

    def canonical(self, name: str) -> str:
        """Return the name of a tensor as it is declared."""
        for beginning, other in self.renamed:
            if name.startswith(beginning):
                name = other + name.removeprefix(beginning)
        return name


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """Configuration of a tower, read with checks; ``place`` is its name in messages, "" of the whole."""

    values: Mapping[str, Any]
    place: str = "vision_config"

    def size(self, key: str, otherwise: int | None = None) -> int:
        """Return a size.

        Raises:
            InputError: it is missing, no positive integer, or beyond what any model has.
        """
        value = self.values.get(key, otherwise)
        most = _MOST.get(key, _LIMIT)
        if type(value) is not int or not 0 < value <= most:
            raise InputError(
                f"config.json: {self._called(key)} = {str(value)[:40]!r}",
                f"an integer from 1 to {most}",
            )
        return value

    def real(self, key: str, otherwise: float) -> float:
        """Return a number from 0 to 1; errors as `size`."""
        value = self.values.get(key, otherwise)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(
                f"config.json: {self._called(key)} = {str(value)[:40]!r}", "a number from 0 to 1"
            )
        return float(value)

    def require(self, key: str, computed: object, otherwise: object = _ALIKE) -> None:
        """Refuse any other value of a key than what llama.cpp computes.

        Args:
            key: of the configuration.
            computed: its value in llama.cpp.
            otherwise: in transformers where the key is missing; left out: the same.

        Raises:
            RefusedError: naming both.
        """
        usual = computed if otherwise is _ALIKE else otherwise
        if (value := self.values.get(key, usual)) != computed:
            raise not_carried(f"{self._called(key)} = {str(value)[:40]}", f"{key} = {computed}")

    def require_size(self, key: str, usual: int, computed: int) -> None:
        """Refuse any other size, ``usual`` where none is stated, than what llama.cpp computes; errors as `require`."""
        if (value := self.size(key, usual)) != computed:
            raise not_carried(f"{self._called(key)} = {value}", str(computed))

    def turns(self, base: float) -> None:
        """Refuse rotary positions of another base than that which llama.cpp knows; errors as `require`."""
        stated = self.values.get("rope_parameters")
        found = stated.get("rope_theta") if isinstance(stated, Mapping) else None
        found = self.values.get("rope_theta", found)
        TowerConfig({"rope_theta": base if found is None else found}, self.place).require(
            "rope_theta", base
        )

    def _called(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key


def not_carried(what: str, instead: str) -> RefusedError:
    """Return the error for what a projector file cannot say, with what llama.cpp computes."""
    return RefusedError(
        f"config.json: {what} cannot be carried by a projector file (llama.cpp computes: {instead})",
        "leave --mmproj out: the language model alone is written",
    )


def linear(name: str, held: str, out: int, inner: int) -> Iterator[TowerTensor]:
    """Yield weight and bias of a linear ``[out, inner]``."""
    yield TowerTensor(f"{name}.weight", (f"{held}.weight",), (out, inner))
    yield TowerTensor(f"{name}.bias", (f"{held}.bias",), (out,))


def norm(name: str, held: str, size: int, *, bias: bool = True) -> Iterator[TowerTensor]:
    """Yield weight and, unless it has none, bias of a norm over so many columns."""
    yield TowerTensor(f"{name}.weight", (f"{held}.weight",), (size,))
    if bias:
        yield TowerTensor(f"{name}.bias", (f"{held}.bias",), (size,))
