"""HTTP errors name the field and the rule; random bodies get an answer or such an error."""

from __future__ import annotations

import asyncio
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantforge.serving.request_bodies import CommonBody
from tests.http_client import NAME, serve_fake_decoder

COMPLETE, TALK = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": NAME, "prompt": "abc"}
CHATTING = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}A"
MEGABYTE = "x" * (1 << 20)
WRONG = [
    (COMPLETE, b"", 400, None, "invalid_json"),
    (COMPLETE, b"{", 400, None, "invalid_json"),
    (COMPLETE, b"[1]", 400, None, "invalid_json"),
    (COMPLETE, b"\xff{}", 400, None, "invalid_json"),
    (COMPLETE, b'{"model": "fake", "prompt": "a", "prompt": "b"}', 400, None, "invalid_json"),
    (COMPLETE, b'{"model": "fake", "prompt": "a", "temperature": NaN}', 400, None, "invalid_json"),
    (COMPLETE, b'{"a":' * 100_000, 400, None, "invalid_json"),
    (COMPLETE, b'{"model": "fake", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, None, "invalid_json"),
    (COMPLETE, {"prompt": "abc"}, 400, "model", "missing"),
    (COMPLETE, {"model": NAME}, 400, "prompt", "missing"),
    (COMPLETE, {**GOOD, "model": "gpt-4"}, 404, "model", "model_not_found"),
    (COMPLETE, {**GOOD, "model": 3}, 400, "model", "invalid_value"),
    (COMPLETE, {**GOOD, "prompt": 3}, 400, "prompt", "invalid_value"),
    (COMPLETE, {**GOOD, "prompt": []}, 400, "prompt", "invalid_value"),
    (COMPLETE, {**GOOD, "prompt": [[]]}, 400, "prompt", "invalid_value"),
    (COMPLETE, {**GOOD, "prompt": [[1, "a"]]}, 400, "prompt", "invalid_value"),
    (COMPLETE, {**GOOD, "prompt": [1, True]}, 400, "prompt", "invalid_value"),
    (COMPLETE, {**GOOD, "prompt": [-1]}, 400, "prompt", "invalid_value"),
    (COMPLETE, {**GOOD, "prompt": [61]}, 400, "prompt", None),
    (COMPLETE, {**GOOD, "prompt": [1 << 70]}, 400, None, "invalid_json"),
    (COMPLETE, {**GOOD, "prompt": "\ud800"}, 400, None, "invalid_json"),
    (COMPLETE, {**GOOD, "prompt": "a" * 400}, 400, "prompt", "context_length_exceeded"),
    (COMPLETE, {**GOOD, "max_tokens": 298}, 400, "max_tokens", "context_length_exceeded"),
    (COMPLETE, {**GOOD, "max_tokens": -1}, 400, "max_tokens", "invalid_value"),
    (COMPLETE, {**GOOD, "max_tokens": 1.5}, 400, "max_tokens", "invalid_value"),
    (COMPLETE, {**GOOD, "max_tokens": "5"}, 400, "max_tokens", "invalid_value"),
    (COMPLETE, {**GOOD, "max_tokens": True}, 400, "max_tokens", "invalid_value"),
    (COMPLETE, {**GOOD, "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    (COMPLETE, {**GOOD, "n": 0}, 400, "n", "invalid_value"),
    (COMPLETE, {**GOOD, "n": 129}, 400, "n", "invalid_value"),
    (COMPLETE, {**GOOD, "prompt": ["a"] * 129}, 400, "prompt", "too_many_answers"),
    (COMPLETE, {**GOOD, "temperature": -0.1}, 400, "temperature", "invalid_value"),
    (COMPLETE, b'{"model": "fake", "prompt": "a", "temperature": 1e999}', 400, None, "invalid_json"),
    (COMPLETE, {**GOOD, "top_p": 0}, 400, "top_p", "invalid_value"),
    (COMPLETE, {**GOOD, "frequency_penalty": -3}, 400, "frequency_penalty", "invalid_value"),
    (COMPLETE, {**GOOD, "presence_penalty": "x"}, 400, "presence_penalty", "invalid_value"),
    (COMPLETE, {**GOOD, "repetition_penalty": -1}, 400, "repetition_penalty", "invalid_value"),
    (COMPLETE, {**GOOD, "seed": -1}, 400, "seed", "invalid_value"),
    (COMPLETE, {**GOOD, "logit_bias": {"5": 101}}, 400, "logit_bias", "invalid_value"),
    (COMPLETE, {**GOOD, "logit_bias": {"five": 1}}, 400, "logit_bias", "invalid_value"),
    (COMPLETE, {**GOOD, "logit_bias": {"61": 1}}, 400, "logit_bias", None),
    (COMPLETE, {**GOOD, "logprobs": 21}, 400, "logprobs", "invalid_value"),
    (COMPLETE, {**GOOD, "logprobs": True}, 400, "logprobs", "invalid_value"),
    (COMPLETE, {**GOOD, "stop": MEGABYTE}, 400, "stop", "invalid_value"),
    (COMPLETE, {**GOOD, "stop": ""}, 400, "stop", "invalid_value"),
    (COMPLETE, {**GOOD, "stop": ["a"] * 65}, 400, "stop", "invalid_value"),
    (COMPLETE, {**GOOD, "stop": [1]}, 400, "stop", "invalid_value"),
    (COMPLETE, {**GOOD, "stream": "yes"}, 400, "stream", "invalid_value"),
    (COMPLETE, {**GOOD, "stream_options": {"more": 1}}, 400, "stream_options.more", "not_supported"),
    (COMPLETE, {**GOOD, "suffix": "x"}, 400, "suffix", "not_supported"),
    (COMPLETE, {**GOOD, "best_of": 2}, 400, "best_of", "not_supported"),
    (COMPLETE, {**GOOD, "temprature": 1}, 400, "temprature", "not_supported"),
    (TALK, {**GOOD}, 400, "prompt", "not_supported"),
    (TALK, {"model": NAME}, 400, "messages", "missing"),
    (TALK, {**CHATTING, "messages": []}, 400, "messages", "invalid_value"),
    (TALK, {**CHATTING, "messages": ["hi"]}, 400, "messages", "invalid_value"),
    (TALK, {**CHATTING, "messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", "invalid_value"),
    (TALK, {**CHATTING, "messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role", "invalid_value"),
    (TALK, {**CHATTING, "messages": [{"role": "user"}]}, 400, "messages[0].content", "missing"),
    (TALK, {**CHATTING, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     400, "messages[0].content", "invalid_value"),
    (TALK, {**CHATTING, "messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, 400,
     "messages[0].tool_calls", "not_supported"),
    (TALK, {**CHATTING, "tools": [{"type": "function"}]}, 400, "tools", "not_supported"),
    (TALK, {**CHATTING, "documents": {"text": "x"}}, 400, "documents", "invalid_value"),
    (TALK, {**CHATTING, "documents": ["x"]}, 400, "documents", "invalid_value"),
    (TALK, {**CHATTING, "chat_template_kwargs": [1]}, 400, "chat_template_kwargs", "invalid_value"),
    (TALK, {**CHATTING, "chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs", "invalid_value"),
    (TALK, {**CHATTING, "response_format": {"type": "json_object"}}, 400, "response_format", "not_supported"),
    (TALK, {**CHATTING, "store": 0}, 400, "store", "not_supported"),
    (TALK, {**CHATTING, "top_logprobs": 2}, 400, "top_logprobs", "invalid_value"),
    (TALK, {**CHATTING, "max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens", "invalid_value"),
    (TALK, {**CHATTING, "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    (TALK, {**CHATTING, "messages": [{"role": "user", "content": "a" * 400}]}, 400, "messages",
     "context_length_exceeded"),
]  # fmt: skip


def check_error(result, status):
    assert result.status == status, result.body
    assert result.headers["content-type"] == "application/json"
    error = result.document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 10 < len(error["message"]) < 500
    for word in ("pydantic", "Traceback", "starlette", "Input should"):
        assert word not in error["message"]
    return error


def test_invalid_requests_name_field_and_rule():
    async def work():
        async with serve_fake_decoder(template=TEMPLATE, body_bytes=3 << 20) as client:
            for path, body, status, param, code in WRONG:
                error = check_error(await client.post(path, body), status)
                assert (error["param"], error["code"]) == (param, code), (body, error)
                assert error["type"] == "invalid_request_error"
            for depth in range(0, 1200, 25):  # printed nowhere
                nested = (
                    b'{"model": "fake", "prompt": "a", "n": ' + b"[" * depth + b"]" * depth + b"}"
                )
                check_error(await client.post(COMPLETE, nested), 400)
            assert (await client.complete(prompt="abc", max_tokens=297)).status == 200

    asyncio.run(work())


PAST = [
    (COMPLETE, {**GOOD, "prompt": "ab<image>"}, "prompt", "prompt: token '<image>' (id 61)"),
    (COMPLETE, {**GOOD, "prompt": ["a", "<image>"]}, "prompt", "prompt[1]: token '<image>' (id 61)"),
    (COMPLETE, {**GOOD, "prompt": [[1], [2, 61]]}, "prompt", "prompt[1]: token '<image>' (id 61)"),
    (COMPLETE, {**GOOD, "prompt": [62]}, "prompt", "prompt: token id 62"),
    (COMPLETE, {**GOOD, "logit_bias": {"61": 1}}, "logit_bias", "token '<image>' (id 61)"),
    (TALK, {**CHATTING, "messages": [{"role": "user", "content": "<image>"}]}, "messages", "chat template: token"),
]  # fmt: skip


def test_token_ids_beyond_the_embedding_are_refused():
    async def work():
        async with serve_fake_decoder(template=TEMPLATE) as client:
            assert client.model.processor.tokenizer.tokenizer.add_special_tokens(["<image>"]) == 1
            for path, body, param, message in PAST:
                error = check_error(await client.post(path, body), 400)
                assert message in error["message"], error
                assert "which has 61 rows" in error["message"]
                assert error["param"] == param
            good = await client.complete(prompt="ab", stop="<image>", max_tokens=3)
            assert good.status == 200  # a string that never comes

    asyncio.run(work())


def test_unsupported_fields_that_change_answers_are_refused():
    async def work():
        async with serve_fake_decoder(template=TEMPLATE) as client:
            expected = (await client.complete(prompt="abc")).text()
            for name, neutral in {**CommonBody.neutral, "audio": [], "guided_json": ""}.items():
                check_error(await client.complete(prompt="abc", **{name: {"some": 1}}), 400)
                for value in (None, neutral):
                    assert (await client.complete(prompt="abc", **{name: value})).text() == expected
            for name in CommonBody.ignored:
                assert (await client.complete(prompt="abc", **{name: "x"})).text() == expected

    asyncio.run(work())


def test_large_bodies_wrong_types_and_paths_are_refused():
    async def work():
        async with serve_fake_decoder(body_bytes=1000) as client:
            large = {**GOOD, "user": "x" * 1000}
            assert check_error(await client.post(COMPLETE, large), 413)["code"] == "body_too_large"
            for headers in ({"content-type": "text/plain"}, {"content-encoding": "gzip"}):
                check_error(await client.post(COMPLETE, GOOD, headers), 415)
            check_error(await client.post("/v1/embeddings", GOOD), 404)
            check_error(await client.get(COMPLETE), 405)
            check_error(await client.get("/v1/models/other"), 404)
            assert (await client.get(f"/v1/models/{NAME}")).document["id"] == NAME
            (listed,) = (await client.get("/v1/models")).document["data"]
            assert (listed["id"], listed["object"], listed["max_model_len"]) == (NAME, "model", 300)
            assert (await client.get("/health")).document == {"status": "ok"}
            client.model.stopping = True
            assert check_error(await client.post(COMPLETE, GOOD), 503)["code"] == "stopping"
            check_error(await client.get("/health"), 503)

    asyncio.run(work())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
PLAUSIBLE = {
    "model": st.just(NAME),
    "prompt": st.text(max_size=20) | st.lists(st.integers(-1, 62), max_size=9)
              | st.lists(st.text(max_size=9), max_size=3),
    "messages": st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool", ""]),
                                                "content": st.text(max_size=9) | JSON}), max_size=3),
    "n": st.integers(-1, 4), "max_tokens": st.integers(-1, 40), "max_completion_tokens": st.integers(-1, 9),
    "temperature": st.floats(-1, 3), "top_p": st.floats(-0.5, 1.5), "min_p": st.floats(-0.5, 1.5),
    "top_k": st.integers(-1, 70), "seed": st.integers(-1, 1 << 64), "frequency_penalty": st.floats(-3, 3),
    "presence_penalty": st.floats(-3, 3), "repetition_penalty": st.floats(-1, 200),
    "logit_bias": st.dictionaries(st.integers(-1, 62).map(str), st.floats(-120, 120), max_size=3),
    "logprobs": st.booleans() | st.integers(-1, 21), "top_logprobs": st.integers(-1, 21), "echo": st.booleans(),
    "stop": st.text(max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3), "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "ignore_eos": st.booleans(), "user": st.text(max_size=3), "tools": st.just([]),
}  # fmt: skip
FIELDS = st.sampled_from(sorted(PLAUSIBLE)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.one_of(PLAUSIBLE[name], PLAUSIBLE[name], PLAUSIBLE[name], JSON)
    )
)
BODIES = st.lists(FIELDS, max_size=5).map(dict)
LIKELY = BODIES.map(lambda body: {"model": NAME, "prompt": "abc", "max_tokens": 9} | body)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(
    st.sampled_from([COMPLETE, COMPLETE, TALK]), st.one_of(LIKELY, LIKELY, BODIES, JSON, st.binary(max_size=30))
), min_size=8, max_size=8))  # fmt: skip
def test_fuzzed_bodies_get_an_answer_or_an_error_document(asked):
    async def work():
        async with serve_fake_decoder() as client:
            for path, body in asked:
                result = await client.post(
                    path, body if isinstance(body, bytes) else json.dumps(body).encode()
                )
                if result.status != 200:
                    assert result.status in {400, 404}, (body, result.body)
                    check_error(result, result.status)
                elif result.headers["content-type"] == "application/json":
                    assert {choice["finish_reason"] for choice in result.document["choices"]} <= {
                        "stop",
                        "length",
                    }
                else:
                    assert result.body.endswith(b"data: [DONE]\n\n")
                    assert not any("error" in event for event in result.events)

    asyncio.run(work())
