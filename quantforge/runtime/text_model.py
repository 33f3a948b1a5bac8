"""Text generation with a loaded model: takes a prompt or a conversation, streams the completion in pieces.

A piece of text is emitted as soon as no later token can change it. A completion ends at an end token, at a stop string
or at its token limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quantforge.errors import InputError, UsageError
from quantforge.events import Event
from quantforge.numerics.shared_processors import ProcessorShare
from quantforge.runtime.beam_search import beam_search
from quantforge.runtime.decoding import DecodingEngine, create_engine, generate_choices
from quantforge.runtime.generated_text import (
    Generated,
    GeneratedText,
    LikelyToken,
    ScoredToken,
    StopReason,
)
from quantforge.runtime.generation_options import CompletionOptions
from quantforge.runtime.load import Loaded
from quantforge.runtime.sampling import ChosenToken, RowSampler
from quantforge.runtime.speculation.decode import SpeculativeCompletion, SpeculativeDecoder
from quantforge.runtime.speculation.verify_drafts import SpeculationCounts
from quantforge.runtime.text_processing import TextProcessor, as_input_errors, load_text_processor
from quantforge.runtime.text_stream import TextStream
from quantforge_calibration.chat import ChatTemplate
from quantforge_calibration.conversations import Conversation
from quantforge_calibration.tokenizer import TextTokenizer

Messages = Sequence[Mapping[str, str]]  # each with "role" and "content"
RAW_HINT = "--raw (raw=True) completes the prompt as text, without the template"


@dataclass(frozen=True, slots=True)
class TextModel:
    """A loaded model with its tokenizer and chat template, ready to complete any number of prompts.

    Attributes:
        name: name of the model, shown in results.
        decoder: which implementation runs the model: ``own`` (QuantForge's decoder) or ``transformers``.
        engine: the engine that computes logits.
        processor: tokenizer, chat template and end tokens.
        speculative: the model with its drafter, for speculative decoding; None for plain decoding.
        cache: kind of the KV cache, see `quantforge.cache_kinds`; empty for the default of the model.
        events: events recorded while the model was loaded.
    """

    name: str
    decoder: str
    engine: DecodingEngine
    processor: TextProcessor
    speculative: SpeculativeDecoder | None = None
    cache: str = ""
    events: tuple[Event, ...] = ()

    @classmethod
    def from_loaded(
        cls,
        loaded: Loaded,
        name: str,
        speculative: SpeculativeDecoder | None = None,
        cache: str = "",
    ) -> TextModel:
        """Wrap a loaded model for text generation.

        Raises:
            InputError: the model has no readable tokenizer.
            RefusedError: a cache kind was requested for a model that runs through transformers.
        """
        processor = load_text_processor(loaded.path, loaded.config)
        engine, token_bytes = create_engine(loaded.model, cache, loaded.kv_scales)
        decoder = "transformers" if token_bytes is None else "own"
        return cls(name, decoder, engine, processor, speculative, cache, loaded.events)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for the user about the model's chat template."""
        return () if self.processor.template is None else self.processor.template.notes

    @property
    def has_chat_template(self) -> bool:
        """Return whether the model has a chat template."""
        return self.processor.template is not None

    def complete(
        self, prompt: str | Messages, options: CompletionOptions, *, raw: bool = False
    ) -> StreamingCompletion:
        """Create a streaming completion of a prompt; computation starts when it is iterated over.

        Args:
            prompt: a text (rendered as a user message if the model has a chat template), or a conversation.
            options: sampling, length and stop options.
            raw: complete the text as it is, without the chat template.

        Raises:
            UsageError: the prompt is neither a text nor a conversation.
            InputError: the prompt cannot be encoded or rendered, or leaves no room for a new token; or a conversation
                was given to a model without a chat template.
        """
        check_prompt(prompt)
        if self.speculative is not None and (options.n > 1 or options.beams is not None):
            raise UsageError(
                "several answers, and a draft", "drafts are for one answer: leave one out"
            )
        template = None if raw else self.processor.template
        if template is None and not isinstance(prompt, str):
            raise InputError(
                f"{self.name}: a conversation needs a chat template, and "
                + ("raw leaves it out" if raw else "there is none"),
                "give the prompt as one text",
            )
        ids = self._encode_prompt(prompt, template)
        max_new_tokens = self.processor.positions - len(ids)
        if max_new_tokens < 1:
            raise InputError(
                f"the prompt has {len(ids)} tokens, {self.name} sees {self.processor.positions}",
                "shorten it; in a chat /reset forgets what was said",
            )
        options = replace(options, max_tokens=min(max_new_tokens, options.max_tokens))
        return StreamingCompletion(self, ids, options, templated=template is not None)

    def _encode_prompt(self, prompt: str | Messages, template: ChatTemplate | None) -> list[int]:
        tokenizer = self.processor.tokenizer
        if template is None:
            with as_input_errors():
                ids = tokenizer.encode(str(prompt), "the prompt")
            bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            ids = bos + ids or ([] if tokenizer.eos_id is None else [tokenizer.eos_id])
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            with as_input_errors(RAW_HINT):
                text = template.render(Conversation(messages), add_generation_prompt=True)
            with as_input_errors():
                ids = tokenizer.encode_with_special_tokens(
                    text, "the prompt in the model's chat template"
                )
        if not ids:
            raise InputError("the prompt has no token", "say something")
        return ids


def check_prompt(prompt: object) -> None:
    """Check that a prompt is a text or a list of chat messages whose fields are texts.

    Raises:
        UsageError: it is not; the hint shows the expected type.
    """
    expected = 'a text, or [{"role": "user", "content": "..."}, ...]'
    if isinstance(prompt, str):
        texts: list[object] = [prompt]
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and prompt:
        if not all(
            isinstance(message, Mapping) and {"role", "content"} <= message.keys()
            for message in prompt
        ):
            raise UsageError(f"the prompt {prompt!a:.60} is no conversation", expected)
        texts = [message[key] for message in prompt for key in ("role", "content")]
    else:
        raise UsageError(f"the prompt is {type(prompt).__name__}: {prompt!a:.60}", expected)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"the prompt holds {text!a:.60}, which is no text", expected)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the prompt {text!a:.60} is no Unicode text", expected) from error


class StreamingCompletion:
    """A lazily computed completion of one prompt; iterating over it (once) yields the text of choice 0 in pieces.

    If several choices are requested (``n`` > 1), the others are computed in the same batch. A beam search yields its
    whole text at the end.
    """

    def __init__(
        self, model: TextModel, ids: Sequence[int], options: CompletionOptions, *, templated: bool
    ) -> None:
        self._model, self._ids, self._options = model, list(ids), options
        self._templated = templated
        self._start_time = self._first_token_time = self._last_token_time = time.perf_counter()
        self._computed_tokens = 0
        self._processor_share: float | None = None
        self._speculation_counts: SpeculationCounts | None = None
        self._texts = [_ChoiceText(model.processor, self._ids, options) for _ in range(options.n)]

    def __iter__(self) -> Iterator[str]:
        self._start_time = time.perf_counter()
        processor_share = ProcessorShare()
        try:
            with as_input_errors():
                yield from (
                    self._stream_sampled()
                    if self._options.beams is None
                    else self._stream_beam_search()
                )
        finally:
            self._processor_share = processor_share.current_share()

    def _stream_sampled(self) -> Iterator[str]:
        finished = set[int]()
        for step in self._sample_steps(finished):
            self._record_step(len(step))
            for index, chosen_token in step.items():
                text = self._texts[index]
                piece = text.add_token(chosen_token)
                if text.stop_reason != "interrupted":
                    finished.add(index)
                if piece and index == 0:
                    yield piece
        remainders = [
            text.finish("length") for text in self._texts if text.stop_reason == "interrupted"
        ]
        if 0 not in finished and remainders[0]:
            yield remainders[0]

    def _sample_steps(self, finished: set[int]) -> Iterator[Mapping[int, ChosenToken]]:
        """Yield, for every decoding step, the new token of each unfinished choice by its index."""
        options, speculative = self._options, self._model.speculative
        if speculative is None:
            samplers = [
                RowSampler(options.sampling.for_choice(n), self._ids) for n in range(options.n)
            ]
            yield from generate_choices(
                self._model.engine, self._ids, options.max_tokens, samplers, finished
            )
            return
        text = SpeculativeCompletion(
            speculative, self._ids, options.max_tokens, options.sampling, self._model.cache
        )
        self._speculation_counts = text.counts
        for token in text:
            yield {0: token}
            if finished:
                return

    def _stream_beam_search(self) -> Iterator[str]:
        options, stop = self._options, self._model.processor.stop
        assert options.beams is not None
        beams = beam_search(
            self._model.engine,
            self._ids,
            options.max_tokens,
            options.beams,
            stop,
            self._record_step,
        )
        for text, beam in zip(self._texts, beams, strict=False):
            for token in beam.tokens:
                text.add_token(ChosenToken(token))
            if not beam.ended:
                text.finish("length")
            text.score = beam.score
        yield "".join(self._texts[0].pieces)

    def _record_step(self, tokens: int) -> None:
        """Record the time and the number of tokens of a finished decoding step."""
        self._last_token_time = time.perf_counter()
        if not self._computed_tokens:
            self._first_token_time = self._last_token_time
        self._computed_tokens += tokens

    def generated(self) -> Generated:
        """Return the texts and statistics of what has been generated so far."""
        has_started = self._computed_tokens > 0
        width = self._options.n if self._options.beams is None else self._options.beams.beams
        return Generated(
            model=self._model.name,
            choices=tuple(text.to_result() for text in self._texts),
            templated=self._templated,
            decoder=self._model.decoder,
            prompt_tokens=len(self._ids),
            prompt_seconds=self._first_token_time - self._start_time if has_started else 0.0,
            steps=max(0, self._computed_tokens - width),
            step_seconds=self._last_token_time - self._first_token_time if has_started else 0.0,
            speculation=None
            if self._speculation_counts is None
            else self._speculation_counts.document(),
            processor_share=self._processor_share,
        )


class _ChoiceText:
    """Accumulated tokens and text of one choice of a completion."""

    def __init__(
        self, processor: TextProcessor, prompt: Sequence[int], options: CompletionOptions
    ) -> None:
        self._tokenizer, self._end_tokens = processor.tokenizer, processor.stop
        self._stream = TextStream(
            processor.tokenizer, prompt, options.stop, include_stop=options.include_stop
        )
        self._logprobs: list[ScoredToken] | None = None if options.sampling.logprobs is None else []
        self._tokens: list[int] = []
        self.pieces: list[str] = []
        self.stop_reason: StopReason = "interrupted"
        self.score: float | None = None

    def add_token(self, chosen_token: ChosenToken) -> str:
        """Append a token; return the text that is final now."""
        if chosen_token.token in self._end_tokens:
            return self.finish("end")
        self._tokens.append(chosen_token.token)
        if self._logprobs is not None:
            self._logprobs.append(to_scored_token(self._tokenizer, chosen_token))
        return self._append_piece(self._stream.add(chosen_token.token))

    def finish(self, stop_reason: StopReason) -> str:
        """End the text for a reason; return the text that was still held back."""
        self.stop_reason = stop_reason
        return self._append_piece(self._stream.flush())

    def _append_piece(self, piece: str) -> str:
        if self._stream.stopped_by is not None:
            self.stop_reason = "stop"
        if piece:
            self.pieces.append(piece)
        return piece

    def to_result(self) -> GeneratedText:
        """Return the text generated so far as a result."""
        return GeneratedText(
            text="".join(self.pieces),
            tokens=tuple(self._tokens),
            stopped=self.stop_reason,
            stop=self._stream.stopped_by,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            score=self.score,
        )


def to_scored_token(tokenizer: TextTokenizer, choice: ChosenToken) -> ScoredToken:
    """Return a chosen token and its alternatives with their texts; raises as `TextTokenizer.decode` does."""
    assert choice.logprob is not None
    chosen_token, *top = (
        LikelyToken(token, tokenizer.decode([token]), logprob)
        for token, logprob in ((choice.token, choice.logprob), *choice.top)
    )
    return ScoredToken(chosen_token, tuple(top))
