"""HTTP completions equal the plain loop, streamed or not."""

from __future__ import annotations

import asyncio

import pytest
import torch

from quantforge.runtime.batching.generation_requests import GenerationRequest
from tests.fake_decoder import VOCABULARY, FakeDecoder, greedy_tokens
from tests.http_client import END, LETTERS, NAME, ids, letters, serve_fake_decoder

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"


def plain(prompt: str, count: int, stop: frozenset[int] = frozenset({END})) -> list[int]:
    return greedy_tokens(GenerationRequest("", tuple(ids(prompt)), count, stop))


def run(work):
    return asyncio.run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_completion_equals_the_plain_loop(stream):
    async def work():
        async with serve_fake_decoder() as client:
            prompts = ["abc", "Hello", "z7"]
            result = await client.complete(prompt=prompts, max_tokens=30, n=2, stream=stream)
            assert result.status == 200
            for index, prompt in enumerate(prompts):
                for number in range(2):
                    assert result.text(2 * index + number) == letters(plain(prompt, 30))
            completion = await client.complete(
                prompt=[ids("abc"), ids("z7")], max_tokens=7, stream=stream
            )
            assert (completion.text(0), completion.text(1)) == tuple(
                letters(plain(text, 7)) for text in ("abc", "z7")
            )
            assert (await client.complete(prompt=ids("abc"))).text() == letters(plain("abc", 16))

    run(work())


def test_finish_reasons_and_token_counts():
    ended = next(
        text for text in LETTERS if END in plain(text, 60)[3:] and END not in plain(text, 3)
    )
    cut = plain(ended, 60).index(END)

    async def work():
        async with serve_fake_decoder() as client:
            result = (await client.complete(prompt=ended, max_tokens=60)).document
            assert result["object"] == "text_completion"
            assert result["choices"][0]["finish_reason"] == "stop"
            assert result["usage"] == {
                "prompt_tokens": 1,
                "completion_tokens": cut + 1,
                "total_tokens": cut + 2,
            }
            short = (await client.complete(prompt=ended, max_tokens=cut)).document
            assert short["choices"][0]["finish_reason"] == "length"
            assert short["choices"][0]["text"] == result["choices"][0]["text"]
            on = await client.complete(prompt=ended, max_tokens=60, ignore_eos=True)
            assert on.document["usage"]["completion_tokens"] == 60
            events = (await client.complete(prompt=[ended, "b"], max_tokens=60, stream=True,
                                            stream_options={"include_usage": True})).events  # fmt: skip
            assert events[-1]["choices"] == []
            assert events[-1]["usage"]["prompt_tokens"] == 2
            assert {event["usage"] for event in events[:-1]} == {None}

    run(work())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_the_completion_and_its_computation(stream, include):
    text = letters(plain("abc", 200, frozenset()))
    stop = text[20:23]
    cut = text.index(stop) + (len(stop) if include else 0)

    async def work():
        async with serve_fake_decoder() as client:
            options = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stop": ["????", stop],
                     "include_stop_str_in_output": include}  # fmt: skip
            result = await client.complete(**options, stream=stream, logprobs=0)
            assert result.text() == text[:cut]
            last = result.events[-1] if stream else result.document
            assert last["choices"][0]["finish_reason"] == "stop"
            if not stream:
                assert result.document["usage"]["completion_tokens"] == text.index(stop) + len(stop)
                assert "".join(result.document["choices"][0]["logprobs"]["tokens"]) == text[:cut]

    run(work())


class Graded(FakeDecoder):
    """Its next token is likely, not certain."""

    def logits(self, hidden):
        return super().logits(hidden) * 6 + torch.cos(torch.arange(VOCABULARY) * 1.0)


def graded(history: list[int]) -> torch.Tensor:
    """Log-probabilities of the token that follows a history."""
    from tests.fake_decoder import next_token

    logits = torch.cos(torch.arange(VOCABULARY) * 1.0)
    logits[next_token(history)] += 6
    return logits.log_softmax(-1)


@pytest.mark.parametrize("options", [{}, {"chunk": 3, "pages": 12}], ids=str)
def test_logprobs_equal_those_of_the_model(options):
    async def work():
        async with serve_fake_decoder(Graded(), **options) as client:
            prompts = ["Hello1", "abcdefg" * 9]
            result = (
                await client.complete(prompt=prompts, max_tokens=5, logprobs=3, echo=True)
            ).document
            for prompt, choice in zip(prompts, result["choices"], strict=True):
                logprobs, text = choice["logprobs"], choice["text"]
                whole = ids(text.removesuffix("<end>"))
                assert text.startswith(prompt)
                assert logprobs["tokens"][: len(text)] == list(text)
                assert logprobs["text_offset"][: len(text)] == list(range(len(text)))
                assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
                for index in range(1, len(whole)):
                    expected = graded(whole[:index])
                    assert logprobs["token_logprobs"][index] == pytest.approx(
                        float(expected[whole[index]]), abs=1e-4
                    )
                    best = {
                        LETTERS[i] if i < END else "<end>": float(expected[i])
                        for i in expected.topk(3).indices
                    }
                    best[LETTERS[whole[index]]] = float(expected[whole[index]])
                    assert logprobs["top_logprobs"][index] == pytest.approx(best, abs=1e-4)
            # An answer of no token: the prompt's own figures.
            none = (
                await client.complete(prompt=prompts, max_tokens=0, logprobs=0, echo=True)
            ).document
            assert [choice["text"] for choice in none["choices"]] == prompts
            assert none["usage"]["completion_tokens"] == 0
            assert [len(choice["logprobs"]["tokens"]) for choice in none["choices"]] == [6, 63]

    run(work())


def test_same_seed_repeats_the_answer_and_no_seed_varies():
    async def work():
        async with serve_fake_decoder(Graded()) as client:
            options = {"prompt": "abc", "max_tokens": 40, "temperature": 2.0, "n": 2}
            first, again = [
                (await client.complete(**options, seed=5)).document["choices"] for _ in range(2)
            ]
            assert first == again
            assert first[0]["text"] != first[1]["text"]
            free = {(await client.complete(**options)).text() for _ in range(3)}
            assert len(free) == 3

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_chat_messages_are_rendered_with_the_template(stream):
    async def work():
        async with serve_fake_decoder(template=TEMPLATE) as client:
            messages = [{"role": "developer", "content": "be"},
                        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
                        {"role": "assistant", "content": "yes", "tool_calls": None}]  # fmt: skip
            body = {"model": NAME, "messages": messages, "temperature": 0, "max_completion_tokens": 9, "stream": stream,
                    "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}  # fmt: skip
            result = await client.post("/v1/chat/completions", body)
            assert result.status == 200, result.body
            expected = letters(plain("sbeuhelloayesA", 9))
            if not stream:
                (choice,) = result.document["choices"]
                assert result.document["object"] == "chat.completion"
                assert choice["message"] == {
                    "role": "assistant",
                    "content": expected,
                    "refusal": None,
                }
                content = choice["logprobs"]["content"]
            else:
                deltas = [event["choices"][0]["delta"] for event in result.events[:-1]]
                assert deltas[0] == {"role": "assistant", "content": ""}
                assert "".join(delta.get("content", "") for delta in deltas) == expected
                told = [event["choices"][0]["logprobs"] for event in result.events[1:-1]]
                content = [item for part in told if part for item in part["content"]]
                assert result.events[-1]["usage"]["prompt_tokens"] == len("sbeuhelloayesA")
            assert [item["token"] for item in content][: len(expected)] == list(expected)
            assert content[0]["bytes"] == [ord(expected[0])]
            assert len(content[0]["top_logprobs"]) == 2

    run(work())


def test_documents_and_variables_reach_the_template():
    shown = (
        "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ mark }}{{ messages[0].content }}"
    )

    async def work():
        async with serve_fake_decoder(template=shown) as client:
            body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            more = {"documents": [{"text": "ab"}], "chat_template_kwargs": {"mark": "c"}}
            for options, prompt in ((body, "hi"), ({**body, **more}, "abchi")):
                result = await client.post("/v1/chat/completions", options)
                assert result.document["usage"]["prompt_tokens"] == len(prompt)

    run(work())


def test_chat_without_template_is_refused():
    async def work():
        async with serve_fake_decoder() as client:
            body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
            result = await client.post("/v1/chat/completions", body)
            assert result.status == 400
            assert result.document["error"]["code"] == "no_chat_template"
        async with serve_fake_decoder(
            template="{% for m in messages %}{{ m.nothing.at.all }}{% endfor %}"
        ) as client:
            result = await client.post("/v1/chat/completions", body)
            assert (result.status, result.document["error"]["code"]) == (400, "chat_template")

    run(work())
