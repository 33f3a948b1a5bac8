"""``generate``: let a model of any supported format continue a text or answer a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from quantforge.api.torch_defaults import torch_defaults
from quantforge.arguments import check_arguments
from quantforge.cache_kinds import parse_cache_kind
from quantforge.errors import UsageError
from quantforge.files.hub import resolve_model
from quantforge.formats import detect_format
from quantforge.formats.open_model import open_model
from quantforge.formats.sources.head_directory import DraftHeadDirectory, open_draft_heads
from quantforge.formats.sources.low_precision import decode_if_unsupported
from quantforge.runtime.generated_text import Generated
from quantforge.runtime.generation_options import MAX_TOKENS, completion_options
from quantforge.runtime.speculation.draft_options import (
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

COMPILING_NOTE = (
    "compiling programs for this processor: some seconds, the first time that they are used"
)


class AnswerOptions(TypedDict, total=False):
    """Sampling and stopping options; without any, decoding is greedy until an end-of-text token."""

    temperature: float  # 0 is greedy
    top_k: int  # sample from this many most likely tokens; 0 means all
    top_p: float  # nucleus sampling; 1 means all tokens
    min_p: float  # minimum probability relative to the most likely token; 0 means all tokens
    repetition_penalty: float  # for tokens of the prompt and the answer; 1 means none
    frequency_penalty: float  # for each time that a token was generated; 0 means none
    presence_penalty: float  # once for each token that was generated; 0 means none
    logit_bias: Mapping[int, float]  # added to logits, by token id
    seed: int
    logprobs: int  # return log-probabilities of each token and of this many most likely tokens
    stop: str | Sequence[str]  # texts that end an answer
    include_stop: bool  # keep the stop text in the answer
    n: int  # number of answers
    beams: int  # number of beams of a beam search; 1 means none
    length_penalty: float  # above 0 favors long answers of a beam search
    early_stopping: bool | Literal["never"]  # when a beam search ends


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
    """Let a model continue a text, or answer it if the model has a chat template.

    Args:
        model: a directory, a GGUF file, ``org/name[@revision]``, or the result of `load`.
        prompt: a text, or a conversation: ``[{"role": "user", "content": "..."}]``.
        settings: device, threads, offline, and which events are accepted.
        max_tokens: maximum number of new tokens, limited by the context length of the model.
        raw: complete the text as it is, without the chat template.
        stream: called with each piece of the first answer as it is generated; pieces are whole characters.
        draft: drafter of speculative decoding: ``ngram`` (prompt lookup), ``lookahead`` (lookahead decoding),
            ``int2``, ``int3`` or ``int4`` (the model itself in fewer bits), ``mtp`` (its multi-token prediction layer),
            a smaller model, or a directory of Medusa or EAGLE-3 heads. The text stays the same.
        draft_tokens: maximum number of drafted tokens in a row.
        draft_tree: branching factors of a tree of drafted tokens (``3x2x1``), verified in one pass.
        cache: number format of the KV cache, see `quantforge.cache_kinds`; the model's dtype when left out.
        options: see `AnswerOptions`.

    Raises:
        UsageError: an invalid value.
        InputError: the model or its tokenizer cannot be used, or the prompt exceeds the context length.
        RefusedError: ``settings.policy`` does not accept the events of loading, or ``cache`` is given for a model that
            QuantForge's decoder does not support.
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
    """Load a model for generation, with its tokenizer and drafter; errors as `generate`."""
    if cache:
        parse_cache_kind(cache)
    if settings.split and drafts.draft:
        raise UsageError(f"--draft {drafts.draft}: processes share one model", "leave it out")
    check_draft_options(model, drafts, settings)
    loaded, name = load_for_generation(model, settings)
    from quantforge.runtime.text_model import TextModel

    return TextModel.from_loaded(
        loaded, name, load_speculative_decoder(loaded, drafts, settings), cache
    )


def check_draft_options(
    model: str | Path | Loaded, drafts: DraftOptions, settings: Settings, *, batched: bool = False
) -> None:
    """Check the options of speculative decoding before a model is loaded; errors as `generate`.

    Args:
        model: the model that verifies the drafted tokens.
        drafts: the options.
        settings: whether the hub may be accessed.
        batched: whether several sequences are decoded at a time.
    """
    method, heads = validate_draft(drafts.draft or None), None
    if method and method not in DRAFT_METHODS:
        heads = open_draft_heads(resolve_model(method, settings.offline))
        if heads is None:
            open_for_generation(method, settings)
    if batched and (heads or method in SINGLE_TEXT):
        raise UsageError(*SINGLE_TEXT_ERROR)
    if method == MTP and isinstance(model, str | Path):
        from quantforge.runtime.speculation.mtp import mtp_block_as_model

        path = resolve_model(str(model), settings.offline)
        mtp_block_as_model(decode_if_unsupported(open_model(path)), str(path))


def load_speculative_decoder(
    loaded: Loaded, drafts: DraftOptions, settings: Settings
) -> SpeculativeDecoder | None:
    """Return a speculative decoder of a loaded model, None without a draft; errors as `generate`."""
    if not drafts.draft:
        return None
    from quantforge.runtime.speculation.decode import speculative_decoder

    def other(path: str) -> Loaded | DraftHeadDirectory:
        heads = open_draft_heads(resolve_model(path, settings.offline))
        return heads or load_for_generation(path, settings)[0]

    return speculative_decoder(loaded, drafts, other)


def open_for_generation(model: str | Path, settings: Settings) -> tuple[Path, Mapping[str, Any]]:
    """Return the path and configuration of a model, checked before torch is imported.

    Raises:
        InputError: as `generate`.
    """
    path = resolve_model(str(model), settings.offline)
    checkpoint = decode_if_unsupported(open_model(path))
    detect_format(checkpoint.config)
    return path, checkpoint.config


def has_template(model: str | Path, settings: Settings) -> bool:
    """Return whether a model has a chat template, without loading it; errors as `open_for_generation`."""
    from quantforge.runtime.text_processing import load_text_processor

    return load_text_processor(*open_for_generation(model, settings)).template is not None


def load_for_generation(model: str | Path | Loaded, settings: Settings) -> tuple[Loaded, str]:
    """Load a model with bfloat16 activations; return it with its name. Errors as `generate`."""
    if isinstance(model, str | Path):
        path, _ = open_for_generation(model, settings)
        if declaration_note := open_model(path).declaration_note:
            settings.note(f"{path}: quantization: {declaration_note}")
        check_device(settings.device)
    import torch

    from quantforge.runtime.load import Loaded, load

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    program_cache.BEFORE_COMPILE_CALLBACKS[:] = [lambda: settings.note(COMPILING_NOTE)]
    if isinstance(model, str | Path):
        rank, bits = _tensor_parallel_rank(settings), settings.input_bits
        loaded = load(path, settings.device, torch.bfloat16, input_bits=bits, share=rank)
        name = str(model)
    elif isinstance(model, Loaded):
        loaded, name = model, str(model.path)
    else:
        raise UsageError(f"{model!a:.60} is no model", "a path, org/name, or what load() returns")
    settings.policy.check(loaded.events)
    return loaded, name


def _tensor_parallel_rank(settings: Settings) -> TensorParallelRank | None:
    """Return the rank of this process in tensor parallelism; None if the model is not split."""
    if not settings.split:
        return None
    from quantforge.runtime.tensor_parallel import init_tensor_parallel

    return init_tensor_parallel(settings.device)
