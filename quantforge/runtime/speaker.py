"""A model that answers in text: a prompt or a conversation in, pieces of text out as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quantforge.errors import InputError, UsageError
from quantforge.runtime.answer_limits import AnswerLimits
from quantforge.runtime.decoding_engines import engine_of
from quantforge.runtime.live_answer import LiveAnswer, TextModel
from quantforge.runtime.load import Loaded
from quantforge.runtime.speculation.decode import SpeculativeDecoder
from quantforge.runtime.text_side import as_input_errors, text_side
from quantforge_calibration.chat import ChatTemplate
from quantforge_calibration.conversations import Conversation

Messages = Sequence[Mapping[str, str]]  # each with "role" and "content"
RAW = "--raw (raw=True) completes the prompt as text, without the template"


class Speaker:
    """A loaded model and its text side, ready to answer any number of prompts.

    Args:
        loaded: the model.
        name: of the model, for results.
        speculative: who drafts tokens ahead, if anybody does.
        cache: kind of its cache, see `quantforge.architectures.cache_kinds`; that of the model when left out.

    Attributes:
        events: what loading has to tell.

    Raises:
        InputError: no tokenizer that can be read.
        RefusedError: a kind of cache for a model that the own decoder does not compute.
    """

    def __init__(
        self,
        loaded: Loaded,
        name: str,
        speculative: SpeculativeDecoder | None = None,
        cache: str = "",
    ) -> None:
        self._side = text_side(loaded.path, loaded.config)
        engine, token_bytes = engine_of(loaded.model, cache, loaded.kv_scales)
        decoder = "transformers" if token_bytes is None else "own"
        self._model = TextModel(name, decoder, engine, self._side, speculative, cache)
        self.name, self.events = name, loaded.events

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a person should know of the model's chat templates."""
        return () if self._side.template is None else self._side.template.notes

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
            limits: its rules.
            raw: complete the text as it is.

        Raises:
            UsageError: the prompt is neither a text nor a conversation.
            InputError: the prompt cannot be encoded or rendered, or leaves no room for a token; a conversation for
                a model without a template.
        """
        checked(prompt)
        if self._model.speculative is not None and (limits.n > 1 or limits.beams is not None):
            raise UsageError(
                "several answers, and a draft", "drafts are for one answer: leave one out"
            )
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
        limits = replace(limits, max_tokens=min(room, limits.max_tokens))
        return LiveAnswer(self._model, ids, limits, templated=template is not None)

    def _ids(self, prompt: str | Messages, template: ChatTemplate | None) -> list[int]:
        tokenizer = self._side.tokenizer
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
