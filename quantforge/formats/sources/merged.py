"""A model with a LoRA adapter merged on read: ``W + scaling * B A``.

The formula is PEFT's: products and sums in float32, of DoRA every row brought to its length. PEFT rounds the product to
the type of the model before it is added, and the sum once more; here what is rounded starts from the float32 sum, and
what is kept is rounded once. A model in float32 comes out as PEFT's own merge has it.

The product is made in tiles of `TILE` rows, whose borders do not depend on the rows that are asked for: a row has the
same bits in every strip that it is read in. A head that is the embedding becomes one of its own as soon as an adapter
changes either of them: in training the change of one did not reach the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quantforge.architectures.configuration import untie_config
from quantforge.architectures.match import ModelLayout, Role, match_tensors
from quantforge.errors import InputError
from quantforge.files.computed_tensors import (
    ADAPTER,
    ComputedCheckpoint,
    ComputeRows,
    with_computed_tensors,
)
from quantforge.files.reader import Checkpoint
from quantforge.files.safetensors import TensorEntry, read_rows, read_tensor
from quantforge.formats.sources.adapter import CONFIG, WEIGHTS, Adapter, LowRankUpdate, merge_steps

if TYPE_CHECKING:
    from torch import Tensor

TILE = 64  # rows of a product
_MISSING = ": the model has no such tensor"


@dataclass(frozen=True, slots=True)
class _LowRankMergedReader:
    """Reader of a weight with its low-rank update added.

    Attributes:
        base: name of the weight.
        change: what is added.
        turned: the weight is stored ``[in, out]``.
    """

    base: str
    change: LowRankUpdate
    turned: bool

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """Return rows ``first:last`` in float32."""
        rows = checkpoint.entries[self.base].shape[0]
        if self.turned and self.change.magnitude is not None:  # lengths are those of columns
            return self._scaled(checkpoint.read(self.base).float(), 0, rows)[first:last]
        return self._scaled(checkpoint.read_rows(self.base, first, last).float(), first, last)

    def _scaled(self, weight: Tensor, first: int, last: int) -> Tensor:
        """Return the merged rows for rows ``first:last`` of the base weight, DoRA magnitudes applied."""
        import torch

        if first == last:
            return weight
        merged = weight + self._product(first, last)
        if self.change.magnitude is None:
            return merged
        magnitude = read_tensor(self.change.magnitude).float()
        lengths = torch.linalg.norm(merged.T if self.turned else merged, dim=1)
        if bool((lengths == 0).any()):
            output = int((lengths == 0).nonzero()[0]) + (0 if self.turned else first)
            raise InputError(
                f"{self.change.b.file}: use_dora divides by the length of the weights of each output, and with the"
                f" product added those of output {output} of {self.base} are all zero",
                "PEFT's own merge gives NaN there: train it with use_dora=False, or without this module",
                file=str(self.change.b.file),
                tensor=self.base,
            )
        if self.turned:
            return merged.mul_((magnitude / lengths).view(1, -1))
        return merged.mul_((magnitude[first:last] / lengths).view(-1, 1))

    def _product(self, first: int, last: int) -> Tensor:
        import torch

        from quantforge.numerics.products import matmul

        change, rows = self.change, self.change.shape[1 if self.turned else 0]
        a, scaling = read_tensor(change.a).float(), change.scaling
        b = read_tensor(change.b).float() if self.turned else None
        products = []
        for start in range(first // TILE * TILE, last, TILE):
            stop = min(start + TILE, rows)
            if b is None:
                tile = matmul(read_rows(change.b, start, stop).float(), a)
            else:
                tile = matmul(b, a[:, start:stop].contiguous()).T
            products.append(tile[max(first - start, 0) : last - start].mul_(scaling))
        return torch.cat(products)


@dataclass(frozen=True, slots=True)
class _BiasReader:
    """Reader of a bias with the adapter's bias added."""

    base: str
    added: TensorEntry
    scaling: float

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """Return the values ``first:last`` in float32."""
        added_bias = read_rows(self.added, first, last).float() * self.scaling
        return checkpoint.read_rows(self.base, first, last).float() + added_bias


def merge_adapter(checkpoint: Checkpoint, adapter: Adapter) -> ComputedCheckpoint:
    """Return a view of a model with an adapter merged into it.

    Raises:
        InputError: the adapter is of another model: a name matches nothing, or a shape is another; lists all of them.
    """
    model_layout = match_tensors(
        checkpoint.config, [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    )
    stored_names = _StoredNames(checkpoint, model_layout)
    touched_names = {
        *(f"{module}.weight" for module in adapter.low_rank_updates),
        *adapter.replaced_tensors,
    }
    unties_head = not adapter.replaces_tied_head and stored_names.needs_separate_head(touched_names)
    replacements, merged = (
        _MergedTensors(checkpoint, stored_names),
        _MergedTensors(checkpoint, stored_names),
    )
    for name, entry in adapter.replaced_tensors.items():
        replacements.put(name, entry.shape, _ReplacementReader(entry))
    for module, change in adapter.low_rank_updates.items():
        name = f"{module}.weight"
        is_transposed = change.embedding or stored_names.is_transposed(name, adapter.fan_in_fan_out)
        shape = change.shape[::-1] if is_transposed else change.shape
        merged.put(
            name, shape, _LowRankMergedReader(stored_names.base(name), change, is_transposed)
        )
        if change.bias is not None:
            name = f"{module}.bias"
            if not stored_names.base(name):
                raise _no_bias_error(checkpoint, adapter, change.bias.name, name)
            rows = _BiasReader(stored_names.base(name), change.bias, change.scaling)
            merged.put(name, change.bias.shape, rows)
    unchanged = [
        f"{name}: target_modules name it, and the adapter does not change it"
        for name in stored_names.find_linears(adapter.always_adapted)
        if name not in merged.computed
    ]
    resized = {**replacements.resized, **merged.resized}
    problems = [*replacements.problems, *merged.problems]
    if not problems and len({rows for rows, _ in resized.values()}) == 1:
        raise _resized_error(checkpoint, adapter, resized)
    problems += [
        f"{name}: {rows} rows, that of the model has {model_rows}"
        for name, (rows, model_rows) in resized.items()
    ]
    if problems or unchanged:
        hint = adapter.trained_on
        if not problems:
            hint = f"fetch it again: a part of it is missing; {hint}"
        elif merged.computed and all(problem.endswith(_MISSING) for problem in problems):
            hint = (
                f"its other tensors fit: train it without what the model has no place for; {hint}"
            )
        raise _mismatch_error(checkpoint, adapter, [*problems, *unchanged], hint)
    facts = {ADAPTER: _merge_description(adapter, unties_head)}
    config, new_entries = checkpoint.config, {}
    if unties_head:
        head = stored_names.stored(stored_names.head)
        new_entries = {head: replace(checkpoint.entries[stored_names.embedding], name=head)}
        replacements.computed.setdefault(head, _UntiedHeadReader(stored_names.embedding))
        config = untie_config(config)
    extended = with_computed_tensors(
        checkpoint, replacements.computed, config=config, new_entries=new_entries
    )
    return with_computed_tensors(extended, merged.computed, source_notes=facts)


def _resized_error(
    checkpoint: Checkpoint, adapter: Adapter, resized: Mapping[str, tuple[int, int]]
) -> InputError:
    """Return the error for an adapter trained with another vocabulary size."""
    rows, model_rows = next(iter(resized.values()))
    change_text = (
        f"{rows - model_rows} tokens were added"
        if rows > model_rows
        else f"{model_rows - rows} tokens were removed"
    )
    have = "have" if len(resized) > 1 else "has"
    return InputError(
        f"{change_text} before it was trained: {' and '.join(resized)} {have} {rows} rows in the adapter,"
        f" {model_rows} in {checkpoint.path}",
        merge_steps(str(checkpoint.path), str(adapter.path), rows),
        file=str(adapter.path / WEIGHTS),
        subject=str(adapter.path),
    )


def _mismatch_error(
    checkpoint: Checkpoint, adapter: Adapter, problems: list[str], hint: str
) -> InputError:
    more_suffix = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
    return InputError(
        f"the adapter does not fit {checkpoint.path} ({len(problems)}):"
        f" {'; '.join(problems[:10])}{more_suffix}",
        hint,
        file=str(adapter.path / CONFIG),
        subject=str(adapter.path),
    )


def _no_bias_error(checkpoint: Checkpoint, adapter: Adapter, tensor: str, name: str) -> InputError:
    return InputError(
        f"lora_bias adds to {name}, which {checkpoint.path} does not have",
        "PEFT merges no such adapter either: train it without lora_bias",
        file=str(adapter.path / WEIGHTS),
        tensor=tensor,
        subject=str(adapter.path),
    )


class _MergedTensors:
    """Tensors that an adapter changes, and the problems found.

    Attributes:
        computed: readers by stored name.
        problems: one line each.
        resized: embedding and head with other rows than the model's alone: theirs, and those of the model.
    """

    def __init__(self, checkpoint: Checkpoint, stored_names: _StoredNames) -> None:
        self._entries, self._places = checkpoint.entries, stored_names
        self.computed: dict[str, ComputeRows] = {}
        self.problems: list[str] = []
        self.resized: dict[str, tuple[int, int]] = {}

    def put(self, name: str, shape: tuple[int, ...], rows: ComputeRows) -> None:
        """Register a reader for a tensor of the model if the model has it in this shape; else record a problem."""
        base, stored = self._places.base(name), self._places.stored(name)
        if not base:
            self.problems.append(f"{name}{_MISSING}")
        elif (
            base in {self._places.embedding, self._places.stored(self._places.head)}
            and (model_shape := self._entries[base].shape) != shape
            and model_shape[1:] == shape[1:]
        ):
            self.resized[name] = shape[0], model_shape[0]
        elif self._entries[base].shape != shape:
            expected = list(self._entries[base].shape)
            self.problems.append(f"{name}: {list(shape)}, that of the model is {expected}")
        elif stored in self.computed:
            self.problems.append(f"{name}: changed twice")
        else:
            self.computed[stored] = rows


@dataclass(frozen=True, slots=True)
class _ReplacementReader:
    """Reader of a tensor that replaces one of the model."""

    entry: TensorEntry

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """Return rows ``first:last`` in float32."""
        del checkpoint
        return read_rows(self.entry, first, last).float()


@dataclass(frozen=True, slots=True)
class _UntiedHeadReader:
    """Reader of a head that was tied and is now stored separately."""

    base: str

    def __call__(self, checkpoint: Checkpoint, first: int, last: int) -> Tensor:
        """Return rows ``first:last`` as they are stored."""
        return checkpoint.read_rows(self.base, first, last)


def _merge_description(adapter: Adapter, unties_head: bool) -> str:
    """Describe what was merged, for messages and the manifest."""
    ranks = sorted({change.a.shape[0] for change in adapter.low_rank_updates.values()})
    change_texts = (
        [f"{len(adapter.low_rank_updates)} modules of rank {', '.join(map(str, ranks))}"]
        if ranks
        else []
    )
    if adapter.replaced_tensors:
        change_texts.append(f"{len(adapter.replaced_tensors)} tensors replaced")
    if any(change.magnitude is not None for change in adapter.low_rank_updates.values()):
        change_texts.append("DoRA")
    if unties_head:
        change_texts.append("the head stored on its own")
    digest = adapter.digests[-1].partition(" ")[0]
    return f"{adapter.path.resolve().name}: {', '.join(change_texts)}; SHA-256 {digest}"


class _StoredNames:
    """Names in the checkpoint files for tensors of the running model."""

    def __init__(self, checkpoint: Checkpoint, model_layout: ModelLayout) -> None:
        self._entries = checkpoint.entries
        self._model_layout = model_layout
        family = model_layout.architecture
        self.head = f"{family.head}.weight" if family else "lm_head.weight"
        embedding = f"{family.embedding}.weight" if family else ""
        embedding_tensor = model_layout.by_name.get(embedding)
        self.embedding = embedding_tensor.header.name if embedding_tensor else ""

    def stored(self, name: str) -> str:
        """Return the stored name of a tensor."""
        tensor = self._model_layout.by_name.get(name)
        return tensor.header.name if tensor else name

    def base(self, name: str) -> str:
        """Return the stored name of the tensor to change; "" if the model has none."""
        stored = self.stored(name)
        if stored in self._entries:
            return stored
        return self.embedding if self._model_layout.tied and name == self.head else ""

    def is_transposed(self, name: str, default: bool) -> bool:
        """Return whether a linear is stored ``[in, out]``; ``default`` by the adapter if the family is not declared."""
        tensor = self._model_layout.by_name.get(name)
        return tensor.transposed if tensor and self._model_layout.architecture else default

    def find_linears(self, ends: Collection[str]) -> list[str]:
        """Return the stored weights of linears whose names end with one of ``ends``, experts excepted."""
        endings = frozenset(ends)
        return [
            tensor.header.name
            for tensor in self._model_layout.tensors
            if tensor.role is Role.LINEAR and "experts." not in tensor.name
            if not endings.isdisjoint(_name_suffixes(tensor.name.removesuffix(".weight")))
        ]

    def needs_separate_head(self, touched: set[str]) -> bool:
        """Return whether a tied head must be stored separately, because the adapter changes it or the embedding."""
        outer = {self.head, self.embedding}
        return (
            self._model_layout.tied
            and bool(self.embedding)
            and bool({self.stored(name) for name in touched} & outer)
        )


def _name_suffixes(module: str) -> Iterator[str]:
    """Yield a module name and each of its suffixes after a dot."""
    while module:
        yield module
        module = module.partition(".")[2]
