"""Checkpoint view of a GGUF file, with the tensor names, order and shapes of transformers.

What is held in blocks appears as its bytes, and the configuration says of which type (``gguf_types``), so that the
format finds its layers as any format does. Types that can only be decoded (the lattices IQ1 to IQ3, NVFP4) appear as
float32. ``config.json`` is restated from the keys, the inverse of `parameters` and `rope`; what llama.cpp knows by
heart is stated as transformers spells it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quantforge.architectures.architecture import Architecture
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.errors import InputError, NotReadError
from quantforge.files.checksums import Checksums
from quantforge.files.reader import Checkpoint
from quantforge.files.safetensors import TensorEntry, read_rows, read_tensor
from quantforge.formats.gguf import KEY, QUANTIZATION_CONFIG, deinterleave_rotary_rows
from quantforge.formats.gguf.container import TYPES
from quantforge.formats.gguf.families import (
    canonical_names,
    declared_architecture,
    family_of,
    model_type_by_arch,
)
from quantforge.formats.gguf.parsing import GgufFile, TableEntry, read_gguf
from quantforge.formats.gguf.projector_file import check_no_tower
from quantforge.formats.gguf.rope import FREQUENCIES, LONG, SHORT, llama3_divisors
from quantforge.grids import GGML_BLOCKS
from quantforge.plans import DTYPE_BITS, FileTensorInfo

if TYPE_CHECKING:
    import torch

_COMPUTED = frozenset({FREQUENCIES, LONG, SHORT})
_MOST_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class _StoredAs:
    """Where a tensor of the model is in the file, and how it was transformed."""

    entry: TensorEntry
    type: str
    heads: int = 0
    plus_one: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class GgufCheckpoint(Checkpoint):
    """Checkpoint that reads a GGUF file; ``path`` is the file."""

    places: Mapping[str, _StoredAs]
    file: GgufFile

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor as transformers has it; blocks are returned as bytes with rows in transformers' order."""
        stored_tensor = self.places[name]
        return _restore(stored_tensor, read_tensor(stored_tensor.entry))

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows of a tensor; if its rows were reordered, all of it is read first."""
        stored_tensor = self.places[name]
        if stored_tensor.heads or stored_tensor.transposed:
            return self.read(name)[first:last]
        return _restore(stored_tensor, read_rows(stored_tensor.entry, first, last))

    def tensor_infos(self) -> tuple[FileTensorInfo, ...]:
        """Return the tensors with their types in the file, and shapes in elements."""
        return tuple(_held_tensor(entry, self.places[name]) for name, entry in self.entries.items())

    def with_checksums(self, checksums: Mapping[Path, Checksums]) -> Self:
        """Return the checkpoint with checksums of its files (as `Checkpoint`)."""
        stored_tensors = {
            name: replace(
                stored_tensor,
                entry=replace(stored_tensor.entry, checksums=checksums[stored_tensor.entry.file]),
            )
            for name, stored_tensor in self.places.items()
        }
        return replace(self, places=stored_tensors)


def open_gguf(path: Path) -> GgufCheckpoint:
    """Open a GGUF file, or a split one by any of its parts.

    Raises:
        InputError: damaged, or with tensors that are not of its architecture.
        NotReadError: as `config_from_keys`, and of the file of a tower.
    """
    file = read_gguf(path)
    check_no_tower(file)
    config = config_from_keys(file)
    family = family_of(config)
    blocks = int(config.get("num_hidden_layers", config.get("n_layer", 0)))
    if blocks > len(file.tensors):
        raise InputError(
            f"{blocks} blocks, but {len(file.tensors)} tensors",
            "the file is damaged",
            file=str(path),
            subject=str(path),
        )
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    known_names = canonical_names(config["model_type"], blocks, min(experts, _MOST_EXPERTS))
    stored_tensors: dict[str, _StoredAs] = {}
    for entry in file.tensors.values():
        if entry.name in _COMPUTED:
            continue
        if entry.name not in known_names:
            raise InputError(
                f"tensor {entry.name!r} is none of {family.arch}",
                "is this a model file?",
                file=str(path),
                tensor=entry.name,
                subject=str(path),
            )
        stored_tensors |= _stored_as(entry, known_names[entry.name], family, config)
    entries = {
        name: _visible_entry(name, stored_tensor)
        for name, stored_tensor in sorted(stored_tensors.items())
    }
    types = {
        name: stored_tensor.type.lower()
        for name, stored_tensor in sorted(stored_tensors.items())
        if stored_tensor.type.lower() in GGML_BLOCKS
    }
    if types:
        config = {**config, "quantization_config": dict(QUANTIZATION_CONFIG), f"{KEY}_types": types}
    return GgufCheckpoint(
        path=path,
        config=config,
        entries=entries,
        shards=file.files,
        side_files=(),
        card=None,
        places=stored_tensors,
        file=file,
    )


def stored_headers(file: GgufFile) -> tuple[FileTensorInfo, ...]:
    """Return the tensors of a file of any architecture, with their GGUF names."""
    return tuple(
        FileTensorInfo(
            entry.name,
            entry.type if TYPES[entry.type].columns == 1 else entry.type.lower(),
            entry.shape,
            entry.end - entry.start,
        )
        for entry in file.tensors.values()
    )


def _stored_as(
    entry: TableEntry, originals: tuple[str, ...], family: GgufFamily, config: Mapping[str, object]
) -> dict[str, _StoredAs]:
    """Return where each model tensor of one GGUF tensor is: one, or one per expert matrix of a stack."""
    raw = entry.raw()
    is_transposed = declared_architecture(str(config["model_type"])).transposed
    is_transposed = is_transposed and entry.name.startswith("blk.") and len(entry.shape) == 2
    stored_tensor = _StoredAs(
        raw,
        entry.type,
        _head_count(entry.name, family, config),
        family.norm_plus_one and entry.name.endswith("norm.weight"),
        is_transposed,
    )
    if len(originals) == 1:
        return {originals[0]: stored_tensor}
    experts, rows, _ = entry.shape if len(entry.shape) == 3 else (len(originals) + 1, 0, 0)
    # Matrices that are one, rows behind rows
    matrices_per_expert, remainder = divmod(len(originals), experts)
    if remainder or rows % matrices_per_expert:
        raise InputError(
            f"tensor {entry.name!r}: {list(entry.shape)}, {len(originals)} matrices of experts",
            tensor=entry.name,
        )
    size, shape = raw.nbytes // len(originals), (rows // matrices_per_expert, *raw.shape[2:])
    if raw.dtype == "U8":
        shape = (rows // matrices_per_expert, raw.shape[1])
    return {
        name: replace(
            stored_tensor,
            entry=replace(
                raw,
                shape=shape,
                start=raw.start + number * size,
                end=raw.start + (number + 1) * size,
            ),
        )
        for number, name in enumerate(originals)
    }


def _head_count(name: str, family: GgufFamily, config: Mapping[str, object]) -> int:
    module = name.rpartition(".")[0]
    key = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(
        module.rpartition(".")[2]
    )
    heads = config[key] if key and family.permutes_qk else 0
    return heads if isinstance(heads, int) else 0


def _visible_entry(name: str, stored_tensor: _StoredAs) -> TensorEntry:
    """Return the tensor entry with the model's name, dtype and shape."""
    entry = replace(stored_tensor.entry, name=name)
    if stored_tensor.type.lower() not in GGML_BLOCKS and TYPES[stored_tensor.type].columns > 1:
        entry = replace(entry, dtype="F32", shape=_block_shape(stored_tensor))
    if stored_tensor.transposed and entry.dtype != "U8":
        entry = replace(entry, shape=entry.shape[::-1])
    if stored_tensor.heads and entry.shape[0] % (2 * stored_tensor.heads):
        raise InputError(
            f"{name}: {entry.shape[0]} rows for {stored_tensor.heads} heads",
            "the file is damaged",
            tensor=name,
        )
    assert entry.dtype in DTYPE_BITS
    assert math.prod(entry.shape) > 0
    return entry


def _block_shape(stored_tensor: _StoredAs) -> tuple[int, int]:
    """Return the rows and columns, in elements, of a tensor stored in blocks."""
    rows, row_bytes = stored_tensor.entry.shape
    layout = TYPES[stored_tensor.type]
    return rows, row_bytes // layout.block_bytes * layout.columns


def _held_tensor(entry: TensorEntry, stored_tensor: _StoredAs) -> FileTensorInfo:
    if TYPES[stored_tensor.type].columns == 1:
        return FileTensorInfo(
            entry.name,
            stored_tensor.type,
            entry.shape,
            stored_tensor.entry.nbytes,
            stored_tensor.entry.name,
        )
    kind, shape = stored_tensor.type.lower(), _block_shape(stored_tensor)
    return FileTensorInfo(
        entry.name, kind, shape, stored_tensor.entry.nbytes, stored_tensor.entry.name
    )


def _restore(stored_tensor: _StoredAs, value: torch.Tensor) -> torch.Tensor:
    blocks = TYPES[stored_tensor.type].columns > 1
    if blocks and stored_tensor.type.lower() not in GGML_BLOCKS:
        from quantforge.packers.ggml.blocks import decode_blocks

        value = decode_blocks(value, stored_tensor.type)
    value = deinterleave_rotary_rows(value, stored_tensor.heads)
    if stored_tensor.plus_one:
        value = value - 1
    return (
        value.T.contiguous()
        if stored_tensor.transposed and value.dtype.is_floating_point
        else value
    )


# config.json from the keys


def config_from_keys(file: GgufFile) -> dict[str, Any]:
    """Return a ``config.json`` made from the keys of a GGUF file, without quantization.

    Raises:
        InputError: a key is missing or of a wrong type, or the file cannot be restated (`NotReadError`).
    """
    model_type = _model_type(file)
    declared = declared_architecture(model_type)
    family = family_of({"model_type": model_type})
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise InputError(
            "no tensor 'token_embd.weight'", "is this a model file?", subject=str(file.files[0])
        )
    keys = ArchitectureKeys(file, family, declared)
    return {
        "architectures": [family.transformers_class],
        "model_type": model_type,
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float16" if declared.allows_float16 else "float32",
        **_ids(file),
        **(
            family.read_config(keys)
            if family.read_config
            else {**keys.llama_config(), "hidden_act": family.activations[0]}
        ),
    }


def _model_type(file: GgufFile) -> str:
    """Return the ``model_type``; a llama file with experts is mixtral."""
    arch, known_types = file.value("general.architecture", str), model_type_by_arch()
    if arch not in known_types:
        raise NotReadError(
            f"architecture {arch!r} is not read",
            f"read are {', '.join(sorted(known_types))}",
            subject=str(file.files[0]),
        )
    if arch == "llama" and file.value("llama.expert_count", int, 0) > 1:
        return "mixtral"
    return known_types[arch]


def _ids(file: GgufFile) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    token_ids = {
        f"{role}_token_id": file.value(f"tokenizer.ggml.{name}_token_id", int, -1)
        for role, name in names.items()
    }
    return {key: value for key, value in token_ids.items() if value >= 0}


# Scaling of the frequencies as it was published: numbers that a table of divisors is compared with.
_LLAMA3 = [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 1.0, 1.0, 8192)]
_MOST_LAYERS = 1 << 16


class ArchitectureKeys:
    """Access to the metadata keys of one architecture, for the ``read_config`` function of a family."""

    def __init__(self, file: GgufFile, family: GgufFamily, declared: Architecture) -> None:
        self.file, self._family, self._declared = file, family, declared

    def common_config(self) -> dict[str, Any]:
        """Return the settings of ``config.json`` that all families share: sizes, biases, ``required_values``."""
        family, file = self._family, self.file
        heads, hidden = self.get_int("attention.head_count"), self.get_int("embedding_length")
        head_dim = self.get_int("attention.key_length", hidden // heads if heads else 0)
        if not (heads and head_dim):
            raise InputError(
                f"{heads} heads of {head_dim} columns",
                "the file is damaged",
                subject=str(file.files[0]),
            )
        return {
            "hidden_size": hidden,
            "num_hidden_layers": self.get_int("block_count"),
            "num_attention_heads": heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.get_int("context_length"),
            family.epsilon_keys[1]: self.get_float(family.epsilon_keys[0]),
            **{key: f"blk.0.{name}" in file.tensors for key, name in family.bias_keys.items()},
            **family.required_values,
        }

    def llama_config(self) -> dict[str, Any]:
        """Return the settings of a llama-like ``config.json``.

        These are `common_config`, key/value heads, the MLP, ``float_keys`` and rotary embeddings.
        """
        sizes = self.common_config()
        rotates_whole_head = self._declared.defaults.get("partial_rotary_factor", 1.0) == 1.0
        heads = self.get_int("attention.head_count_kv", sizes["num_attention_heads"])
        return {
            **sizes,
            "num_key_value_heads": heads,
            "intermediate_size": self.get_int("feed_forward_length"),
            **{
                config_key: self.get_float(key)
                for key, config_key in self._family.float_keys.items()
                if isinstance(config_key, str)
            },
            **self.rope_config(sizes["head_dim"], whole=rotates_whole_head),
        }

    def get_int(self, key: str, otherwise: int | None = None) -> int:
        """Return a non-negative integer; raise `InputError` for a negative one."""
        return self._count(key, self.file.value(self._full_key(key), int, otherwise))

    def get_float(self, key: str, otherwise: float | None = None) -> float:
        """Return a number, rounded to the shortest decimal with the same float32 value."""
        value: float = self.file.value(self._full_key(key), float, otherwise)
        return shortest_decimal(value)

    def get_str(self, key: str) -> str:
        """Return a string, "" if the key is missing."""
        value: str = self.file.value(self._full_key(key), str, "")
        return value

    def per_layer(self, key: str, kind: type[int] | type[bool] = int) -> list[int]:
        """Return one value per layer: the items of a list, or a single number repeated."""
        layers = self.get_int("block_count")
        value = self.file.metadata.get(self._full_key(key))
        if layers > _MOST_LAYERS or (value is not None and isinstance(value.value, list)):
            values: list[Any] = self.file.value(self._full_key(key), list)
            if len(values) != layers or any(type(item) is not kind for item in values):
                raise self._damaged(key, str(values)[:40])
            return [self._count(key, item) for item in values]
        return [self._count(key, self.file.value(self._full_key(key), kind))] * layers

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor, () where there is none."""
        tensor_info = self.file.tensors.get(tensor)
        return tensor_info.shape if tensor_info else ()

    def rope_divisors(self) -> list[float]:
        """Return the divisors of the rotary frequencies, [] if the file has no table."""
        if FREQUENCIES not in self.file.tensors:
            return []
        return [
            shortest_decimal(value)
            for value in read_tensor(self.file.tensors[FREQUENCIES].raw()).tolist()
        ]

    def not_read_error(self, setting: str, supported: str) -> NotReadError:
        """Return the error for a file that no transformers configuration can describe."""
        return NotReadError(
            f"{setting} is not read (read: {supported})",
            "evaluate it with --engine llama.cpp",
            subject=str(self.file.files[0]),
        )

    def rope_config(self, head: int, *, whole: bool = True) -> dict[str, Any]:
        """Return the rotary embedding settings of all layers.

        Args:
            head: the columns of one.
            whole: it turns as a whole where a configuration of the family says nothing.
        """
        file, kind = self.file, self.get_str("rope.scaling.type")
        base = self.get_float("rope.freq_base", 10_000.0)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
        width = self.get_int("rope.dimension_count", head)
        if FREQUENCIES in file.tensors:
            rope |= self._llama3(base, width)
        elif LONG in file.tensors and SHORT in file.tensors:
            rope |= {
                "rope_type": "longrope",
                "long_factor": read_tensor(file.tensors[LONG].raw()).tolist(),
                "short_factor": read_tensor(file.tensors[SHORT].raw()).tolist(),
                "attention_factor": self.get_float("rope.scaling.attn_factor", 1.0),
                "original_max_position_embeddings": self._original(),
            }
        elif kind in {"linear", "yarn"}:
            rope |= {"rope_type": kind, "factor": self.get_float("rope.scaling.factor", 1.0)}
            if kind == "yarn":
                rope["original_max_position_embeddings"] = self._original()
        elif kind not in {"", "none"}:
            raise NotReadError(
                f"rope scaling {kind!r} is not read",
                "linear, yarn, llama3 and longrope are",
                subject=str(file.files[0]),
            )
        if width != head or not whole:
            rope["partial_rotary_factor"] = width / head
        rope_fields: dict[str, Any] = {"rope_parameters": rope}
        if rope["rope_type"] == "longrope":
            rope_fields["original_max_position_embeddings"] = rope[
                "original_max_position_embeddings"
            ]
        return rope_fields

    def _original(self) -> int:
        return self.get_int("rope.scaling.original_context_length")

    def _llama3(self, base: float, width: int) -> dict[str, Any]:
        """Return the llama3 scaling settings whose divisors equal the file's table."""
        stored = read_tensor(self.file.tensors[FREQUENCIES].raw()).double()
        for factor, low, high, original in _LLAMA3:
            divisors = llama3_divisors(base, width, factor, low, high, original)
            if len(divisors) == len(stored) and all(
                abs(stored_divisor - divisor) <= 1e-6 * divisor
                for stored_divisor, divisor in zip(stored.tolist(), divisors, strict=True)
            ):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
        raise NotReadError(
            f"{FREQUENCIES} is none of the published scalings",
            "evaluate it with --engine llama.cpp",
            subject=str(self.file.files[0]),
        )

    def _full_key(self, key: str) -> str:
        return f"{self._family.arch}.{key}"

    def _count(self, key: str, value: int) -> int:
        if not 0 <= value < 1 << 31:
            raise self._damaged(key, value)
        return value

    def _damaged(self, key: str, value: object) -> InputError:
        return InputError(
            f"{self._full_key(key)} = {value}",
            "the file is damaged",
            subject=str(self.file.files[0]),
        )


def shortest_decimal(value: float) -> float:
    """Return the shortest decimal with the same float32 value: 1e-05 instead of 9.999999747378752e-06."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value
