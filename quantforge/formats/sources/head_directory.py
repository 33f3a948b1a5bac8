"""Directories of draft heads: small networks that guess further tokens from what a model has computed.

They are no models of their own, and lie beside one: Medusa (`medusa_lm_head.safetensors`) and EAGLE-3. What a directory
holds is told by its configuration alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.foreign_json import read_object
from quantforge.checkpoint.reader import CONFIG
from quantforge.checkpoint.safetensors import TensorEntry, read_header, read_tensor
from quantforge.errors import InputError
from quantforge_files import roles

if TYPE_CHECKING:
    import torch

MEDUSA, EAGLE3 = "medusa", "eagle3"
_PICKLED = (".pt", ".pth", ".bin", ".pkl")
_MOST = 1 << 20  # of a number in a configuration


@dataclass(frozen=True, slots=True)
class HeadDirectory:
    """An opened directory of draft heads.

    Attributes:
        path: of it.
        kind: `MEDUSA` or `EAGLE3`.
        config: its configuration; of nested ones, the parts side by side.
        entries: its tensors by name.
    """

    path: Path
    kind: str
    config: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]

    def number(self, *keys: str, default: int | None = None) -> int:
        """Return the first of some numbers that the configuration states.

        Raises:
            InputError: it states none, or one that is no whole number of at least 1.
        """
        value = next(
            (self.config[key] for key in keys if self.config.get(key) is not None), default
        )
        if type(value) is not int or not 1 <= value <= _MOST:
            raise self.error(f"{keys[0]} = {str(value)[:40]!r}", "a whole number of at least 1")
        return value

    def find(self, *names: str) -> str | None:
        """Return the first of some names that a tensor has."""
        return next((name for name in names if name in self.entries), None)

    def read(self, shape: tuple[int, ...], *names: str) -> torch.Tensor:
        """Read the tensor of the first of some names that is there.

        Raises:
            InputError: none is there, or it has another shape.
        """
        name = self.find(*names)
        if name is None:
            raise self.error(f"no tensor {names[0]!r}", "fetch the directory again")
        found = self.entries[name].shape
        if found != shape:
            raise self.error(
                f"tensor {name!r} is {[*found]}, for this model {[*shape]} is expected",
                "take heads that were trained for this very model",
            )
        return read_tensor(self.entries[name])

    def error(self, what: str, hint: str) -> InputError:
        """Return the error of something that is wrong with the directory."""
        return InputError(f"{self.path}: {self.kind} heads: {what}", hint, file=str(self.path))


def open_heads(path: Path) -> HeadDirectory | None:
    """Open a directory of draft heads, reading its configuration and headers; None for anything else.

    Raises:
        InputError: it cannot be read, or holds heads of a kind that is not known here.
    """
    if not path.is_dir() or CONFIG not in (names := FILES.listing(path, None)):
        return None
    config = read_object(path / CONFIG, roles.CONFIG, path)
    nested = config.get("transformer_layer_config")
    config = {**(nested if isinstance(nested, dict) else {}), **config}
    kind = _kind(config)
    if kind is None:
        return None
    files = sorted(name for name in names if name.endswith(".safetensors"))
    found = HeadDirectory(path, kind, config, {})
    if not files:
        pickled = [name for name in names if name.endswith(_PICKLED)]
        what = (
            f"{pickled[0]} is a pickle, which is never read" if pickled else "no safetensors file"
        )
        raise found.error(what, "save its tensors with safetensors, under the same names")
    if kind not in {MEDUSA, EAGLE3}:
        raise found.error(
            "are not computed here", f"{MEDUSA} and {EAGLE3} heads are, or take a draft model"
        )
    if config.get("quantization_config"):
        raise found.error("are quantized", "take those in 16 bits")
    entries: dict[str, TensorEntry] = {}
    for name in files:
        entries |= read_header(path / name, path).entries
    return HeadDirectory(path, kind, config, entries)


def _kind(config: Mapping[str, Any]) -> str | None:
    """Return the kind of heads that a configuration describes; None for one of a model."""
    names = config.get("architectures")
    words = [config.get("model_type"), config.get("speculators_model_type")]
    words += names if isinstance(names, list) else []
    said = " ".join(word.lower() for word in words if isinstance(word, str))
    if "medusa_num_heads" in config or MEDUSA in said:
        return MEDUSA
    if EAGLE3 in said or ("draft_vocab_size" in config and "eagle" not in said):
        return EAGLE3
    return "eagle" if "eagle" in said else None
