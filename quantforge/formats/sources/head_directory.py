"""Directories of draft heads (Medusa, EAGLE-3), small networks that draft tokens for a base model.

They are no models of their own, and lie beside one: Medusa (`medusa_lm_head.safetensors`) and EAGLE-3, in 16 bits or in
a format that is read here. What a directory holds is told by its configuration alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantforge.architectures.draft_heads import DRAFT_KINDS, draft_kind
from quantforge.architectures.match import FLOAT_DTYPES
from quantforge.errors import InputError
from quantforge.files.finite_values import check_finite
from quantforge.files.opener import FILES, read_object
from quantforge.files.reader import CONFIG_FILE, Checkpoint, open_checkpoint
from quantforge.formats import Format, ModuleLayout, detect_format
from quantforge.formats.declared_quantization import resolve_declaration
from quantforge_files import roles

if TYPE_CHECKING:
    import torch

    from quantforge.packers.tensor import QuantizedTensor

_PICKLED = (".pt", ".pth", ".bin", ".pkl")
_INTEGERS = frozenset({"I32", "I64"})
_MAX_NUMBER = 1 << 20  # of a number in a configuration
_TRAINED_HINT = "take heads that were trained for this very model"


@dataclass(frozen=True, slots=True)
class DraftHeadDirectory:
    """An opened directory of draft heads.

    Attributes:
        kind: one of `quantforge.architectures.draft_heads`.
        config: its configuration; of nested ones, the parts side by side.
        checkpoint: its tensors.
        file_format: the format of its quantized linears.
        layouts: of these, by module.
    """

    kind: str
    config: Mapping[str, Any]
    checkpoint: Checkpoint
    file_format: Format
    layouts: Mapping[str, ModuleLayout]

    @property
    def path(self) -> Path:
        """Return the path of the directory."""
        return self.checkpoint.path

    def number(self, *keys: str, default: int | None = None) -> int:
        """Return the first of several keys that the configuration has, as a positive integer.

        Raises:
            InputError: it states none, or one that is no whole number of at least 1.
        """
        value = next(
            (self.config[key] for key in keys if self.config.get(key) is not None), default
        )
        if type(value) is not int or not 1 <= value <= _MAX_NUMBER:
            raise self.error(f"{keys[0]} = {str(value)[:40]!r}", "a whole number of at least 1")
        return value

    def find(self, *names: str) -> str | None:
        """Return the first of several names that exists as a tensor, quantized or not; None if none does."""
        modules = {f"{module}.weight" for module in self.layouts}
        return next(
            (name for name in names if name in modules | self.checkpoint.entries.keys()), None
        )

    def read(self, shape: tuple[int, ...], *names: str) -> torch.Tensor:
        """Read the first of several tensors that exists; a quantized weight is decoded to float32.

        Raises:
            InputError: none is there, it has another shape, holds no floats, or one that is not finite.
        """
        from quantforge.packers.tensor import QuantizedTensor as Quantized

        weight = self.weight(shape, *names)
        return weight.decode() if isinstance(weight, Quantized) else weight

    def weight(self, shape: tuple[int, ...], *names: str) -> QuantizedTensor | torch.Tensor:
        """Read a weight without decoding it; errors as `read`."""
        name = self._find_with_shape(shape, names)
        layout = self.layouts.get(name.removesuffix(".weight"))
        if layout is None:
            return self._stored(name, FLOAT_DTYPES)
        stored = {tensor_name: self._stored(tensor_name) for tensor_name in layout.tensor_names}
        return self.file_format.unpack(layout, stored)

    def read_integers(self, shape: tuple[int, ...], *names: str) -> torch.Tensor:
        """Read an integer tensor; errors as `read`."""
        return self._stored(self._find_with_shape(shape, names), _INTEGERS)

    def _find_with_shape(self, shape: tuple[int, ...], names: tuple[str, ...]) -> str:
        name = self.find(*names)
        if name is None:
            raise self.error(f"no tensor {names[0]!r}", "fetch the directory again")
        layout = self.layouts.get(name.removesuffix(".weight"))
        stored_shape = layout.shape if layout else self.checkpoint.entries[name].shape
        if stored_shape != shape:
            raise self.error(
                f"tensor {name!r} is {[*stored_shape]}, for this model {[*shape]} is expected",
                _TRAINED_HINT,
            )
        return name

    def _stored(self, name: str, types: frozenset[str] = frozenset()) -> torch.Tensor:
        """Read a stored tensor and check its dtype (any if ``types`` is empty) and that floats are finite."""
        entry = self.checkpoint.entries[name]
        if types and entry.dtype not in types:
            raise self.error(
                f"tensor {name!r} is {entry.dtype}, expected is {' or '.join(sorted(types))}",
                _TRAINED_HINT,
            )
        tensor = self.checkpoint.read(name)
        check_finite(name, tensor, entry.file)
        return tensor

    def error(self, problem: str, hint: str) -> InputError:
        """Return the error for a defect of the directory."""
        return _error(self.path, self.kind, problem, hint)


def open_draft_heads(path: Path) -> DraftHeadDirectory | None:
    """Open a directory of draft heads by its configuration and headers; return None for any other directory.

    Raises:
        InputError: it cannot be read, or holds heads of a kind, or in a format, that is not known here.
    """
    if not path.is_dir() or CONFIG_FILE not in (names := FILES.list_names(path, None)):
        return None
    config = read_object(path / CONFIG_FILE, roles.CONFIG, path)
    layer_config = config.get("transformer_layer_config")
    config = {**(layer_config if isinstance(layer_config, dict) else {}), **config}
    kind = draft_kind(config)
    if kind is None:
        return None
    if not any(name.endswith(".safetensors") for name in names):
        pickled = [name for name in sorted(names) if name.endswith(_PICKLED)]
        problem = (
            f"{pickled[0]} is a pickle, which is never read" if pickled else "no safetensors file"
        )
        raise _error(path, kind, problem, "save its tensors with safetensors, under the same names")
    if kind not in DRAFT_KINDS:
        supported_kinds = " and ".join(DRAFT_KINDS)
        raise _error(
            path,
            kind,
            "are not computed here",
            f"{supported_kinds} heads are, or take a draft model",
        )
    checkpoint = resolve_declaration(open_checkpoint(path))
    try:
        file_format = detect_format(checkpoint.config)
    except InputError as error:
        problem = f"are quantized: {error.message}"
        raise _error(
            path, kind, problem, "take those in 16 bits, or quantize these here"
        ) from error
    headers = checkpoint.stored_tensors()
    layouts = {item.module: item for item in file_format.find_layouts(checkpoint.config, headers)}
    return DraftHeadDirectory(kind, config, checkpoint, file_format, layouts)


def _error(path: Path, kind: str, problem: str, hint: str) -> InputError:
    return InputError(f"{kind} heads: {problem}", hint, file=str(path), subject=str(path))
