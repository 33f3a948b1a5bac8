"""Contents of the files beside the weights of a model, and the pair of models that is compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quantforge.architectures import text_config
from quantforge.checkpoint.files import FILES
from quantforge.errors import InputError
from quantforge.formats.opening import side_data
from quantforge.verification.opening import Artifact, Original
from quantforge_files.roles import TOKENIZER

HELD = frozenset({"quantization_config", "quantization", "gguf_types"})  # say how weights are held


class DocumentError(ValueError):
    """A file is no JSON object that all readers understand alike."""


@dataclass(frozen=True)
class Beside:
    """The files beside the weights by name, and the configuration.

    Attributes:
        tensors: names of all stored tensors.
        dtypes: stored types of those that are called ``weight`` or ``bias``.
    """

    config: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    tensors: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()

    def document(self, name: str) -> dict[str, Any]:
        """Return a JSON file, {} where there is none; raise `DocumentError` where it is no object."""
        if name not in self._parsed:
            self._parsed[name] = parse(self.files[name]) if name in self.files else {}
        return self._parsed[name]

    def readable(self, name: str) -> dict[str, Any]:
        """Return `document`, or {} where the file is damaged, which another check reports."""
        try:
            return self.document(name)
        except DocumentError:
            return {}

    @cached_property
    def _parsed(self) -> dict[str, dict[str, Any]]:
        return {}

    @property
    def quantization(self) -> Mapping[str, Any]:
        """Return ``quantization_config`` as it stands; {} where it is no object."""
        found = self.config.get("quantization_config")
        return found if isinstance(found, Mapping) else {}

    @cached_property
    def plain(self) -> dict[str, Any]:
        """Return the configuration without the keys that say how weights are held."""
        return {key: value for key, value in self.config.items() if key not in HELD}


@dataclass(frozen=True, slots=True)
class Pair:
    """An artifact's files, the source's, and the key of the artifact's format."""

    own: Beside
    other: Beside
    form: str = ""


def beside(model: Artifact | Original) -> Beside:
    """Read what lies beside the weights of a model; of a GGUF file what its keys say."""
    checkpoint = model.checkpoint
    if checkpoint.path.is_dir():
        files = checkpoint.side_data()
    else:
        try:
            files = side_data(checkpoint)
        except InputError:
            files = {}
    stored = checkpoint.entries
    plain = {entry.dtype for name, entry in stored.items() if name.endswith(("weight", "bias"))}
    return Beside(checkpoint.config, files, frozenset(stored), frozenset(plain))


def parse(data: bytes) -> dict[str, Any]:
    """Parse a JSON object whose keys are unique at every level; numbers may be of any size.

    Raises:
        DocumentError: it is none, or too large or deep for a tokenizer.
    """
    try:
        FILES.check_json(data, "document", TOKENIZER)
        found = json.loads(data.decode(), object_pairs_hook=_unique)
    except (InputError, ValueError, RecursionError) as error:
        raise DocumentError(str(error)) from error
    if not isinstance(found, dict):
        raise DocumentError("no JSON object")
    return found


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DocumentError("a key occurs twice")
    return found


def tower(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model."""
    return text_config(config)
