"""A model that answers in text: a prompt or a conversation in, pieces of text out as they come."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from quantforge.errors import InputError, UsageError
from quantforge.runtime.decoding_engines import engine_of
from quantforge.runtime.generated_text import Generated, Stopped
from quantforge.runtime.load import Loaded
from quantforge.runtime.sampling import Sampling
from quantforge.runtime.text_side import as_input_errors, text_side
from quantforge.runtime.token_stream import TextStream, tokens
from quantforge_calibration.chat import ChatTemplate, render

Messages = Sequence[Mapping[str, str]]  # each with "role" and "content"
RAW = "--raw (raw=True) completes the prompt as text, without the template"


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Rules for one answer: at most ``max_tokens`` tokens, chosen by ``sampling``.

    Raises:
        UsageError: ``max_tokens`` is no whole number from 1 on.
    """

    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise UsageError(f"max_tokens = {self.max_tokens!r}", "a whole number from 1 on")


class Speaker:
    """A loaded model and its text side, ready to answer any number of prompts.

    Args:
        loaded: the model.
        name: of the model, for results.

    Attributes:
        events: what loading has to tell.

    Raises:
        InputError: no tokenizer that can be read.
    """

    def __init__(self, loaded: Loaded, name: str) -> None:
        self._side = text_side(loaded.path, loaded.config)
        self._engine, token_bytes = engine_of(loaded.model, scales=loaded.kv_scales)
        self.name, self.events = name, loaded.events
        self.decoder = "transformers" if token_bytes is None else "own"

    @property
    def templated(self) -> bool:
        """Return whether the model has a chat template."""
        return self._side.template is not None

    def answer(
        self, prompt: str | Messages, limits: AnswerLimits, *, raw: bool = False
    ) -> LiveAnswer:
        """Begin an answer; nothing is computed before its pieces are asked for.

        Args:
            prompt: a text (what a user says, where there is a template), or a conversation.
            limits: how long, and how tokens are chosen.
            raw: complete the text as it is.

        Raises:
            UsageError: the prompt is neither a text nor a conversation.
            InputError: the prompt cannot be encoded or rendered, or leaves no room for a token; a conversation for
                a model without a template.
        """
        checked(prompt)
        template = None if raw else self._side.template
        if template is None and not isinstance(prompt, str):
            raise InputError(
                f"{self.name}: a conversation needs a chat template, and "
                + ("raw leaves it out" if raw else "there is none"),
                "give the prompt as one text",
            )
        ids = self._ids(prompt, template)
        room = self._side.positions - len(ids)
        if room < 1:
            raise InputError(
                f"the prompt has {len(ids)} tokens, {self.name} sees {self._side.positions}",
                "shorten it; in a chat /reset forgets what was said",
            )
        limits = AnswerLimits(min(room, limits.max_tokens), limits.sampling)
        return LiveAnswer(self, ids, limits, templated=template is not None)

    def run(self, answer: LiveAnswer) -> Iterator[int]:
        """Yield the tokens of an answer up to one that ends it, which is not yielded; errors as `tokens`."""
        limits = answer.limits
        for token in tokens(self._engine, answer.ids, limits.max_tokens, limits.sampling):
            answer.count()
            if token in self._side.stop:
                answer.stopped = "end"
                return
            yield token

    def text_of(self, answer: LiveAnswer) -> TextStream:
        """Return the text of an answer's tokens."""
        return TextStream(self._side.tokenizer, answer.ids)

    def _ids(self, prompt: str | Messages, template: ChatTemplate | None) -> list[int]:
        tokenizer = self._side.tokenizer
        if template is None:
            with as_input_errors():
                ids = tokenizer.encode(str(prompt))
            first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            ids = first + ids or ([] if tokenizer.eos_id is None else [tokenizer.eos_id])
        else:
            talk = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            with as_input_errors(RAW):
                (text,) = render(template, [[dict(turn) for turn in talk]], answer=True)
                ids = tokenizer.encode_all(text)
        if not ids:
            raise InputError("the prompt has no token", "say something")
        return ids


class LiveAnswer:
    """An answer while it comes: iterated over once, it yields pieces of text."""

    def __init__(
        self, speaker: Speaker, ids: list[int], limits: AnswerLimits, *, templated: bool
    ) -> None:
        self.ids, self.limits = ids, limits
        self.stopped: Stopped = "interrupted"
        self._speaker, self._templated = speaker, templated
        self._begun = time.perf_counter()
        self._times: list[float] = []
        self._tokens: list[int] = []
        self._pieces: list[str] = []

    def __iter__(self) -> Iterator[str]:
        text = self._speaker.text_of(self)
        self._begun = time.perf_counter()
        for token in self._speaker.run(self):
            self._tokens.append(token)
            with as_input_errors():
                piece = text.add(token)
            if piece:
                self._pieces.append(piece)
                yield piece
        if self.stopped != "end":
            self.stopped = "length"
        with as_input_errors():
            rest = text.rest()
        if rest:
            self._pieces.append(rest)
            yield rest

    def count(self) -> None:
        """Note that a token has been computed."""
        self._times.append(time.perf_counter())

    def generated(self) -> Generated:
        """Return what has come so far."""
        times = self._times
        return Generated(
            model=self._speaker.name,
            text="".join(self._pieces),
            tokens=tuple(self._tokens),
            stopped=self.stopped,
            templated=self._templated,
            decoder=self._speaker.decoder,
            prompt_tokens=len(self.ids),
            prompt_seconds=times[0] - self._begun if times else 0.0,
            steps=max(0, len(times) - 1),
            step_seconds=times[-1] - times[0] if times else 0.0,
        )


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
