"""Text that the reference writes itself: how a model scores along it, and where its own answer differs.

The windows of a text say how close a model is where people wrote. What a model is used for is its own text, long
answers above all, in which one other token changes everything that follows. So the reference answers some prompts
greedily, and every model is measured twice: the KL divergence of its predictions along the reference's answer, and its
own greedy answer, with the first token at which the two differ and how long it is by comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quantforge.architectures.configuration import positions_in
from quantforge.errors import InputError
from quantforge.evaluation.divergence import Estimate, final_hidden, finite
from quantforge.evaluation.output_head import checked_head, compare_predictions
from quantforge.files.reader import Checkpoint
from quantforge.runtime.decoding import engine_of, generate_tokens
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.load import Loaded
from quantforge.runtime.text_processing import TextSide, text_side

NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts, as the model reads them.

    Attributes:
        name: of the source that they are from.
        texts: one for each answer, already rendered where a chat template is used.
        new_tokens: an answer has at most so many.
        chat_template: whether they were rendered by the model's template.
    """

    name: str
    texts: tuple[str, ...]
    new_tokens: int = NEW_TOKENS
    chat_template: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return what the report says of them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy answer of a model.

    Attributes:
        ids: new tokens; the one that ended it is the last, if one did.
        text: the same, special tokens left out.
        ended: whether the model ended it, rather than the limit.
    """

    ids: tuple[int, ...]
    text: str
    ended: bool

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data, without its ids."""
        return {"text": self.text, "tokens": len(self.ids), "ended": self.ended}


class TokenizedPrompts:
    """Prompts in the tokens of one reference, and the tokens that end an answer.

    Args:
        prompts: what is asked.
        side: of the reference.
    """

    def __init__(self, prompts: Prompts, side: TextSide) -> None:
        tokenizer = side.tokenizer
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        self.ids = [
            begin + tokenizer.encode(text, f"--generated: prompt {number}")
            for number, text in enumerate(prompts.texts, 1)
        ]
        self.new_tokens = prompts.new_tokens
        self._tokenizer = tokenizer
        self._ends = side.stop

    def check(self, positions: int) -> None:
        """Check that a model with so many positions can answer.

        Raises:
            InputError: a prompt is empty, or too long together with its answer.
        """
        for number, prompt in enumerate(self.ids, 1):
            if not 0 < len(prompt) <= positions - self.new_tokens:
                raise InputError(
                    f"--generated: prompt {number} has {len(prompt)} tokens, {self.new_tokens} are "
                    f"generated, the model has {positions} positions",
                    "shorten the prompt, or lower --generated-tokens",
                )

    def answers(self, loaded: Loaded) -> list[Answer]:
        """Return the greedy answer of a model to every prompt."""
        engine, _ = engine_of(loaded.model, scales=loaded.kv_scales)
        answers = []
        for prompt in self.ids:
            chosen: list[int] = []
            for token in generate_tokens(engine, prompt, self.new_tokens, Sampling()):
                chosen.append(token)
                if token in self._ends:
                    break
            text = self._tokenizer.decode(chosen)
            answers.append(Answer(tuple(chosen), text, chosen[-1] in self._ends))
        return answers


def tokenized(models: Sequence[Checkpoint], prompts: Prompts) -> TokenizedPrompts:
    """Return prompts in the tokens of the first model; errors as `TokenizedPrompts.check`, for every model."""
    found = TokenizedPrompts(prompts, text_side(models[0].path, models[0].config))
    for model in models:
        found.check(positions_in(model.config))
    return found


class ReferenceAnswers:
    """Answers of the reference, with the hidden states that predict their tokens, kept for all other models."""

    def __init__(self, prompts: TokenizedPrompts, loaded: Loaded) -> None:
        self._prompts = prompts
        self._head = checked_head(loaded.model, torch.tensor(prompts.ids[:1]))
        self._answers = prompts.answers(loaded)
        self._states = [
            _states(loaded, prompt, answer).float().cpu()
            for prompt, answer in zip(prompts.ids, self._answers, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the figures of the reference: its answers."""
        return {"answers": [answer.to_json() for answer in self._answers]}

    @torch.inference_mode()
    def compare(self, loaded: Loaded) -> dict[str, Any]:
        """Return the figures of another model.

        Raises:
            InputError: its divergence is NaN or infinite.
        """
        head = checked_head(loaded.model, torch.tensor(self._prompts.ids[:1]))
        means: list[Tensor] = []
        agreeing: list[Tensor] = []
        for prompt, answer, states in zip(
            self._prompts.ids, self._answers, self._states, strict=True
        ):
            rows = _states(loaded, prompt, answer)
            targets = torch.tensor(answer.ids)
            _, kl, agrees = compare_predictions(head, rows, self._head, states, targets)
            means.append(finite(kl[None], "KL divergence of generated text").double().mean())
            agreeing.append(agrees)
        return summary(
            [answer.ids for answer in self._answers],
            self._prompts.answers(loaded),
            torch.stack(means),
            torch.cat(agreeing),
        )


def summary(
    reference: Sequence[tuple[int, ...]], answers: Sequence[Answer], kl: Tensor, agrees: Tensor
) -> dict[str, Any]:
    """Return the figures of a model.

    Args:
        reference: ids of the reference's answers.
        answers: the model's own.
        kl: mean KL divergence along each answer of the reference in nats per token, float64 ``[prompts]``.
        agrees: whether both think the same token most likely, ``[tokens of all these answers]``.
    """
    mean = Estimate.of(kl)
    points = [parting(ids, answer.ids) for ids, answer in zip(reference, answers, strict=True)]
    rows = [
        answer.to_json()
        | {"kl_mean": value, "parts_at": point, "length_ratio": len(answer.ids) / len(ids)}
        for answer, ids, value, point in zip(answers, reference, kl.tolist(), points, strict=True)
    ]
    same = [
        len(ids) if point is None else point for ids, point in zip(reference, points, strict=True)
    ]
    return {
        "kl_mean": mean.mean,
        "kl_se": mean.error if len(kl) > 1 else None,
        "top1_agreement": agrees.double().mean().item(),
        "parted": sum(point is not None for point in points),
        "same_tokens": sum(same) / len(same),
        "length_ratio": sum(len(answer.ids) for answer in answers) / sum(map(len, reference)),
        "answers": rows,
    }


def parting(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the index of the first token at which two answers differ, or None where they are the same."""
    pairs = zip(first, second, strict=False)
    differing = (index for index, (one, other) in enumerate(pairs) if one != other)
    shorter = min(len(first), len(second))
    return next(differing, None if len(first) == len(second) else shorter)


def _states(loaded: Loaded, prompt: Sequence[int], answer: Answer) -> Tensor:
    """Return the final hidden states ``[tokens, hidden]`` that predict the tokens of an answer."""
    ids = torch.tensor([[*prompt, *answer.ids]])
    ((_, hidden),) = final_hidden(loaded.model, ids)
    return hidden[0, len(prompt) - 1 :]
