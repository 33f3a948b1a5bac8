"""A model that answers in text: a prompt or a conversation in, pieces of text out as they come.

Tokens become text as soon as it is sure, and an answer ends where its rules say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quantforge.errors import InputError, UsageError
from quantforge.events import Event
from quantforge.numerics.shared_processors import ProcessorShare
from quantforge.runtime.beam_search import beam_search
from quantforge.runtime.decoding import DecodingEngine, engine_of, generate_rows
from quantforge.runtime.generated_text import (
    Generated,
    GeneratedText,
    LikelyToken,
    ScoredToken,
    Stopped,
)
from quantforge.runtime.generation_options import AnswerLimits
from quantforge.runtime.load import Loaded
from quantforge.runtime.sampling import Chosen, RowSampler
from quantforge.runtime.speculation.decode import SpeculativeDecoder, SpeculativeText
from quantforge.runtime.speculation.verify import SpeculationCounts
from quantforge.runtime.text_processing import TextSide, as_input_errors, text_side
from quantforge.runtime.text_stream import TextStream
from quantforge_calibration.chat import ChatTemplate
from quantforge_calibration.conversations import Conversation
from quantforge_calibration.tokenizer import TextTokenizer

Messages = Sequence[Mapping[str, str]]  # each with "role" and "content"
RAW = "--raw (raw=True) completes the prompt as text, without the template"


@dataclass(frozen=True, slots=True)
class TextModel:
    """A loaded model and its text side, ready to answer any number of prompts.

    Attributes:
        name: of the model, for results.
        decoder: what computes it: ``own`` or ``transformers``.
        engine: computes it.
        side: its tokenizer and chat template.
        speculative: the model with its drafter, for speculative decoding; None without.
        cache: kind of its cache, see `quantforge.cache_kinds`; that of the model when empty.
        events: what loading has to tell.
    """

    name: str
    decoder: str
    engine: DecodingEngine
    side: TextSide
    speculative: SpeculativeDecoder | None = None
    cache: str = ""
    events: tuple[Event, ...] = ()

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        name: str,
        speculative: SpeculativeDecoder | None = None,
        cache: str = "",
    ) -> TextModel:
        """Return a loaded model that answers.

        Raises:
            InputError: no tokenizer that can be read.
            RefusedError: a kind of cache for a model that the own decoder does not compute.
        """
        side = text_side(loaded.path, loaded.config)
        engine, token_bytes = engine_of(loaded.model, cache, loaded.kv_scales)
        decoder = "transformers" if token_bytes is None else "own"
        return cls(name, decoder, engine, side, speculative, cache, loaded.events)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a person should know of the model's chat templates."""
        return () if self.side.template is None else self.side.template.notes

    @property
    def templated(self) -> bool:
        """Return whether the model has a chat template."""
        return self.side.template is not None

    def answer(
        self, prompt: str | Messages, limits: AnswerLimits, *, raw: bool = False
    ) -> LiveAnswer:
        """Begin an answer; nothing is computed before its pieces are asked for.

        Args:
            prompt: a text (what a user says, where there is a template), or a conversation.
            limits: its rules.
            raw: complete the text as it is.

        Raises:
            UsageError: the prompt is neither a text nor a conversation.
            InputError: the prompt cannot be encoded or rendered, or leaves no room for a token; a conversation for
                a model without a template.
        """
        checked(prompt)
        if self.speculative is not None and (limits.n > 1 or limits.beams is not None):
            raise UsageError(
                "several answers, and a draft", "drafts are for one answer: leave one out"
            )
        template = None if raw else self.side.template
        if template is None and not isinstance(prompt, str):
            raise InputError(
                f"{self.name}: a conversation needs a chat template, and "
                + ("raw leaves it out" if raw else "there is none"),
                "give the prompt as one text",
            )
        ids = self._ids(prompt, template)
        room = self.side.positions - len(ids)
        if room < 1:
            raise InputError(
                f"the prompt has {len(ids)} tokens, {self.name} sees {self.side.positions}",
                "shorten it; in a chat /reset forgets what was said",
            )
        limits = replace(limits, max_tokens=min(room, limits.max_tokens))
        return LiveAnswer(self, ids, limits, templated=template is not None)

    def _ids(self, prompt: str | Messages, template: ChatTemplate | None) -> list[int]:
        tokenizer = self.side.tokenizer
        if template is None:
            with as_input_errors():
                ids = tokenizer.encode(str(prompt), "the prompt")
            first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            ids = first + ids or ([] if tokenizer.eos_id is None else [tokenizer.eos_id])
        else:
            talk = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            with as_input_errors(RAW):
                text = template.render(Conversation(talk), answer=True)
            with as_input_errors():
                ids = tokenizer.encode_all(text, "the prompt in the model's chat template")
        if not ids:
            raise InputError("the prompt has no token", "say something")
        return ids


def checked(prompt: object) -> None:
    """Refuse what is neither a text nor a conversation of texts.

    Raises:
        UsageError: with what is expected.
    """
    expected = 'a text, or [{"role": "user", "content": "..."}, ...]'
    if isinstance(prompt, str):
        texts: list[object] = [prompt]
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and prompt:
        if not all(
            isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in prompt
        ):
            raise UsageError(f"the prompt {prompt!a:.60} is no conversation", expected)
        texts = [turn[key] for turn in prompt for key in ("role", "content")]
    else:
        raise UsageError(f"the prompt is {type(prompt).__name__}: {prompt!a:.60}", expected)
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(f"the prompt holds {text!a:.60}, which is no text", expected)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the prompt {text!a:.60} is no Unicode text", expected) from error


class LiveAnswer:
    """Answers to one prompt while they come: iterated over once, it yields pieces of the first one's text.

    Nothing is computed before. Further answers are computed beside the first; a beam search yields its text at the end.
    """

    def __init__(
        self, model: TextModel, ids: Sequence[int], limits: AnswerLimits, *, templated: bool
    ) -> None:
        self._model, self._ids, self._limits = model, list(ids), limits
        self._templated = templated
        self._begun = self._first = self._last = time.perf_counter()
        self._computed = 0
        self._processor_share: float | None = None
        self._speculated: SpeculationCounts | None = None
        self._texts = [_Text(model.side, self._ids, limits) for _ in range(limits.n)]

    def __iter__(self) -> Iterator[str]:
        self._begun = time.perf_counter()
        share = ProcessorShare()
        try:
            with as_input_errors():
                yield from self._drawn() if self._limits.beams is None else self._searched()
        finally:
            self._processor_share = share.so_far()

    def _drawn(self) -> Iterator[str]:
        ended = set[int]()
        for step in self._steps(ended):
            self._count(len(step))
            for number, chosen in step.items():
                text = self._texts[number]
                piece = text.take(chosen)
                if text.stopped != "interrupted":
                    ended.add(number)
                if piece and number == 0:
                    yield piece
        rests = [text.finish("length") for text in self._texts if text.stopped == "interrupted"]
        if 0 not in ended and rests[0]:
            yield rests[0]

    def _steps(self, ended: set[int]) -> Iterator[Mapping[int, Chosen]]:
        """Yield the next tokens of all answers that have not ended, by their numbers."""
        limits, speculative = self._limits, self._model.speculative
        if speculative is None:
            samplers = [RowSampler(limits.sampling.numbered(n), self._ids) for n in range(limits.n)]
            yield from generate_rows(
                self._model.engine, self._ids, limits.max_tokens, samplers, ended
            )
            return
        text = SpeculativeText(
            speculative, self._ids, limits.max_tokens, limits.sampling, self._model.cache
        )
        self._speculated = text.counts
        for one in text:
            yield {0: one}
            if ended:
                return

    def _searched(self) -> Iterator[str]:
        limits, stop = self._limits, self._model.side.stop
        assert limits.beams is not None
        found = beam_search(
            self._model.engine, self._ids, limits.max_tokens, limits.beams, stop, self._count
        )
        for text, beam in zip(self._texts, found, strict=False):
            for token in beam.tokens:
                text.take(Chosen(token))
            if not beam.ended:
                text.finish("length")
            text.score = beam.score
        yield "".join(self._texts[0].pieces)

    def _count(self, tokens: int) -> None:
        """Note that a step has been computed."""
        self._last = time.perf_counter()
        if not self._computed:
            self._first = self._last
        self._computed += tokens

    def generated(self) -> Generated:
        """Return what has come so far."""
        begun = self._computed > 0
        width = self._limits.n if self._limits.beams is None else self._limits.beams.beams
        return Generated(
            model=self._model.name,
            choices=tuple(text.choice() for text in self._texts),
            templated=self._templated,
            decoder=self._model.decoder,
            prompt_tokens=len(self._ids),
            prompt_seconds=self._first - self._begun if begun else 0.0,
            steps=max(0, self._computed - width),
            step_seconds=self._last - self._first if begun else 0.0,
            speculation=None if self._speculated is None else self._speculated.document(),
            processor_share=self._processor_share,
        )


class _Text:
    """Text of one answer, as far as it has come."""

    def __init__(self, side: TextSide, prompt: Sequence[int], limits: AnswerLimits) -> None:
        self._tokenizer, self._ends = side.tokenizer, side.stop
        self._stream = TextStream(side.tokenizer, prompt, limits.stop, include=limits.include_stop)
        self._scored: list[ScoredToken] | None = None if limits.sampling.logprobs is None else []
        self._tokens: list[int] = []
        self.pieces: list[str] = []
        self.stopped: Stopped = "interrupted"
        self.score: float | None = None

    def take(self, chosen: Chosen) -> str:
        """Return the text that is sure with a further token."""
        if chosen.token in self._ends:
            return self.finish("end")
        self._tokens.append(chosen.token)
        if self._scored is not None:
            self._scored.append(scored(self._tokenizer, chosen))
        return self._kept(self._stream.add(chosen.token))

    def finish(self, stopped: Stopped) -> str:
        """Return the text that is left when no token follows."""
        self.stopped = stopped
        return self._kept(self._stream.rest())

    def _kept(self, piece: str) -> str:
        if self._stream.stopped_by is not None:
            self.stopped = "stop"
        if piece:
            self.pieces.append(piece)
        return piece

    def choice(self) -> GeneratedText:
        """Return what has come so far."""
        return GeneratedText(
            text="".join(self.pieces),
            tokens=tuple(self._tokens),
            stopped=self.stopped,
            stop=self._stream.stopped_by,
            logprobs=None if self._scored is None else tuple(self._scored),
            score=self.score,
        )


def scored(tokenizer: TextTokenizer, chosen: Chosen) -> ScoredToken:
    """Return a token with texts; errors as `TextTokenizer.decode`."""
    assert chosen.logprob is not None
    own, *top = (
        LikelyToken(token, tokenizer.decode([token]), logprob)
        for token, logprob in ((chosen.token, chosen.logprob), *chosen.top)
    )
    return ScoredToken(own, tuple(top))
