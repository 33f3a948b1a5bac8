"""`generate` and `serve`: sampling, speculation and caches, and the answers and errors of the server."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.acceptance.support import (
    DEMO_GPTQ,
    TIMEOUT_SECONDS,
    Make,
    Model,
    Running,
    Start,
    ask,
    command,
    document,
)
from tests.thorough import thorough_case

PROMPT = "import os, json, json, json"


@pytest.fixture(scope="module")
def result(make: Make) -> Path:
    return make("quantize", "demo", DEMO_GPTQ).path


def answer(model: Path, *words: object) -> Any:
    (result,) = document("generate", model, PROMPT, "--raw", words)["answers"]
    return result


@pytest.fixture(scope="module")
def plain(result: Path) -> Any:
    """The answer of greedy decoding."""
    return answer(result, "--max-tokens 24")


def test_log_probabilities_match_transformers(model: Model) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    generated = answer(model("demo"), "--max-tokens 4 --logprobs 3")
    (choice,) = generated["choices"]
    ids = AutoTokenizer.from_pretrained(model("demo"))(PROMPT, return_tensors="pt")["input_ids"]
    network = AutoModelForCausalLM.from_pretrained(model("demo"), dtype=torch.float32)
    whole = torch.cat((ids, torch.tensor([choice["tokens"]])), 1)
    with torch.inference_mode():
        logs = network(whole).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    for token, log in zip(choice["logprobs"], logs, strict=True):
        assert token["logprob"] == pytest.approx(float(log[token["id"]]), abs=0.05)
        assert token["id"] == int(log.argmax())
        assert token["top_logprobs"][0]["id"] == token["id"]
        assert len(token["top_logprobs"]) == 3


@pytest.mark.parametrize(
    "words",
    ["--draft ngram", "--draft lookahead", thorough_case("--draft int3"), "--draft DEMO",
     "--draft int3 --draft-tree 2x1"],
)  # fmt: skip
def test_speculation_changes_no_token(words: str, model: Model, result: Path, plain: Any) -> None:
    guessed = answer(
        result,
        "--max-tokens 24",
        words.replace("DEMO", str(model("demo"))),
    )
    assert guessed["tokens"] == plain["tokens"]
    assert guessed["speculation"] is not None
    assert plain["speculation"] is None


def test_sampling_is_deterministic_for_a_seed(result: Path) -> None:
    words = "--temperature 1.5 --max-tokens 16"
    first, again, other = (answer(result, words, "--seed", seed)["tokens"] for seed in (3, 3, 4))
    assert first == again != other
    several = answer(result, words, "--seed 3 -n 2")
    assert len(several["choices"]) == 2
    assert several["choices"][0]["tokens"] != several["choices"][1]["tokens"]
    greedy = answer(result, "--max-tokens 16")["tokens"]
    assert answer(result, words, "--top-k 1")["tokens"] == greedy
    assert answer(result, words, "--top-p 0.0001")["tokens"] == greedy
    assert answer(result, words, "--min-p 1")["tokens"] == greedy


def test_logit_bias_bans_tokens_and_stop_texts_end_answers(result: Path) -> None:
    plain = answer(result, "--max-tokens 16")
    banned = answer(result, "--max-tokens 16 --logit-bias", f"{plain['tokens'][0]}=-100")
    assert banned["tokens"][0] != plain["tokens"][0]
    text = plain["text"].strip()[2:4]
    stopped = answer(result, "--max-tokens 16 --stop", text)
    assert (stopped["finish_reason"], stopped["choices"][0]["stop_sequence"]) == ("stop", text)
    assert plain["text"].startswith(stopped["text"])
    assert text not in stopped["text"]
    included = answer(result, "--max-tokens 16 --stop", text, "--include-stop")
    assert included["text"] == stopped["text"] + text


def test_repetition_penalties_change_the_answer(result: Path, plain: Any) -> None:
    for words in (
        "--repetition-penalty 2",
        "--frequency-penalty 2",
        "--presence-penalty 2",
    ):
        assert answer(result, "--max-tokens 24", words)["tokens"] != plain["tokens"], words


def test_beam_search_finds_a_likelier_text(result: Path) -> None:
    (greedy,) = answer(result, "--max-tokens 8 --logprobs 0")["choices"]
    words = "--max-tokens 8 --beams 4 --length-penalty 0 -n 2"
    best, second = answer(result, words)["choices"]
    assert best["score"] >= second["score"]
    assert best["score"] >= sum(token["logprob"] for token in greedy["logprobs"]) - 0.05


def test_compare_adds_a_model_and_stdin_gives_the_prompt(model: Model, result: Path) -> None:
    both = document("generate", result, PROMPT, "--raw --max-tokens 4 --compare", model("demo"))[
        "answers"
    ]
    assert [entry["model"] for entry in both] == [result.name, "demo"] or len(both) == 2
    piped = command("generate", result, "--raw --max-tokens 4 --json", stdin=PROMPT)
    assert piped.document["answers"][0]["tokens"] == both[0]["tokens"]


def test_the_chat_template_is_applied_unless_raw(result: Path) -> None:
    chat = document("generate", result, "Explain json.", "--max-tokens 4")["answers"][0]
    raw = document("generate", result, "Explain json.", "--max-tokens 4 --raw")["answers"][0]
    assert (chat["chat_template"], raw["chat_template"]) == (True, False)
    assert chat["prompt_tokens"] > raw["prompt_tokens"]


@pytest.mark.parametrize("kind", [thorough_case("int8"), "fp8", "k=int8,v=int4"])
def test_a_quantized_cache_keeps_log_probabilities_close(kind: str, result: Path) -> None:
    plain, smaller = (
        answer(result, "--max-tokens 4 --logprobs 0", words)["choices"][0]
        for words in ((), ("--cache", kind))
    )
    logprobs = [choice["logprobs"][0]["logprob"] for choice in (plain, smaller)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.2)


@pytest.mark.parametrize("family", ["hybrid", thorough_case("mixture"), thorough_case("gpt2")])
def test_every_family_generates_text(family: str, model: Model) -> None:
    generated = document("generate", model(family), "the weights", "--raw --max-tokens 4")[
        "answers"
    ][0]
    assert len(generated["tokens"]) == 4 or generated["finish_reason"] == "end"


def test_invalid_generation_options_are_refused(result: Path) -> None:
    for words in ("--temperature -1", "--top-p 0", "--logit-bias x=1", "--cache int5",
                  "--beams 2 --temperature 1", "--draft ./absent"):  # fmt: skip
        ended = command("generate", result, PROMPT, words)
        assert ended.code in {2, 3}, words
        option, value, *_ = words.split()
        assert option.removeprefix("--") in ended.err or value in ended.err, words


# ---- the server


@pytest.fixture(scope="module")
def server(result: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    words = "--port 0 --served-name mine --max-body 1 --draft ngram --json"
    running = Running(tmp_path_factory.mktemp("server"), "serve", result, words)
    try:
        running.until(lambda: running.out.endswith("}\n"))
        yield json.loads(running.out)
    finally:
        running.kill()


def test_the_server_lists_its_model_health_and_metrics(server: Any) -> None:
    assert (server["model"], server["chat"], server["context"]) == ("mine", True, 1024)
    status, listed = ask(f"{server['url']}/v1/models")
    assert (status, [entry["id"] for entry in listed["data"]]) == (200, ["mine"])
    assert ask(f"{server['url']}/v1/models/mine")[0] == 200
    assert ask(f"{server['url']}/health")[0] == 200
    status, figures = ask(f"{server['url']}/metrics")
    assert status == 200
    assert "# TYPE" in figures


def test_a_server_completion_matches_generate(server: Any, result: Path) -> None:
    alone = answer(result, "--max-tokens 12")
    request = {"model": "mine", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    status, response = ask(f"{server['url']}/v1/completions", request)
    (choice,) = response["choices"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, alone["text"], "length")
    assert response["usage"]["completion_tokens"] == 12
    assert len(choice["logprobs"]["token_logprobs"]) == 12
    both = ask(f"{server['url']}/v1/completions", {**request, "prompt": [PROMPT, PROMPT], "n": 2})[
        1
    ]
    assert [entry["text"] for entry in both["choices"]] == [alone["text"]] * 4


def test_a_streamed_chat_matches_the_whole_answer(server: Any) -> None:
    messages = [{"role": "user", "content": "Explain json."}]
    request = {"model": "mine", "messages": messages, "max_tokens": 8, "temperature": 0}
    status, whole = ask(f"{server['url']}/v1/chat/completions", request)
    message = whole["choices"][0]["message"]
    assert (status, message["role"]) == (200, "assistant")
    status, text = ask(f"{server['url']}/v1/chat/completions", {**request, "stream": True})
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert (status, events[-1]) == (200, "[DONE]")
    pieces = [
        json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]
    ]
    assert "".join(pieces) == message["content"]


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PLAIN = {"model": "mine", "prompt": "x", "max_tokens": 2}
REFUSED: list[tuple[int, str, object, str]] = [
    (400, COMPLETIONS, b"{", ""),
    (400, COMPLETIONS, {**PLAIN, "temperature": -1}, "temperature"),
    (400, COMPLETIONS, {**PLAIN, "unheard_of": 1}, "unheard_of"),
    (400, COMPLETIONS, {**PLAIN, "suffix": "y"}, "suffix"),
    (400, COMPLETIONS, {**PLAIN, "prompt": "x " * 2000}, ""),
    (
        400,
        CHATS,
        {"model": "mine", "messages": [{"role": "user", "content": "x"}], "tools": [{}]},
        "tools",
    ),
    (404, COMPLETIONS, {**PLAIN, "model": "other"}, ""),
    (404, "/v1/nothing", PLAIN, ""),
    (405, COMPLETIONS, None, ""),
    (413, COMPLETIONS, {**PLAIN, "prompt": "x" * 2_000_000}, ""),
]


def test_an_invalid_request_gets_a_json_error(server: Any) -> None:
    for status, path, body, param in REFUSED:
        response_status, response = ask(f"{server['url']}{path}", body)
        assert response_status == status, (path, param)
        assert response["error"]["message"]
        assert (response["error"]["param"] or "") == param or not param


def test_a_text_plain_request_is_refused(server: Any) -> None:
    headers = {"Content-Type": "text/plain"}
    assert ask(f"{server['url']}{COMPLETIONS}", PLAIN, **headers)[0] == 415


def test_bench_measures_a_server(server: Any, result: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"at": 0.01 * number, "prompt_tokens": 8, "new_tokens": 3} for number in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "--url",
        f"{server['url']}/v1",
        "--trace",
        trace,
        "--slo ttft=60s,tpot=60s --price 2/h",
    )
    (row,) = document("bench", result, words)["rows"]
    figures = row["metrics"]
    assert (figures["requests"], figures["failed"], figures["new_tokens"]) == (4, 0, 12)
    assert figures["slo_attainment"] == 1.0
    assert figures["cost"] > 0


def test_bench_fails_without_a_server(result: Path) -> None:
    ended = command("bench", result, "--url http://127.0.0.1:9/v1 --requests 1")
    assert ended.code in {3, 5}


def stream(url: str, tokens: int) -> Any:
    """Request a streamed answer, and return the connection after the first piece."""
    body = {**PLAIN, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}{COMPLETIONS}", json.dumps(body).encode(), headers)
    answer = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    assert answer.readline().startswith(b"data: ")
    return answer


def test_sigterm_lets_a_running_answer_finish(result: Path, start: Start) -> None:
    """The server prints its address and a `curl` command that works."""
    server = start("serve", result, "--port 0 --served-name mine")
    server.until(lambda: server.out.count("\n") >= 2)
    first, second = server.out.splitlines()[:2]
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+", first)
    words = shlex.split(second)
    assert words[0] == "curl"
    assert ask(words[1], json.loads(words[-1]))[0] == 200
    with stream(url, 40) as answer:
        server.send(signal.SIGTERM)
        pieces = [line for line in answer.read().splitlines() if line]
    assert pieces[-1] == b"data: [DONE]"
    assert server.ended().code == 0


def test_a_second_signal_stops_the_server_at_once(result: Path, start: Start) -> None:
    server = start("serve", result, "--port 0 --served-name mine --json")
    server.until(lambda: server.out.endswith("}\n"))
    url = json.loads(server.out)["url"]
    with stream(url, 1000) as answer:
        server.send(signal.SIGINT)
        time.sleep(0.1)
        server.send(signal.SIGINT)
        with suppress(OSError, http.client.HTTPException):  # the connection may be cut
            assert b"[DONE]" not in answer.read()
    assert server.ended().code == 0


def test_serve_refuses_an_unsupported_architecture(model: Model) -> None:
    assert command("serve", model("hybrid"), "--port 0").code == 4
