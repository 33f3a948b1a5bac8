"""The plan of a GGUF file: a name, a type and a place for every tensor, and all of the header.

The order of decision is that of `choice`, the types are those of `gguf_types`. What is F32 in every mixture (norms,
biases, routers) is so whatever rules say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantforge.architectures import architecture_of
from quantforge.architectures.configuration import SAME
from quantforge.architectures.match import Matched, MatchedTensor, Role
from quantforge.checkpoint.hub import source_name
from quantforge.checkpoint.prepared import ADAPTER, KEPT_EXPERTS
from quantforge.errors import InputError, RefusedError
from quantforge.formats import KEEP
from quantforge.formats.engines import layer_verdicts
from quantforge.formats.gguf import ABOUT, mixture
from quantforge.formats.gguf.container import TYPES
from quantforge.formats.gguf.families import Named, family_of, names, read_families
from quantforge.formats.gguf.metadata import general, merged, provenance
from quantforge.formats.gguf.mixture import file_type
from quantforge.formats.gguf.parameters import parameters
from quantforge.formats.gguf.projector_file import OPTION, has_projector
from quantforge.formats.gguf.vocabulary import (
    CarriedVocabulary,
    Vocabulary,
    carried_vocabulary,
    vocabulary,
)
from quantforge.grids import SUPERBLOCKS
from quantforge.planning.calibration_rows import coming_rows
from quantforge.planning.choice import QUANTIZABLE, Choices
from quantforge.planning.gguf_files import FileTensor, planned, split, tensor_table
from quantforge.planning.gguf_types import FileTypes, GivenTypes, MixtureTypes, stored_shape
from quantforge.plans import Action, Draft, TensorPlan
from quantforge.recipe import Recipe
from quantforge.results.source_changes import adapter_name, experts_word
from quantforge.scheme import Scheme

if TYPE_CHECKING:
    from quantforge.checkpoint.reader import Checkpoint

LANGUAGE_ONLY = (
    "the file holds the language model alone: llama.cpp reads other towers from files of their own"
)
UNREAD = "llama.cpp computes this family's files; `eval` and `verify` do not read them back"
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_OUTSIDE = {*mixture.LOOKED_UP, _OUTPUT}


def draft(
    recipe: Recipe, checkpoint: Checkpoint, matched: Matched, *, observed: bool,
    given: Mapping[str, Scheme] | None = None,
) -> Draft:  # fmt: skip
    """Plan a GGUF file, or its numbered parts.

    Args:
        recipe: its type or scheme, rules, and everything that becomes a key.
        checkpoint: the source.
        matched: its tensors.
        observed: whether the importance of columns will be known.
        given: of an export, the scheme of each module that is already quantized; everything else keeps its type.

    Raises:
        RefusedError: a family, configuration, tokenizer or scheme that GGUF does not hold.
        InputError: the vocabulary and the embedding do not fit each other, or a pattern matches nothing.
    """
    config = _with_tower(matched.config, checkpoint.config)
    family = family_of(config)
    found = parameters(config, family)
    kept, sizes = _written(matched), found.dimensions
    named = names(family, sizes.layers, [tensor.name for tensor in kept])
    shape = mixture.Shape(sizes.layers, sizes.heads, sizes.kv_heads, found.experts, observed)
    if given is None:
        wanted = recipe
        types: FileTypes = MixtureTypes(wanted, named, kept, shape)
    else:
        wanted = Recipe(embedding=recipe.embedding)
        types = GivenTypes(given, tied=matched.tied)
    choices = Choices(_tied(wanted, matched, kept), kept, types, together=False)
    targets = [_target(item, named[item.name], choices, family.squeezed) for item in kept]
    _refuse_unobserved(targets if given is None and not observed else ())
    rows = next(item.shape[0] for item in targets if item.named.name == _EMBEDDING)
    tokens = _tokens(checkpoint, rows, matched.config, recipe.pre)
    tensors = tensor_table(targets, found)
    weights, label = sum(math.prod(tensor.shape) for tensor in tensors), _label(targets, types)
    kind = file_type(types.label, {one.name: (one.type, one.shape) for one in tensors}, shape)
    linears = sum(item.tensor.role is Role.LINEAR for item in targets)
    text = recipe.calibration
    seen = (text.source, linears, coming_rows(text, checkpoint.path)) if observed else ("", 0, 0)
    keys = merged(
        general(_name(checkpoint), family.arch, kind, weights, checkpoint.card, tokens.tokens),
        found.keys,
        tokens.keys(),
        provenance(recipe.to_toml(), *seen),
    )
    return Draft(
        tensors=(*(planned(item, found) for item in targets), *_dropped(matched, kept)),
        files=split(keys, tensors, recipe.max_shard_bytes),
        engines=layer_verdicts(ABOUT.engines, ()),
        label=label,
        substitutions=(*choices.substitutions, *found.events, *tokens.events),
        notes=(
            f"{label}: {_summary(targets)}",
            *choices.notes,
            *(_of_towers(checkpoint) if len(matched.foreign) > len(matched.heads) else ()),
            *([] if family in read_families().values() else [UNREAD]),
            *tokens.notes,
        ),
        late=tuple(
            item.tensor.stored.name for item in targets
            if item.named.name == _OUTPUT and item.type.lower() in SUPERBLOCKS
        ),
    )  # fmt: skip


def _with_tower(text: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a decoder under the name of the whole, with that of its tower: keys depend on it."""
    vision = whole.get("vision_config")
    if not isinstance(vision, Mapping):
        return text
    known = text if architecture_of(text) is not None else whole
    causal = whole.get("is_causal", True) and text.get("is_causal", True)
    own = {"model_type": known.get("model_type"), "vision_config": vision, "is_causal": causal}
    return {**text, **own}


def _of_towers(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what is said of the towers of a model, which the file does not hold."""
    written = f", {OPTION} writes that of pictures" if has_projector(checkpoint.config) else ""
    return (LANGUAGE_ONLY + written,)


def _refuse_unobserved(targets: Sequence[FileTensor]) -> None:
    """Refuse types that llama-quantize does not make without an importance; outside of the blocks it asks for none."""
    needy = [
        item for item in targets
        if item.type in mixture.NEED_IMPORTANCE and item.named.name not in _OUTSIDE
    ]  # fmt: skip
    if needy:
        raise RefusedError(
            f"{needy[0].tensor.name}: {needy[0].type} needs the importance of its columns,"
            f" as do {len(needy) - 1} more tensors",
            "--calibration TEXT (or builtin), or --imatrix FILE",
            tensor=needy[0].tensor.stored.name,
        )


def _tokens(
    checkpoint: Checkpoint, rows: int, config: Mapping[str, Any], pre: str | None
) -> CarriedVocabulary | Vocabulary:
    """Return the vocabulary of a GGUF file, or of a directory's tokenizer, for an embedding of so many rows."""
    path = checkpoint.path
    if path.is_file():
        return carried_vocabulary(path, rows)
    return vocabulary(path, rows, config, pre, _name(checkpoint))


def _name(checkpoint: Checkpoint) -> str:
    """Return the model's own name, of its repository, directory, or file, with what became of all of it."""
    path = checkpoint.path
    name = path.stem if path.is_file() else source_name(path)[0].rpartition("/")[2]
    words = ((ADAPTER, adapter_name), (KEPT_EXPERTS, experts_word))
    read = [word(said) for key, word in words if (said := checkpoint.facts.get(key)) is not None]
    return "-".join((name, *read))


def _written(matched: Matched) -> list[MatchedTensor]:
    """Return the tensors that the file holds: of the language model, a tied head once."""
    kept = [tensor for tensor in matched.tensors if tensor.role is not Role.FOREIGN]
    if matched.tied_twice and matched.architecture is not None:
        head = f"{matched.architecture.head}.weight"
        kept = [tensor for tensor in kept if tensor.name != head]
    return kept


def _dropped(matched: Matched, kept: Sequence[MatchedTensor]) -> list[TensorPlan]:
    """Return what is left out, and why."""
    written = {tensor.stored.name for tensor in kept}
    reasons = [*((item, f"dropped: {reason}") for item, reason in matched.dropped)]
    reasons += [
        (tensor.stored, _left_out(tensor))
        for tensor in matched.tensors
        if tensor.stored.name not in written
    ]  # fmt: skip
    return [
        TensorPlan(item.name, item.dtype, item.shape, Action.DROP, rule) for item, rule in reasons
    ]


def _left_out(tensor: MatchedTensor) -> str:
    if tensor.further:
        return "predicts further tokens, for which these files have no place"
    return "of another tower" if tensor.role is Role.FOREIGN else SAME


def _tied(wanted: Recipe, matched: Matched, kept: Sequence[MatchedTensor]) -> Recipe:
    """Return what is wanted of the tensors of a file, in which a tied head and the embedding are one.

    Raises:
        InputError: another scheme is asked for the head than for the embedding.
    """
    if not matched.tied or any(tensor.role is Role.HEAD for tensor in kept):
        return wanted
    if wanted.head not in {KEEP, wanted.embedding}:
        raise InputError(
            f"--head {wanted.head}: the head is tied to the embedding, and a GGUF file holds both as one",
            f"--embedding {wanted.head} for both, or drop --head",
        )
    return replace(wanted, head=KEEP)


def _label(targets: Sequence[FileTensor], types: FileTypes) -> str:
    """Return the kind of a file: its mixture or type, or how many bits a weight has where rules mix others in."""
    linears = [
        item for item in targets
        if item.tensor.role is Role.LINEAR and item.type.lower() in SUPERBLOCKS
    ]  # fmt: skip
    if all(
        item.type == mixture.fitting(types.meant(item.tensor), item.shape[-1]) for item in linears
    ):
        return types.label
    weights = sum(math.prod(item.shape) for item in linears)
    nbytes = sum(
        TYPES[item.type].row_bytes(item.shape[-1]) * math.prod(item.shape[:-1]) for item in linears
    )
    return f"{mixture.MIXED}-{8 * nbytes / weights:.2f}bpw"


def _summary(targets: Iterable[FileTensor]) -> str:
    """Say how many tensors have which type."""
    counts = Counter(item.type for item in targets)
    return ", ".join(f"{kind} x{count}" for kind, count in sorted(counts.items()))


def _target(
    tensor: MatchedTensor, named: Named, choices: Choices[str], squeezed: tuple[str, ...]
) -> FileTensor:
    """Decide on the type of a tensor."""
    *outer, last = stored_shape(tensor)
    shape = (*outer, last // (1 + len(named.others)))
    if tensor.name.endswith(squeezed):
        shape = tuple(size for size in shape if size > 1)
    if tensor.stored.dtype not in QUANTIZABLE:
        raise InputError(
            f"{tensor.stored.name}: type {tensor.stored.dtype} is not written to GGUF",
            f"written are {', '.join(QUANTIZABLE)}", tensor=tensor.stored.name,
        )  # fmt: skip
    if mixture.always_float32(named.name, len(shape)):
        return FileTensor(tensor, named, shape, "F32", "F32 always")
    decision = choices.decided(tensor)
    return FileTensor(tensor, named, shape, decision.form, decision.rule)
