"""A model directory as Hugging Face publishes it: configuration, tensors and the files around them.

Opening reads headers only and decides nothing; whatever is not understood exactly is refused. No
file of the model is ever executed, and of the other files only those with a role (`role_of`)
are passed on, so that neither code nor pickles nor stray files reach a result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quantforge.checkpoint import safetensors
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.foreign_json import read_object
from quantforge.checkpoint.hub import models_within
from quantforge.checkpoint.index import read_weights
from quantforge.checkpoint.safetensors import TORCH_NAMES, TensorEntry
from quantforge.checkpoint.seal import Seal
from quantforge.errors import InputError
from quantforge.plans import HeldTensor
from quantforge_calibration.chat_templates import FOLDER
from quantforge_files import FileRole, roles

if TYPE_CHECKING:
    import torch

    from quantforge.architectures.matched import Declared

CONFIG = "config.json"
QUANTIZATION = "quantization"  # the subject of what is said of a declaration that is left over, see `Checkpoint.facts`
CARD = "README.md"
LICENCES = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*")
_NO_LICENCE = {".py", ".bin", ".pt", ".pth", ".pkl", ".safetensors"}

_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "n_embd", "n_layer", "n_head", "n_positions",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer")
_MAX_SIZE = 2**31 - 1
_FLOATS = ("F32", "BF16", "F16", "F64")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model directory.

    Attributes:
        path: the directory.
        config: ``config.json``.
        entries: the tensors by name, sorted.
        shards: the safetensors files.
        side_files: files to carry byte for byte into a result, sorted; all lie under ``path``.
        card: the model card ``README.md``, if there is one.
        quantization: what became of a declared quantization that is left over or in an unusual place, "" for nothing.
    """

    path: Path
    config: dict[str, Any]
    entries: Mapping[str, TensorEntry]
    shards: tuple[Path, ...]
    side_files: tuple[Path, ...]
    card: Path | None
    quantization: str = field(default="", kw_only=True)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor; errors as `safetensors.read_tensor`."""
        return safetensors.read_tensor(self.entries[name])

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows ``first:last`` of a tensor; errors as `safetensors.read_rows`."""
        return safetensors.read_rows(self.entries[name], first, last)

    def side_data(self) -> dict[str, bytes]:
        """Read the side files, by their names inside of the model; errors as `Opener.read`."""
        return {
            name: FILES.read(path, role, self.path)
            for path in self.side_files
            if (role := role_of(name := path.relative_to(self.path).as_posix()))
        }

    def held(self) -> tuple[HeldTensor, ...]:
        """Return the tensors as their files describe them."""
        return tuple(entry.held() for entry in self.entries.values())

    @property
    def facts(self) -> Mapping[str, str]:
        """Return what plans and manifests say of the source: its precision, what is merged into it; by subject."""
        return {QUANTIZATION: self.quantization} if self.quantization else {}

    @property
    def declared(self) -> Declared | None:
        """Return declarations of this very model, where a view was made by them."""
        return None

    @property
    def opened(self) -> Checkpoint:
        """Return the checkpoint as it was opened: itself, unless it is a view of another."""
        return self

    def sealed(self, seals: Mapping[Path, Seal]) -> Self:
        """Return the same checkpoint, which compares what is read of its tensors with the digests of its files."""
        entries = {
            name: replace(entry, seal=seals[entry.file]) for name, entry in self.entries.items()
        }
        return replace(self, entries=entries)

    @property
    def dtype(self) -> str:
        """Return the model's type as safetensors names it: the configured one, else the commonest."""
        nested = self.config.get("text_config")
        for config in (self.config, nested if isinstance(nested, dict) else {}):
            for key in ("dtype", "torch_dtype"):
                word = str(config.get(key)).removeprefix("torch.")
                for name in _FLOATS:
                    if TORCH_NAMES[name] == word:
                        return name
        count: Counter[str] = Counter()
        for entry in self.entries.values():
            count[entry.dtype] += math.prod(entry.shape)
        return max(_FLOATS, key=lambda name: count[name])


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model directory, reading its configuration and headers only.

    Raises:
        InputError: anything missing, unreadable, contradictory or outside of the directory.
    """
    names = FILES.listing(path, None)
    if CONFIG not in names:
        hint = models_within(path) or "give the directory that holds it"
        raise InputError(f"{path}: no {CONFIG}", hint, file=str(path / CONFIG))
    config = read_object(path / CONFIG, roles.CONFIG, path)
    weights = read_weights(path, names)
    if not weights.entries:
        raise InputError(
            f"{path}: the model holds no tensors", "fetch or export it again", file=str(path)
        )
    _check_sizes(path / CONFIG, config, len(weights.entries))
    if CARD in names:
        FILES.check(path / CARD, roles.CARD, path)
    return Checkpoint(
        path=path,
        config=config,
        entries=weights.entries,
        shards=weights.shards,
        side_files=tuple(_side_files(path, names)),
        card=path / CARD if CARD in names else None,
    )


def _side_files(root: Path, names: list[str]) -> Iterator[Path]:
    if FOLDER in names:
        names = names + [f"{FOLDER}/{name}" for name in FILES.listing(root / FOLDER, root)]
    for name in sorted(names):
        role = role_of(name)
        if role is None:
            continue
        if not name.isprintable():
            raise InputError(f"{root}: {name!r} is no name for a file", "rename it", file=str(root))
        FILES.check(root / name, role, root)
        yield root / name


def role_of(name: str) -> FileRole | None:
    """Return the role of a file that is carried into a result, by its name inside of the model; None of any other."""
    for pattern, role in roles.CARRIED.items():
        if fnmatchcase(name, pattern):
            return role
    return roles.LICENCE if is_licence(name) else None


def is_licence(name: str) -> bool:
    """Return whether a file of this name is carried as the terms of a model."""
    licence = any(fnmatchcase(name.upper(), pattern) for pattern in LICENCES)
    return licence and Path(name).suffix.lower() not in _NO_LICENCE


def _least(key: str) -> int:
    return 0 if key == "head_dim" else 1  # glm5_next's own: latent attention without rotary columns


def _check_sizes(path: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse sizes that are no sizes, before anything loops over them or allocates by them."""
    for key in _SIZES:
        value = config.get(key)
        for size in value if isinstance(value, list) else [value]:
            if size is not None and (type(size) is not int or not _least(key) <= size <= _MAX_SIZE):
                raise InputError(
                    f"{path}: {key} = {size!r} is not a size",
                    f"an integer from 1 to {_MAX_SIZE}",
                    file=str(path),
                )
        if key in _LAYERS and isinstance(value, int) and value > tensors:
            raise InputError(
                f"{path}: {key} = {value}, but the model holds only {tensors} tensors",
                "configuration and weights are not of one model",
                file=str(path),
            )
    if isinstance(nested := config.get("text_config"), Mapping):
        _check_sizes(path, nested, tensors)
