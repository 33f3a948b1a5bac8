"""One loader for every format: a model that computes, with its quantized weights still packed.

The layouts that a format finds in the headers are replaced by the weights they stand for, so that
a quantized checkpoint has the same tensors as its source and is matched by the same declarations:
each tensor exactly once, or refused. The skeleton is then filled tensor by tensor; a linear with
codes becomes a `PackedLinear`, everything else is read as it is. Nothing is ever initialised at
random: a parameter that no tensor fills is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantforge.architectures.expert_sets import has_single_experts
from quantforge.architectures.match import Matched, match
from quantforge.architectures.matched import Role
from quantforge.events import Event
from quantforge.formats import detect, kv_scales
from quantforge.formats.matching import match_headers, settle_tied
from quantforge.formats.opening import open_model
from quantforge.formats.sources.encoded import PRECISION
from quantforge.formats.sources.low_precision import readable
from quantforge.model.model_class import known_type
from quantforge.model.names import Names
from quantforge.model.skeleton import build
from quantforge.runtime.fill_skeleton import SkeletonFiller, decoded
from quantforge.runtime.kv_cache import RoundedCache, listen, read_scales
from quantforge.runtime.linear import round_inputs
from quantforge.runtime.model_sizes import (
    bytes_per_token,
    held_bytes,
    kernel_shares,
    most_held,
    scheme_shares,
    stored_sizes,
)
from quantforge.runtime.room import check_weights, free_bytes
from quantforge.runtime.stored_entries import LayerScales
from quantforge.runtime.tensor_shares import cuts_of
from quantforge.runtime.weight_cuts import Share

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge.checkpoint.reader import Checkpoint
    from quantforge.formats import ModuleLayout
    from quantforge.plans import StoredTensor


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory, and what is known of it.

    Attributes:
        model: a causal language model of transformers, in evaluation mode.
        path: its directory or GGUF file (which also holds the tokenizer).
        format: key of the format.
        scheme: the schemes with their shares of the quantized weights, or the stored type.
        bits_per_weight: stored bits per quantized weight, their scales and zeros included; of all
            weights when none is quantized.
        bits_per_weight_total: stored bits per weight of the whole model.
        weight_bytes: stored bytes of the whole model, without what is stored twice.
        held_bytes: bytes that weights take in memory.
        read_bytes: those of them that one token reads: of a mixture the weights of the experts that it is sent to.
        kernels: share of the weights of linear layers that each kernel multiplies.
        config: ``config.json``.
        dtype: of activations.
        kv_cache: how keys and values are stored, one of `kv_scales.KINDS`: the model computes with them rounded so.
        kv_scales: by layer, the scales of keys and values.
        events: layers that are not multiplied by the kernel meant for them; a type that transformers does not know.
        names: the bridge between its files and the parameters of ``model``.
    """

    model: PreTrainedModel
    path: Path
    format: str
    scheme: str
    bits_per_weight: float
    bits_per_weight_total: float
    weight_bytes: int
    held_bytes: int
    read_bytes: int
    kernels: Mapping[str, float]
    config: Mapping[str, Any]
    dtype: torch.dtype
    kv_cache: str = kv_scales.NONE
    kv_scales: LayerScales | None = None
    events: tuple[Event, ...] = ()
    names: Names | None = None


@torch.no_grad()
def load(
    path: Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    source: Checkpoint | None = None,
    *,
    input_bits: int = 16,
    share: Share | None = None,
) -> Loaded:
    """Load a model of any format that is read.

    Args:
        path: a directory or a GGUF file.
        device: where it computes.
        dtype: of activations, and of the weights that are not quantized.
        source: the model as it was opened already, e.g. with an adapter merged; opened here when left out.
        input_bits: of the integers to which products of packed weights round activations of 16 bits, where they do.
        share: of this process, where several hold one model: only `Decoder` computes it then, in all of them at once.

    Raises:
        InputError: missing, left-over, mis-shaped or not finite tensors; no format reads it; or it cannot be built.
        RefusedError: a model that is written and not run here, or that processes do not share.
        ResourceError: a GPU has no room for it.
    """
    checkpoint = source or readable(open_model(path))
    form = detect(checkpoint.config)
    stored = {name: entry.stored() for name, entry in checkpoint.entries.items()}
    layouts = {item.module: item for item in form.layouts(checkpoint.config, stored)}
    matched = settle_tied(match_headers(checkpoint, layouts, stored), checkpoint)
    bits, total, size = _sizes(checkpoint, matched, layouts, stored)
    model = build(checkpoint.config)
    names = _names_of(model, matched, checkpoint.config)
    plain = decoded(model, names, layouts, matched.architecture)
    where = torch.device(device)
    cuts = cuts_of(model, matched, layouts, share)
    check_weights(*most_held(matched, layouts, stored, dtype, plain, cuts), free_bytes(where))
    filler = SkeletonFiller(checkpoint, form, layouts, where, dtype, cuts)
    filler.fill(model, names, plain)
    filler.events += round_inputs(model, input_bits)
    cache = kv_scales.found(checkpoint.config, stored)
    return Loaded(
        model=model,
        path=path,
        format=form.KEY,
        scheme=checkpoint.facts.get(PRECISION) or scheme_shares(layouts, checkpoint.dtype),
        bits_per_weight=bits,
        bits_per_weight_total=total,
        weight_bytes=size,
        held_bytes=held_bytes(model),
        read_bytes=bytes_per_token(model),
        kernels=kernel_shares(model),
        config=checkpoint.config,
        dtype=dtype,
        kv_cache=cache.kind,
        kv_scales=_round_cache(model, matched, read_scales(checkpoint, cache, where, share)),
        events=(*filter(None, [known_type(checkpoint.config)[1]]), *filler.events),
        names=names,
    )


def _names_of(model: PreTrainedModel, matched: Matched, config: Mapping[str, Any]) -> Names:
    """Return the bridge of a checkpoint: by its declarations, or by transformers' rules where it has none.

    Those rules know no single experts of a family that publishes stacks: for such files declarations are derived.

    Raises:
        InputError: tensors have no place in the model.
        RefusedError: no declarations can be derived; the message says why.
    """
    stored = [tensor.stored for tensor in matched.tensors]
    if matched.architecture is None or matched.architecture.converted:
        names = Names(model, stored)
        if not has_single_experts(names.left_over):
            return names
        from quantforge.model.derive_checkpoint import derive_for

        matched = match(config, stored, derive_for(config, stored))
    own = [tensor.stored for tensor in matched.tensors if tensor.role is not Role.FOREIGN]
    return Names(model, own, matched)


def _sizes(
    checkpoint: Checkpoint,
    matched: Matched,
    layouts: Mapping[str, ModuleLayout],
    stored: Mapping[str, StoredTensor],
) -> tuple[float, float, int]:
    """Return `stored_sizes`, by the files where these hold less than what is read of them."""
    bits, total, size = stored_sizes(matched, layouts, stored)
    if PRECISION in checkpoint.facts:
        size = sum(entry.nbytes for entry in checkpoint.opened.entries.values())
        bits = total = total * size / sum(item.nbytes for item in stored.values())
    return bits, total, size


def _round_cache(
    model: PreTrainedModel, matched: Matched, scales: LayerScales
) -> LayerScales | None:
    """Let attention layers compute with keys and values rounded by the scales of each; return these, if any."""
    for block, pair in scales.items():
        attention = f"{matched.block_name(block)}.{kv_scales.ATTENTION}"
        listen(model.get_submodule(attention), RoundedCache(*pair))
    return scales or None
