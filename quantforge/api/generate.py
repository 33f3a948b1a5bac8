"""Generate: a model of any format that is read continues a text or answers a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.cache_kinds import parse_cache_kind
from quantforge.errors import UsageError
from quantforge.files.hub import resolve
from quantforge.formats import detect_format
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.head_directory import DraftHeadDirectory, open_draft_heads
from quantforge.formats.sources.low_precision import decode_if_unsupported
from quantforge.runtime.generated_text import Generated
from quantforge.runtime.generation_options import MAX_TOKENS, completion_options
from quantforge.runtime.speculation.options import (
    DRAFT_METHODS,
    DRAFT_TOKENS,
    MTP,
    NO_DRAFT,
    SINGLE_TEXT,
    SINGLE_TEXT_ERROR,
    DraftOptions,
    validate_draft,
)
from quantforge.settings import Settings, check_device
from quantforge_kernels.cpu import program_cache

if TYPE_CHECKING:
    from quantforge.runtime.load import Loaded
    from quantforge.runtime.speculation.decode import SpeculativeDecoder
    from quantforge.runtime.tensor_parallel import TensorParallelRank
    from quantforge.runtime.text_model import TextModel

COMPILING = "compiling programs for this processor: some seconds, the first time that they are used"


class AnswerOptions(TypedDict, total=False):
    """Rules for answers; without any, the most likely token is taken, up to one that ends the answer."""

    temperature: float  # 0 takes the most likely token
    top_k: int  # of so many most likely ones; 0 is all
    top_p: float  # of the fewest whose probability reaches this; 1 is all
    min_p: float  # of those at least so likely as this share of the most likely one; 0 is all
    repetition_penalty: float  # for what occurred in the prompt or since; 1 is none
    frequency_penalty: float  # for each time that a token was generated; 0 is none
    presence_penalty: float  # once for a token that was generated; 0 is none
    logit_bias: Mapping[int, float]  # added to logits, by token id
    seed: int
    logprobs: int  # tell the log-probability of each token, and of so many most likely ones
    stop: str | Sequence[str]  # texts that end an answer
    include_stop: bool  # the text that ended an answer is part of it
    n: int  # so many answers
    beams: int  # a beam search with so many; 1 is none
    length_penalty: float  # above 0 favours long answers of a beam search
    early_stopping: bool | Literal["never"]  # when a beam search is over


@check_arguments(AnswerOptions)
@torch_defaults()
def generate(
    model: str | Path | Loaded,
    prompt: str | Sequence[Mapping[str, str]],
    settings: Settings | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
    raw: bool = False,
    stream: Callable[[str], object] | None = None,
    draft: str = "",
    draft_tokens: int = DRAFT_TOKENS,
    draft_tree: str = "",
    cache: str = "",
    **options: Unpack[AnswerOptions],
) -> Generated:
    """Let a model continue a text, or answer where it has a chat template.

    Args:
        model: a directory, a GGUF file, ``org/name[@revision]``, or what `load` has returned.
        prompt: a text, or a conversation: ``[{"role": "user", "content": "..."}]``.
        settings: device, threads, offline, and which events are accepted.
        max_tokens: at most so many, and no more than the model has positions for.
        raw: complete the text as it is, without the chat template.
        stream: is called with each piece of the first text as it comes; no piece ends in half a character.
        draft: who drafts tokens that the model then checks together: ``ngram`` (copies of the text itself),
            ``lookahead`` (the model, many places at once), ``int2``, ``int3`` or ``int4`` (the model in fewer bits),
            ``mtp`` (its own layer for further tokens), a smaller model, or a directory of heads of Medusa or EAGLE-3;
            the text stays the same.
        draft_tokens: drafted tokens in a row, at most.
        draft_tree: drafted tokens after each token, place by place (``3x2x1``), checked in one pass.
        cache: how keys and values are stored, see `quantforge.cache_kinds`; the model's when left out.
        options: see `AnswerOptions`.

    Raises:
        UsageError: a value that means nothing here.
        InputError: the model or its tokenizer cannot be used, or the prompt is longer than what the model sees.
        RefusedError: ``settings.policy`` does not accept what loading tells of, or a cache is named for a model that
            the own decoder does not compute.
    """
    limits = completion_options(max_tokens, {**options})
    drafts = DraftOptions(draft, draft_tokens, draft_tree)
    from quantforge.runtime.text_model import check_prompt

    check_prompt(prompt)
    text_model = open_text_model(model, settings or Settings(), drafts, cache)
    answer = text_model.complete(prompt, limits, raw=raw)
    for piece in answer:
        if stream is not None:
            stream(piece)
    return answer.generated()


def open_text_model(
    model: str | Path | Loaded,
    settings: Settings,
    drafts: DraftOptions = NO_DRAFT,
    cache: str = "",
) -> TextModel:
    """Load a model to talk to; errors as `generate`."""
    if cache:
        parse_cache_kind(cache)
    if settings.split and drafts.draft:
        raise UsageError(f"--draft {drafts.draft}: processes share one model", "leave it out")
    check_drafts(model, drafts, settings)
    loaded, name = loaded_to_answer(model, settings)
    from quantforge.runtime.text_model import TextModel

    return TextModel.from_loaded(loaded, name, speculative_of(loaded, drafts, settings), cache)


def check_drafts(
    model: str | Path | Loaded, drafts: DraftOptions, settings: Settings, *, steps: bool = False
) -> None:
    """Refuse before a model is loaded what headers refuse of its draft; errors as `generate`.

    Args:
        model: for which it drafts.
        drafts: who drafts.
        settings: whether the hub may be asked.
        steps: for many texts at a time.
    """
    draft, heads = validate_draft(drafts.draft or None), None
    if draft and draft not in DRAFT_METHODS:
        heads = open_draft_heads(resolve(draft, settings.offline))
        if heads is None:
            opened_to_answer(draft, settings)
    if steps and (heads or draft in SINGLE_TEXT):
        raise UsageError(*SINGLE_TEXT_ERROR)
    if draft == MTP and isinstance(model, str | Path):
        from quantforge.runtime.speculation.mtp import mtp_block_as_model

        path = resolve(str(model), settings.offline)
        mtp_block_as_model(decode_if_unsupported(open_model(path)), str(path))


def speculative_of(
    loaded: Loaded, drafts: DraftOptions, settings: Settings
) -> SpeculativeDecoder | None:
    """Return a loaded model with its drafter, if there is to be one; errors as `speculative_decoder` and `generate`."""
    if not drafts.draft:
        return None
    from quantforge.runtime.speculation.decode import speculative_decoder

    def other(named: str) -> Loaded | DraftHeadDirectory:
        heads = open_draft_heads(resolve(named, settings.offline))
        return heads or loaded_to_answer(named, settings)[0]

    return speculative_decoder(loaded, drafts, other)


def opened_to_answer(model: str | Path, settings: Settings) -> tuple[Path, Mapping[str, Any]]:
    """Return where a model lies, and its configuration; what cannot be read shows before torch is there.

    Raises:
        InputError: as `generate`.
    """
    path = resolve(str(model), settings.offline)
    opened = decode_if_unsupported(open_model(path))
    detect_format(opened.config)
    return path, opened.config


def has_template(model: str | Path, settings: Settings) -> bool:
    """Return whether a model has a chat template, before it is loaded; errors as `opened_to_answer`."""
    from quantforge.runtime.text_processing import load_text_processor

    return load_text_processor(*opened_to_answer(model, settings)).template is not None


def loaded_to_answer(model: str | Path | Loaded, settings: Settings) -> tuple[Loaded, str]:
    """Load a model with 16-bit activations as engines have them, and return it with its name; errors as `generate`."""
    if isinstance(model, str | Path):
        path, _ = opened_to_answer(model, settings)
        if said := open_model(path).declaration_note:
            settings.note(f"{path}: quantization: {said}")
        check_device(settings.device)
    import torch

    from quantforge.runtime.load import Loaded, load

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    program_cache.BEFORE_COMPILE_CALLBACKS[:] = [lambda: settings.note(COMPILING)]
    if isinstance(model, str | Path):
        share, bits = _share(settings), settings.input_bits
        loaded = load(path, settings.device, torch.bfloat16, input_bits=bits, share=share)
        name = str(model)
    elif isinstance(model, Loaded):
        loaded, name = model, str(model.path)
    else:
        raise UsageError(f"{model!a:.60} is no model", "a path, org/name, or what load() returns")
    settings.policy.check(loaded.events)
    return loaded, name


def _share(settings: Settings) -> TensorParallelRank | None:
    """Return which part of a model this process holds; None: all of it."""
    if not settings.split:
        return None
    from quantforge.runtime.tensor_parallel import init_tensor_parallel

    return init_tensor_parallel(settings.device)
