"""Read a model directory of Hugging Face: configuration, tensors and side files.

Opening reads only headers. Anything that is not understood exactly is refused. Code of a model is never executed, and
of the other files only those with a role (`role_of`) are passed on, so that neither code nor pickles nor stray files
reach a result.

Weights are either ``model.safetensors`` alone (``medusa_lm_head.safetensors`` for Medusa heads), or shards listed by
``model.safetensors.index.json``, whose ``weight_map`` names the file of every tensor. The map is compared with the
headers in both directions and all differences are reported at once, because each one means a tensor that some loader
would take from the wrong file, or initialize at random. ``metadata.total_size`` is not checked: published models have
it wrong when tensors are tied.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quantforge.errors import InputError
from quantforge.files import safetensors
from quantforge.files.checksums import Checksums
from quantforge.files.hub import hint_for_directory
from quantforge.files.opener import FILES, read_object
from quantforge.files.safetensors import TORCH_NAMES, TensorEntry, read_header
from quantforge.plans import FileTensorInfo, StoredTensor
from quantforge_calibration.chat_templates import TEMPLATE_FOLDER
from quantforge_files import roles
from quantforge_files.roles import FileRole

if TYPE_CHECKING:
    import torch

    from quantforge.architectures.match import DerivedDeclarations

CONFIG_FILE = "config.json"
QUANTIZATION = "quantization"  # key in `Checkpoint.source_notes`: a leftover declaration
CARD_FILE = "README.md"
LICENSE_PATTERNS = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*")
_NOT_LICENSE_SUFFIXES = {".py", ".bin", ".pt", ".pth", ".pkl", ".safetensors"}

_SIZE_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
    "n_embd", "n_layer", "n_head", "n_positions",
)  # fmt: skip
_LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer")
_MAX_SIZE = 2**31 - 1
_FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")

SINGLE_FILE = "model.safetensors"
MEDUSA_FILE = "medusa_lm_head.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHOWN_PROBLEMS, MAX_PROBLEMS = 20, 1000

# No separator, drive or stream of any operating system can be written with these characters.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
# A second copy of the same weights that some publishers add for their own runtime.
_SECOND_COPY = re.compile(r"consolidated.*\.safetensors")
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".nemo"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model directory.

    Attributes:
        path: the directory.
        config: content of ``config.json``.
        entries: the tensors by name, sorted.
        shards: the safetensors files.
        side_files: files to copy unchanged into a result, sorted; all lie under ``path``.
        card: the model card ``README.md``, if there is one.
        declaration_note: how a declared quantization was handled that no longer applies or is in an unusual place; ""
            if there is none.
    """

    path: Path
    config: dict[str, Any]
    entries: Mapping[str, TensorEntry]
    shards: tuple[Path, ...]
    side_files: tuple[Path, ...]
    card: Path | None
    declaration_note: str = field(default="", kw_only=True)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor; errors as `safetensors.read_tensor`."""
        return safetensors.read_tensor(self.entries[name])

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows ``first:last`` of a tensor; errors as `safetensors.read_rows`."""
        return safetensors.read_rows(self.entries[name], first, last)

    def read_side_files(self) -> dict[str, bytes]:
        """Read the side files, by their names within the model; errors as `Opener.read`."""
        return {
            name: FILES.read(path, role, self.path)
            for path in self.side_files
            if (role := role_of(name := path.relative_to(self.path).as_posix()))
        }

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Return name, type and shape of every tensor, by name."""
        return {name: entry.to_stored_tensor() for name, entry in self.entries.items()}

    def tensor_infos(self) -> tuple[FileTensorInfo, ...]:
        """Return the tensors as their files describe them."""
        return tuple(entry.to_tensor_info() for entry in self.entries.values())

    @property
    def source_notes(self) -> Mapping[str, str]:
        """Return notes about the source for plans and manifests, by subject: its precision, what was merged into it."""
        return {QUANTIZATION: self.declaration_note} if self.declaration_note else {}

    @property
    def derived_declarations(self) -> DerivedDeclarations | None:
        """Return the declarations that were derived for this model, if a view was made with them, else None."""
        return None

    @property
    def original(self) -> Checkpoint:
        """Return the checkpoint as it was opened: itself, unless it is a view of another."""
        return self

    def with_checksums(self, checksums: Mapping[Path, Checksums]) -> Self:
        """Return the same checkpoint with checksums, against which its tensors are verified when they are read."""
        entries = {
            name: replace(entry, checksums=checksums[entry.file])
            for name, entry in self.entries.items()
        }
        return replace(self, entries=entries)

    @property
    def dtype(self) -> str:
        """Return the model's type by its safetensors name: the configured one, else the most common."""
        nested = self.config.get("text_config")
        for config in (self.config, nested if isinstance(nested, dict) else {}):
            for key in ("dtype", "torch_dtype"):
                dtype_name = str(config.get(key)).removeprefix("torch.")
                for name in _FLOAT_DTYPES:
                    if TORCH_NAMES[name] == dtype_name:
                        return name
        count: Counter[str] = Counter()
        for entry in self.entries.values():
            count[entry.dtype] += math.prod(entry.shape)
        return max(_FLOAT_DTYPES, key=lambda name: count[name])


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model directory, reading only its configuration and headers.

    Raises:
        InputError: a file is missing, unreadable, contradictory or outside of the directory.
    """
    names = FILES.list_names(path, None)
    if CONFIG_FILE not in names:
        hint = hint_for_directory(path) or "give the directory that holds it"
        raise InputError(f"no {CONFIG_FILE}", hint, file=str(path / CONFIG_FILE), subject=str(path))
    config = read_object(path / CONFIG_FILE, roles.CONFIG, path)
    entries, shards = read_weights(path, names)
    if not entries:
        raise InputError(
            "the model holds no tensors",
            "fetch or export it again",
            file=str(path),
            subject=str(path),
        )
    _check_sizes(path / CONFIG_FILE, config, len(entries))
    if CARD_FILE in names:
        FILES.check(path / CARD_FILE, roles.CARD, path)
    return Checkpoint(
        path=path,
        config=config,
        entries=entries,
        shards=shards,
        side_files=tuple(_side_files(path, names)),
        card=path / CARD_FILE if CARD_FILE in names else None,
    )


def _side_files(root: Path, names: list[str]) -> Iterator[Path]:
    if TEMPLATE_FOLDER in names:
        names = names + [
            f"{TEMPLATE_FOLDER}/{name}" for name in FILES.list_names(root / TEMPLATE_FOLDER, root)
        ]
    for name in sorted(names):
        role = role_of(name)
        if role is None:
            continue
        if not name.isprintable():
            raise InputError(
                f"{name!r} is no name for a file", "rename it", file=str(root), subject=str(root)
            )
        FILES.check(root / name, role, root)
        yield root / name


def role_of(name: str) -> FileRole | None:
    """Return the role of a file that is copied into a result, by its name in the model; None for any other file."""
    for pattern, role in roles.CARRIED_FILES.items():
        if fnmatchcase(name, pattern):
            return role
    return roles.LICENCE if is_license(name) else None


def is_license(name: str) -> bool:
    """Return whether a file of this name is copied as a license of the model."""
    matches = any(fnmatchcase(name.upper(), pattern) for pattern in LICENSE_PATTERNS)
    return matches and Path(name).suffix.lower() not in _NOT_LICENSE_SUFFIXES


def _check_sizes(path: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Refuse invalid sizes before anything loops over them or allocates by them."""
    for key in _SIZE_KEYS:
        value, minimum = config.get(key), 0 if key == "head_dim" else 1  # of glm5_next
        for size in value if isinstance(value, list) else [value]:
            if size is not None and (type(size) is not int or not minimum <= size <= _MAX_SIZE):
                raise InputError(
                    f"{key} = {size!r} is not a size",
                    f"an integer from 1 to {_MAX_SIZE}",
                    file=str(path),
                    subject=str(path),
                )
        if key in _LAYER_COUNT_KEYS and isinstance(value, int) and value > tensors:
            raise InputError(
                f"{key} = {value}, but the model holds only {tensors} tensors",
                "configuration and weights are not of one model",
                file=str(path),
                subject=str(path),
            )
    if isinstance(nested := config.get("text_config"), Mapping):
        _check_sizes(path, nested, tensors)


def read_weights(root: Path, names: list[str]) -> tuple[dict[str, TensorEntry], tuple[Path, ...]]:
    """Find the weight files among the ``names`` in a model directory and read their headers.

    Returns:
        The tensors by name (sorted), and their files.

    Raises:
        InputError: no safetensors files, or files that contradict each other; lists every problem.
    """
    present_files = {
        name for name in names if name.endswith(".safetensors") and not _SECOND_COPY.fullmatch(name)
    }
    if INDEX_FILE in names:
        return _read_indexed(root, present_files)
    single_file = MEDUSA_FILE if present_files == {MEDUSA_FILE} else SINGLE_FILE
    if single_file not in present_files:
        raise _no_weights_error(root, names)
    if extra := sorted(present_files - {single_file}):
        raise _weights_error(
            root / extra[0],
            f"{extra[:MAX_SHOWN_PROBLEMS]} beside {SINGLE_FILE} without {INDEX_FILE}: which is the model?",
        )
    entries = read_header(root / single_file, root)
    return dict(sorted(entries.items())), (root / single_file,)


def _read_indexed(
    root: Path, present_files: set[str]
) -> tuple[dict[str, TensorEntry], tuple[Path, ...]]:
    index = root / INDEX_FILE
    weight_map = _read_weight_map(index)
    shards = sorted(set(weight_map.values()))
    if bad_names := [shard for shard in shards if not _PLAIN_NAME.fullmatch(shard)]:
        raise _weights_error(
            index, *(f"{name[:80]!r} is not the name of a file beside it" for name in bad_names)
        )
    problems = [f"{name!r} is not in the index" for name in sorted(present_files - set(shards))]
    entries: dict[str, TensorEntry] = {}
    names_by_shard: dict[str, list[str]] = {shard: [] for shard in shards}
    for name, shard in weight_map.items():
        names_by_shard[shard].append(name)
    for shard in shards:
        if len(problems) > MAX_PROBLEMS:
            break
        try:
            header = read_header(root / shard, root)
        except InputError as error:
            problems.append(error.message)
            continue
        problems += _compare_with_index(shard, header, entries, weight_map, names_by_shard[shard])
        entries.update(header)
    if problems:
        raise _weights_error(index, *problems)
    return dict(sorted(entries.items())), tuple(root / shard for shard in shards)


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index, roles.INDEX, index.parent).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(shard, str) for shard in weight_map.values())
    ):
        raise _weights_error(index, "weight_map is not a table of tensor names and file names")
    return weight_map


def _compare_with_index(
    shard: str,
    header: Mapping[str, TensorEntry],
    earlier_entries: Mapping[str, TensorEntry],
    weight_map: Mapping[str, str],
    listed_names: Iterable[str],
) -> Iterable[str]:
    for name in header:
        if name in earlier_entries:
            yield f"tensor {name!r} is in {earlier_entries[name].file.name} and in {shard}"
        elif name not in weight_map:
            yield f"tensor {name!r} of {shard} is not in the index"
    for name in listed_names:
        if name not in header:
            yield f"tensor {name!r} is not in {shard}, where the index puts it"


def _no_weights_error(root: Path, names: list[str]) -> InputError:
    pickle_files = sorted(name for name in names if Path(name).suffix in _PICKLE_SUFFIXES)
    if pickle_files:
        return InputError(
            f"only pickled weights ({pickle_files[0]!r}); pickle can run code and is never read",
            'convert it in an environment of its own: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{root}').save_pretrained('OUT')\"",
            file=str(root / pickle_files[0]),
            subject=str(root),
        )
    other_files = sorted(name for name in names if name.endswith((".safetensors", ".gguf")))
    found_note = f"; found {', '.join(map(repr, other_files[:5]))}" if other_files else ""
    return InputError(
        f"neither {SINGLE_FILE} nor {INDEX_FILE}{found_note}",
        "give the directory of a model as transformers saves it",
        file=str(root),
        subject=str(root),
    )


def _weights_error(path: Path, *problems: str) -> InputError:
    num_hidden = len(problems) - MAX_SHOWN_PROBLEMS
    problem_text = "; ".join(problems[:MAX_SHOWN_PROBLEMS]) + (
        f"; and {num_hidden} more" if num_hidden > 0 else ""
    )
    return InputError(
        f"{problem_text}",
        "fetch the model again, or remove files that are not part of it",
        file=str(path),
        subject=str(path),
    )
