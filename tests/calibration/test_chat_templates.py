"""Chat templates in the layouts in which models are published, as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quantforge_calibration.chat import load_chat_template
from quantforge_calibration.chat_templates import (
    OLD_FILE,
    PROCESSOR_CONFIG,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    read_templates,
)
from quantforge_calibration.conversations import Conversation
from tests.calibration.support import TALK, refused, write_model

EXTRA = "additional_chat_templates/tool_use.jinja"
ONE, NAMED = "C", [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


def write(model: Path, files: dict[str, Any]) -> Path:
    """Write templates: text for files of one template, the value of the key for others."""
    for name, value in files.items():
        place = model / name
        place.parent.mkdir(exist_ok=True)
        if name.endswith(".jinja"):
            place.write_text(value)
        else:
            before = json.loads(place.read_text()) if place.exists() else {}
            place.write_text(json.dumps({**before, "chat_template": value}))
    return model


@pytest.mark.parametrize(
    ("files", "notes"),
    [
        ({TEMPLATE_FILE: "F"}, []),
        ({TEMPLATE_FILE: "F", EXTRA: "X"}, []),
        ({TOKENIZER_CONFIG: ONE}, []),
        ({TOKENIZER_CONFIG: NAMED}, []),
        ({TOKENIZER_CONFIG: {"default": "D", "rag": "R"}}, []),
        ({TOKENIZER_CONFIG: [*NAMED, {"name": "default", "template": "L"}]}, ["'default'"]),
        (
            {TOKENIZER_CONFIG: NAMED, TEMPLATE_FILE: "F"},
            ["tokenizer_config.json", "default, tool_use"],
        ),
        ({TOKENIZER_CONFIG: NAMED, TEMPLATE_FILE: "D\n", EXTRA: "T"}, []),
        ({TOKENIZER_CONFIG: ONE, EXTRA: "X"}, ["tokenizer_config.json", "default"]),
        ({TEMPLATE_FILE: "F", "additional_chat_templates/default.jinja": "G"}, ["'default'"]),
        ({TEMPLATE_FILE: "F", "additional_chat_templates/a-b c.jinja": "G"}, []),
        ({TEMPLATE_FILE: "F", "additional_chat_templates/x.txt": "G"}, []),
        ({TEMPLATE_FILE: ""}, []),
        (
            {TEMPLATE_FILE: "F", OLD_FILE: "J", PROCESSOR_CONFIG: "P"},
            ["chat_template.json", "processor_config"],
        ),
        ({TOKENIZER_CONFIG: None, EXTRA: "X"}, []),
        (
            {TOKENIZER_CONFIG: [{"name": "default"}], TEMPLATE_FILE: "F"},
            ["lacks a name", "is not used"],
        ),
        ({}, []),
    ],
)
def test_templates_are_those_of_transformers_tokenizers(tmp_path, files, notes):
    model = write(write_model(tmp_path / "m", eos_token="</s>"), files)
    theirs = PreTrainedTokenizerFast.from_pretrained(model).chat_template
    theirs = {"default": theirs} if isinstance(theirs, str) else theirs or {}
    found = read_templates(model)
    assert found.templates == theirs
    assert bool(found.notes) == bool(notes)
    for part in notes:
        assert part in "\n".join(found.notes)


def test_templates_of_processors_count_where_tokenizers_have_none(tmp_path):
    model = write(write_model(tmp_path / "m", eos_token="</s>"), {PROCESSOR_CONFIG: "P"})
    assert read_templates(model).templates == {"default": "P"}
    write(model, {OLD_FILE: "J"})
    assert read_templates(model).templates == {"default": "J"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({TEMPLATE_FILE: "F", EXTRA: "X"}, "F"),
        ({TEMPLATE_FILE: "F", OLD_FILE: "J"}, "J"),
        ({OLD_FILE: "J", PROCESSOR_CONFIG: "P", TOKENIZER_CONFIG: "C"}, "P"),
    ],
)
def test_rows_with_images_take_the_template_of_the_processor(tmp_path, files, expected):
    """The order is that of ``ProcessorMixin.get_processor_dict`` in transformers 5."""
    model = write(write_model(tmp_path / "m", eos_token="</s>"), files)
    assert read_templates(model, processor=True).templates == {"default": expected}


def test_an_older_file_of_a_processor_beside_named_files_is_refused_as_transformers_does(tmp_path):
    model = write(write_model(tmp_path / "m", eos_token="</s>"), {OLD_FILE: "J", EXTRA: "X"})
    refused(lambda: read_templates(model, processor=True), "contradict each other", "rename")
    assert read_templates(model).templates == {"tool_use": "X"}


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ([{"name": "default"}], "chat_template[0] lacks a name or a template"),
        (["text"], "chat_template[0] lacks"),
        ([{"name": "default", "template": 3}], "'default' with a template that is int"),
        (7, "a template that is int"),
    ],
)
def test_what_is_no_template_is_refused(tmp_path, value, part):
    model = write(write_model(tmp_path / "m", eos_token="</s>"), {TOKENIZER_CONFIG: value})
    refused(lambda: read_templates(model), "tokenizer_config.json", part)


def test_a_template_that_is_not_utf_8_is_refused(tmp_path):
    model = write_model(tmp_path / "m", eos_token="</s>")
    (model / TEMPLATE_FILE).write_bytes(b"\xff")
    refused(lambda: read_templates(model), "chat_template.jinja cannot be read")


def test_conversations_with_tools_are_rendered_by_the_template_for_tools(tmp_path):
    talks = [Conversation(TALK), Conversation(TALK, tools=[{"name": "f"}]), Conversation(TALK, [])]
    for named, expected in ((NAMED, ["D", "T", "T"]), (NAMED[:1], ["D", "D", "D"])):
        model = write(
            write_model(tmp_path / str(len(named)), eos_token="</s>"), {TOKENIZER_CONFIG: named}
        )
        template = load_chat_template(model)
        assert template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
        assert [template.render(one) for one in talks] == expected
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        theirs = [
            tokenizer.apply_chat_template(list(one.messages), tools=one.tools, tokenize=False)
            for one in talks
        ]
        assert theirs == expected


def test_models_without_a_template_that_renders_say_so(tmp_path):
    model = write_model(tmp_path / "m", eos_token="</s>")
    refused(lambda: load_chat_template(model), "no chat template")
    write(model, {EXTRA: "X"})
    talk = Conversation(TALK)
    refused(lambda: load_chat_template(model).render(talk), "tool_use and no default")
    write(model, {TEMPLATE_FILE: "\n"})
    refused(lambda: load_chat_template(model).render(talk), "default of the model is empty")
