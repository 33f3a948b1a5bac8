"""Tokenizers, chat templates in their sandbox, and a draw as a whole."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest
import torch
from tokenizers import processors

from quantforge_calibration.draw import RowRequest, draw
from quantforge_calibration.tokenizer import load_tokenizer
from tests.calibration.support import (
    CHATML,
    TALK,
    bos_template,
    chat_template,
    refused,
    talks,
    write_model,
)


def test_tokenizer_without_bos_does_not_truncate_and_knows_eos(model):
    tokenizer = load_tokenizer(model)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 1)
    assert len(tokenizer.encode("eight by")) == 8
    assert tokenizer.encode("<s>a")[0] == 0  # without a BOS of its own the text is left alone


@pytest.mark.parametrize("by", ["post-processor", "config"])
def test_bos_is_what_the_tokenizer_adds(tmp_path, by):
    in_file = bos_template() if by == "post-processor" else None
    path = write_model(tmp_path / "m", in_file, **({} if in_file else {"add_bos_token": True}))
    tokenizer = load_tokenizer(path)
    assert tokenizer.bos_id == 0
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")
    assert 0 not in tokenizer.encode("a")


def test_a_trailing_token_of_the_post_processor_is_no_bos(tmp_path):
    after = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    assert load_tokenizer(write_model(tmp_path / "m", after)).bos_id is None


def test_tokenizers_that_cannot_be_loaded(tmp_path, model):
    refused(lambda: load_tokenizer(tmp_path), "no tokenizer.json", "save_pretrained")
    (model / "tokenizer_config.json").write_text("{")
    refused(lambda: load_tokenizer(model), "tokenizer_config.json: not JSON")
    (model / "tokenizer_config.json").write_text("[]")
    refused(lambda: load_tokenizer(model), "not a JSON object")
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    refused(lambda: load_tokenizer(model), "not a tokenizer")


def test_a_panic_of_the_library_is_an_error_like_others_and_silent(model, capfd):
    data = json.loads((model / "tokenizer.json").read_text())
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    data["model"] = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": [["a", "b"]],
        "continuing_subword_prefix": "###",
    }
    (model / "tokenizer.json").write_text(json.dumps(data))
    message = refused(lambda: load_tokenizer(model), "is not a tokenizer").message
    assert re.search("slice|byte index", message)  # of old releases of tokenizers
    assert capfd.readouterr().err == ""
    print("heard", file=sys.stderr)
    assert capfd.readouterr().err == "heard\n"


@pytest.mark.parametrize(
    ("pattern", "seconds", "part"),
    [(r"(a+)+$", 60, "retry-limit"), (r"(?:a*a*(?<=b))", 0.5, "not done after 1 s")],
)
def test_a_pattern_that_takes_for_ever_is_given_up(model, monkeypatch, pattern, seconds, part):
    monkeypatch.setattr("quantforge_calibration.tokenizer.TIMEOUT_SECONDS", seconds)
    data = json.loads((model / "tokenizer.json").read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    data["pre_tokenizer"] = split
    (model / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load_tokenizer(model)
    assert tokenizer.encode("abc")
    start = time.monotonic()
    text = "a" * 1200 + "!"  # the second takes the cube of its length, seconds
    refused(lambda: tokenizer.encode(text), part, "pre_tokenizer")
    assert time.monotonic() - start < 60
    assert tokenizer.encode("abc")


def test_render_with_what_published_templates_use():
    text = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') }}"
    )
    talk = [{"role": "system", "content": "x"}, {"role": "user", "content": "é"}]
    template = chat_template(text, {"bos_token": "<s>"})
    assert [template.render(one) for one in talks(talk, TALK)] == [
        '<s>"é"2024',
        '<s>"hi""hello"2024',
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "SecurityError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include '/etc/passwd' %}", "rendered"),
    ],
)
def test_hostile_templates_are_stopped(text, part):
    refused(lambda: chat_template(text, {}).render(*talks(TALK)), part)


def test_draw_builtin_gives_fewer_rows_and_says_so(model):
    sample = draw(RowRequest(rows=4000, length=64), load_tokenizer(model))
    assert sample.report.rows < sample.report.rows_requested == 4000
    assert sample.report.rows == len(sample.ids)
    assert sample.report.sources == ("builtin",)
    assert sample.report.duplicated_rows == 0


def test_draw_is_repeatable_and_follows_the_seed(model):
    tokenizer = load_tokenizer(model)
    first, again, other = (
        draw(RowRequest(rows=8, length=32, seed=seed), tokenizer).report.digest
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_draw_a_user_file_that_is_too_short_is_an_error(tmp_path, model):
    path = tmp_path / "short.txt"
    path.write_text("only a little")
    refused(
        lambda: draw(RowRequest(str(path), 4, 32), load_tokenizer(model)), "13 tokens", "need 128"
    )
    sample = draw(RowRequest(str(path), 4, 6, allow_fewer=True), load_tokenizer(model))
    assert (sample.report.rows, sample.report.tokens_truncated) == (2, 1)


def test_draw_a_mixture_with_rows_of_the_model(tmp_path, model):
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh" * 100)
    request = RowRequest(f"{path}=2,builtin=1,self=1", rows=8, length=16)
    own = torch.full((2, 16), 5)
    sample = draw(
        request, load_tokenizer(model), generate_rows=lambda rows, length: own[:rows, :length]
    )
    assert sample.ids.shape == (8, 16)
    assert sample.report.sources == (str(path), "builtin", "self")
    assert torch.equal(sample.ids[-2:], own)
    assert sample.report.duplicated_rows == 4  # the file repeats every 16 ids
    refused(lambda: draw(request, load_tokenizer(model)), "'self' needs a model")


def test_draw_renders_messages_only_when_asked(tmp_path, model):
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": TALK}, {"text": "plain"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = load_tokenizer(model)
    request = RowRequest(str(path), rows=1, length=70, choose="first")
    refused(lambda: draw(request, tokenizer), "chat_template = true")
    sample = draw(request, tokenizer, chat=chat_template(CHATML, {}))
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    expected = [*tokenizer.encode(text), 1, *tokenizer.encode("plain")]
    assert sample.ids[0].tolist() == expected[:70]
