"""A served model and its real clients: the openai package and lm-evaluation-harness, beside `quantforge generate`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import quantforge
from quantforge.api.serve import served_model
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import Loaded, load
from quantforge.serving.serve_options import complete_options
from quantforge.settings import Settings
from tests.plain_loop import StopLimits, generate

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

DEMO = Path(__file__).parents[2] / "models/demo"
ASKED = ["Explain json.", "What does os.path.join do?", "Write a function that adds numbers."]


@cache
def demo() -> Loaded:
    return load(DEMO, dtype=torch.float32)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The demo model on a port of this machine."""
    from quantforge.serving.server import create_server, listen, server_url

    listening = listen("127.0.0.1", 0)
    options = complete_options({"served_name": "demo", "concurrent": 8})
    served = served_model(demo(), Settings(), options)
    server = create_server(served)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield server_url(listening)
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()
    counters = served.engine._engine.counters  # its thread has ended
    assert (counters.pages_free, counters.running, counters.waiting) == (counters.pages, 0, 0)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.tokens
def test_greedy_text_is_that_of_generate(client: openai.OpenAI) -> None:
    for raw in (True, False):
        for prompt in ASKED:
            wanted = quantforge.generate(demo(), prompt, max_tokens=24, raw=raw)
            if raw:
                found = client.completions.create(
                    model="demo", prompt=prompt, max_tokens=24, temperature=0
                )
                text = found.choices[0].text
            else:
                found = client.chat.completions.create(
                    model="demo",
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=24,
                    temperature=0,
                )
                text = found.choices[0].message.content
            assert text == wanted.text
            assert found.usage.prompt_tokens == wanted.prompt_tokens
            assert found.choices[0].finish_reason == {"end": "stop"}.get(wanted.stopped, "length")


@pytest.mark.tokens
def test_streams_of_the_client(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="demo", prompt=ASKED, max_tokens=12, n=2, temperature=0.8, seed=3, logprobs=2
    )
    assert len(whole.choices) == 6
    texts = [""] * 6
    for chunk in client.completions.create(
        model="demo", prompt=ASKED, max_tokens=12, n=2, temperature=0.8, seed=3, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    said = [{"role": "user", "content": ASKED[0]}]
    asked = {
        "model": "demo",
        "messages": said,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    answer = client.chat.completions.create(**asked)
    chunks = [
        *client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[-1].usage == answer.usage
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == answer.choices[0].message.content
    told = answer.choices[0].logprobs.content
    assert [one.top_logprobs[0].token for one in told] == [one.token for one in told]
    assert (
        b"".join(bytes(one.bytes) for one in told)
        .decode()
        .startswith(answer.choices[0].message.content)
    )


def test_a_stream_that_is_closed_frees_its_pages(client: openai.OpenAI, url: str) -> None:
    import requests

    def free() -> set[str]:
        text = requests.get(f"{url}/metrics", timeout=60).text
        return {
            line.split()[-1]
            for line in text.splitlines()
            if line.startswith("quantforge_cache_pages")
        }

    stream = client.completions.create(
        model="demo",
        prompt="import",
        max_tokens=900,
        stream=True,
        temperature=1,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    end = time.monotonic() + 60
    while len(free()) > 1:  # as many are free as there are
        assert time.monotonic() < end
        time.sleep(0.05)


def test_errors_are_the_classes_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="demo"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="stop") as found:
        client.completions.create(model="demo", prompt="a", stop="x" * (1 << 20))
    assert (found.value.param, found.value.code) == ("stop", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="room for 1024"):
        client.completions.create(model="demo", prompt="a", max_tokens=2000)
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="demo", prompt="a" * (5 << 20))
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "a"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


@pytest.mark.tokens
def test_lm_evaluation_harness_scores_through_the_server(url: str) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    from lm_eval.api.instance import Instance

    model = completions.LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model="demo", tokenizer=str(DEMO), tokenizer_backend="huggingface",
        max_length=512, batch_size=3,
    )  # fmt: skip
    pairs = [
        ("import os", "\nimport sys"),
        ("def f(x):", "\n    return x"),
        ("The", " quick brown é fox"),
    ]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    found = model.loglikelihood(asked, disable_tqdm=True)
    ends = model.generate_until(
        [Instance("generate_until", {}, ("import os\n", {"until": ["\n"], "max_gen_toks": 12}), 0)],
        disable_tqdm=True,
    )
    tokenizer = model.tokenizer
    asked_ids = tokenizer("import os\n", add_special_tokens=False).input_ids
    (tokens,) = generate(Decoder(demo().model), [asked_ids], StopLimits(12))
    assert ends == [tokenizer.decode(tokens, skip_special_tokens=True).split("\n")[0]]
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        first = len(tokenizer(context, add_special_tokens=False).input_ids)
        ids = tokenizer(context + continuation, add_special_tokens=False).input_ids
        with torch.inference_mode():
            logits = demo().model(torch.tensor([ids])).logits[0, first - 1 : -1].float()
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(ids[first:])[:, None]).sum()
        assert score == pytest.approx(float(wanted), abs=1e-3)
        assert greedy == (logits.argmax(-1).tolist() == ids[first:])
