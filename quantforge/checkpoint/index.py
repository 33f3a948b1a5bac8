"""Index of the safetensors files that make up a model, and of the tensors in each of them.

Either ``model.safetensors`` alone (of Medusa heads ``medusa_lm_head.safetensors``), or shards listed by
``model.safetensors.index.json``, whose ``weight_map`` names the file of every tensor. The map is checked both ways
against the headers and all disagreements are reported at once, because each one means a tensor that some loader would
take from the wrong file, or initialise at random. ``metadata.total_size`` is not checked: published models get it wrong
when tensors are tied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quantforge.checkpoint.foreign_json import read_object
from quantforge.checkpoint.safetensors import TensorEntry, read_header
from quantforge.errors import InputError
from quantforge_files import roles

SINGLE = "model.safetensors"
HEADS = "medusa_lm_head.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN_PROBLEMS, ENOUGH_PROBLEMS = 20, 1000

# No separator, drive or stream of any operating system can be written with these characters.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
# A second copy of the same weights that some publishers add for their own runtime.
_SECOND_COPY = re.compile(r"consolidated.*\.safetensors")
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".nemo"}


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a model by name (sorted) and the files that hold them."""

    entries: Mapping[str, TensorEntry]
    shards: tuple[Path, ...]


def read_weights(root: Path, names: list[str]) -> Weights:
    """Find the weight files among the ``names`` in a model directory and read their headers.

    Raises:
        InputError: no safetensors files, or files that do not agree; lists every problem.
    """
    present = {
        name for name in names if name.endswith(".safetensors") and not _SECOND_COPY.fullmatch(name)
    }
    if INDEX in names:
        return _read_indexed(root, present)
    single = HEADS if present == {HEADS} else SINGLE
    if single not in present:
        raise _no_weights(root, names)
    if extra := sorted(present - {single}):
        raise _error(
            root / extra[0],
            f"{extra[:SHOWN_PROBLEMS]} beside {SINGLE} without {INDEX}: which is the model?",
        )
    entries = read_header(root / single, root)
    return Weights(dict(sorted(entries.items())), (root / single,))


def _read_indexed(root: Path, present: set[str]) -> Weights:
    index = root / INDEX
    weight_map = _weight_map(index)
    shards = sorted(set(weight_map.values()))
    if bad := [shard for shard in shards if not _PLAIN_NAME.fullmatch(shard)]:
        raise _error(index, *(f"{name[:80]!r} is not the name of a file beside it" for name in bad))
    problems = [f"{name!r} is not in the index" for name in sorted(present - set(shards))]
    entries: dict[str, TensorEntry] = {}
    listed: dict[str, list[str]] = {shard: [] for shard in shards}
    for name, shard in weight_map.items():
        listed[shard].append(name)
    for shard in shards:
        if len(problems) > ENOUGH_PROBLEMS:
            break
        try:
            found = read_header(root / shard, root)
        except InputError as error:
            problems.append(error.message)
            continue
        problems += _compare(shard, found, entries, weight_map, listed[shard])
        entries.update(found)
    if problems:
        raise _error(index, *problems)
    return Weights(dict(sorted(entries.items())), tuple(root / shard for shard in shards))


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index, roles.INDEX, index.parent).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(shard, str) for shard in weight_map.values())
    ):
        raise _error(index, "weight_map is not a table of tensor names and file names")
    return weight_map


def _compare(
    shard: str,
    found: Mapping[str, TensorEntry],
    before: Mapping[str, TensorEntry],
    weight_map: Mapping[str, str],
    listed: Iterable[str],
) -> Iterable[str]:
    for name in found:
        if name in before:
            yield f"tensor {name!r} is in {before[name].file.name} and in {shard}"
        elif name not in weight_map:
            yield f"tensor {name!r} of {shard} is not in the index"
    for name in listed:
        if name not in found:
            yield f"tensor {name!r} is not in {shard}, where the index puts it"


def _no_weights(root: Path, names: list[str]) -> InputError:
    pickled = sorted(name for name in names if Path(name).suffix in _PICKLED)
    if pickled:
        return InputError(
            f"{root}: only pickled weights ({pickled[0]!r}); pickle can run code and is never read",
            'convert it in an environment of its own: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{root}').save_pretrained('OUT')\"",
            file=str(root / pickled[0]),
        )
    other = sorted(name for name in names if name.endswith((".safetensors", ".gguf")))
    found = f"; found {', '.join(map(repr, other[:5]))}" if other else ""
    return InputError(
        f"{root}: neither {SINGLE} nor {INDEX}{found}",
        "give the directory of a model as transformers saves it",
        file=str(root),
    )


def _error(path: Path, *problems: str) -> InputError:
    more = len(problems) - SHOWN_PROBLEMS
    shown = "; ".join(problems[:SHOWN_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
    return InputError(
        f"{path}: {shown}",
        "fetch the model again, or remove files that are not part of it",
        file=str(path),
    )
