"""Scores and generations of the task model equal those that transformers computes from all logits."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.errors import InputError, UsageError
from quantforge.evaluation.task_model import (
    GenerationArguments,
    TaskModel,
    batch_by_length,
    disjoint_windows,
)
from quantforge.evaluation.tasks import Tasks, check
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.load import load
from tests.evaluations import load_tokenizer

PAIRS = [
    ("the weights of the", " model are rounded"), ("1 + 1 =", " 2"), ("", "the grid"),
    ("the nearest point ", "of the grid, row by row"), ("def f(x):", " return x"), ("x", "y"),
]  # fmt: skip


@pytest.fixture(scope="module")
def task_models(tiny):
    """Return a function from a family and a number of positions to a `TaskModel`."""

    @cache
    def make(family: str = "llama", positions: int = 64) -> TaskModel:
        return TaskModel(load(tiny(family)).model, load_tokenizer(tiny(family)), positions)

    return make


def expected_score(answers: TaskModel, ids: list[int], count: int) -> tuple[float, bool]:
    """Return the log-likelihood and greediness of the last tokens, from all logits of one text."""
    with torch.inference_mode():
        logits = answers._model(torch.tensor([ids[:-1]])).logits[0, -count:].double()
    targets = torch.tensor(ids[-count:])
    logs = logits.log_softmax(-1).gather(1, targets[:, None])
    return logs.sum().item(), bool((logits.argmax(-1) == targets).all())


@pytest.mark.tokens
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_continuation_scores_equal_summed_token_likelihoods(task_models, family):
    answers = task_models(family)
    scores = answers.score_continuations(PAIRS)
    for (context, continuation), (value, greedy) in zip(PAIRS, scores, strict=True):
        scored = answers.encode_pair(context, continuation)
        expected, best = expected_score(answers, list(scored.ids), scored.count)
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == best


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_empty_continuation_has_likelihood_one(task_models, family):
    """Also next to other continuations, and after a context of a single token."""
    answers = task_models(family)
    answers_of_x = answers.score_continuations([("x", "y")])
    assert answers.score_continuations([("", ""), ("x", "y")]) == [(0.0, True), *answers_of_x]
    assert answers.score_continuations([("", "")]) == [(0.0, True)]
    (value, _) = answers.score_continuations([("x", "")])[0]
    assert value <= 0


@pytest.mark.tokens
def test_generated_tokens_are_scored_as_greedy(task_models):
    answers, seen = task_models(), 0
    for context in ("the", "1 + 1", "def f", "row by row,", "the nearest point", "weights of"):
        generated = answers.generate(context, GenerationArguments(new_tokens=1))
        token_ids = answers._tokenizer.encode(context + generated)
        if len(token_ids) == len(answers._tokenizer.encode(context)) + 1:  # it is one token again
            assert answers.score_continuations([(context, generated)])[0][1]
            seen += 1
    assert seen


def test_context_spaces_belong_to_the_continuation(task_models):
    answers = task_models()
    encode = answers._tokenizer.encode
    # Spaces at the end of a context belong to what follows.
    assert answers.encode_pair("the model ", "are") == answers.encode_pair("the model", " are")
    alone = answers.encode_pair("", "the grid")
    assert list(alone.ids[1:]) == encode("the grid")
    assert alone.ids[0] == answers._start_token
    assert alone.count == len(alone.ids) - 1


def test_long_contexts_are_truncated_at_the_start(task_models):
    answers = task_models("llama", 8)
    scored = answers.encode_pair(
        "the weights of the model are rounded to the nearest", " point of the grid"
    )
    token_ids = answers._tokenizer.encode(
        "the weights of the model are rounded to the nearest point of the grid"
    )
    assert list(scored.ids) == token_ids[-9:]
    long = answers.encode_pair(
        "the", " weights of the model are rounded to the nearest point of the grid"
    )
    assert long.count == 8  # of nine tokens the first is only seen


@given(st.lists(st.integers(0, 99), min_size=1, max_size=60), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_every_token_of_a_text_is_scored_once(ids, positions):
    parts = disjoint_windows(ids, 7, positions)
    assert [token for part in parts for token in part.ids[-part.count :]] == ids
    assert parts[0].ids[0] == 7
    assert all(len(part.ids) - 1 <= positions for part in parts)
    assert all(len(part.ids) - 1 == positions for part in parts[1:])  # with what comes before


def test_a_text_score_is_the_sum_of_its_windows(task_models):
    answers = task_models("llama", 16)
    text = "the weights of the model are rounded to the nearest point of the grid, row by row; " * 3
    ids = answers._tokenizer.encode(text)
    parts = disjoint_windows(ids, answers._start_token, 16)
    assert len(parts) > 2
    expected = sum(expected_score(answers, list(part.ids), part.count)[0] for part in parts)
    assert answers.score_texts([text, ""]) == [pytest.approx(expected, abs=1e-3), 0]


def test_batches_are_of_similar_lengths():
    result = list(batch_by_length([3, 10, 1, 9, 30, 5], 20))
    assert result == [[4], [1, 3], [5, 0, 2]]


@pytest.mark.tokens
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation_equals_greedy_transformers_and_stops(task_models, family):
    answers = task_models(family)
    context, tokenizer = "the weights of the", answers._tokenizer
    ids = answers._prefix + tokenizer.encode(context)
    model = answers._model
    expected = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=8, pad_token_id=0,
        eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    text = tokenizer.tokenizer.decode(expected[0, len(ids) :].tolist())
    assert answers.generate(context, GenerationArguments(new_tokens=8)) == text
    if len(text) > 3:
        stop = text[2:4]
        for stops in ((stop,), ("", "\0", text[3:], stop)):
            assert (
                answers.generate(context, GenerationArguments(stops, 8)) == text[: text.find(stop)]
            )


def test_more_tokens_than_positions_are_refused(task_models):
    with pytest.raises(InputError, match="64 new tokens"):
        task_models().generate("the", GenerationArguments(new_tokens=64))


def test_a_nan_likelihood_is_an_error(tiny):
    model = load(tiny("llama")).model
    answers = TaskModel(model, load_tokenizer(tiny("llama")), 64)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("nan")
    with pytest.raises(InputError, match="NaN or infinite"):
        answers.score_continuations([("the", " model")])


def test_generation_arguments_are_parsed_from_requests():
    parsed = GenerationArguments.from_request(
        {"until": ["\n"], "max_gen_toks": 7, "do_sample": False, "temperature": 0.0}
    )
    assert parsed == GenerationArguments(("\n",), 7)
    assert GenerationArguments.from_request({"until": "x"}).stop == ("x",)
    drawn = GenerationArguments.from_request(
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 3}
    )
    assert drawn.sampling == Sampling(temperature=0.7, top_p=0.9, seed=3)
    assert GenerationArguments.from_request(
        {"do_sample": False, "temperature": 0.7}
    ).sampling.greedy
    with pytest.raises(UsageError, match="num_beams"):
        GenerationArguments.from_request({"num_beams": 4})


def test_unusable_task_requests_are_refused_before_work(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no task"):
        check(Tasks(()))
    with pytest.raises(InputError, match="no file"):
        check(Tasks((str(tmp_path / "task.yaml"),)))
    monkeypatch.setattr("quantforge.evaluation.tasks.find_spec", lambda _name: None)
    with pytest.raises(InputError, match="not installed") as raised:
        check(Tasks(("hellaswag",)))
    assert "quantforge[eval]" in raised.value.hint
