"""Drafters by name: n-grams, lookahead, the model in fewer bits, its MTP layer, draft heads, or another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from quantforge.architectures.draft_kinds import EAGLE3
from quantforge.errors import InputError, UsageError
from quantforge.formats.sources.head_directory import HeadDirectory
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.speculation.decode import SpeculativeDecoder
from quantforge.runtime.speculation.draft_model import SCHEMES, ModelDrafter, lower_bits
from quantforge.runtime.speculation.eagle3 import Eagle3Layer
from quantforge.runtime.speculation.features import FeatureDrafter
from quantforge.runtime.speculation.lookahead import LENGTH, LookaheadDrafter
from quantforge.runtime.speculation.medusa import MedusaDrafter, read_medusa
from quantforge.runtime.speculation.mtp import MtpLayer, read_mtp
from quantforge.runtime.speculation.ngrams import NgramDrafter
from quantforge.runtime.speculation.options import LOOKAHEAD, MTP, NGRAM, DraftOptions

if TYPE_CHECKING:
    from quantforge.runtime.load import Loaded


def speculative_decoder(
    loaded: Loaded, options: DraftOptions, load_draft: Callable[[str], Loaded | HeadDirectory]
) -> SpeculativeDecoder:
    """Return a loaded model with a drafter.

    Args:
        loaded: the model.
        options: who drafts, and how much.
        load_draft: loads another model, or opens heads, by name or path.

    Raises:
        InputError: the draft has another vocabulary or width, or nothing of the model can be rounded further.
        RefusedError: the own decoder does not compute the model or the draft.
        UsageError: a tree of more places than there are heads.
    """
    decoder, shape = Decoder(loaded.model, scales=loaded.kv_scales), options.shape
    if options.draft == NGRAM:
        return SpeculativeDecoder(decoder, lambda _: NgramDrafter(shape), len(shape))
    if options.draft == LOOKAHEAD:
        return SpeculativeDecoder(decoder, lambda _: LookaheadDrafter(), LENGTH - 1)
    if options.draft in SCHEMES:
        return _with_model(decoder, Decoder(lower_bits(loaded.model, options.draft)), options)
    if options.draft == MTP:
        return _with_network(decoder, read_mtp(loaded), shape)
    other = load_draft(options.draft)
    if not isinstance(other, HeadDirectory):
        return _with_model(decoder, Decoder(other.model, scales=other.kv_scales), options)
    embedding = loaded.model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    if other.kind == EAGLE3:
        return _with_network(decoder, Eagle3Layer(other, embedding, len(decoder.layers)), shape)
    heads = read_medusa(other, embedding)
    if options.tree and len(shape) > len(heads):
        raise UsageError(
            f"--draft-tree {options.tree}: {len(shape)} places, and {other.path} has {len(heads)} heads",
            "each place needs a head: leave the last ones out",
        )
    most = min(len(shape), len(heads))
    return SpeculativeDecoder(decoder, lambda _: MedusaDrafter(heads, shape), most)


def _with_model(decoder: Decoder, draft: Decoder, options: DraftOptions) -> SpeculativeDecoder:
    if decoder.vocabulary != draft.vocabulary:
        raise InputError(
            f"{options.draft} knows {draft.vocabulary} tokens, the model {decoder.vocabulary}",
            "a draft has the tokenizer of its model: take a smaller one of the same family, or int2",
        )
    if draft.device != decoder.device:
        raise InputError(f"the draft is on {draft.device}, the model on {decoder.device}", "")
    shape = options.shape
    return SpeculativeDecoder(decoder, lambda room: ModelDrafter(draft, room, shape), len(shape))


def _with_network(
    decoder: Decoder, network: Eagle3Layer | MtpLayer, shape: tuple[int, ...]
) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        decoder, lambda room: FeatureDrafter(network, room, shape), len(shape)
    )
