"""What a row holds beside its messages reaches the chat template as transformers gives it."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quantforge_calibration.chat import load_chat_template
from quantforge_calibration.draw import RowRequest, draw
from quantforge_calibration.readers import UnusedColumns
from quantforge_calibration.tokenizer import load_tokenizer
from tests.calibration.support import TALK, read, refused, write_model

TOOLS = [
    {
        "type": "function",
        "function": {"name": "sun", "description": "é < 3", "parameters": {"b": None, "a": [1.5]}},
    }
]
DOCUMENTS = [{"title": "t", "text": "one"}, {"title": "u", "text": "two"}]
TEMPLATE = (
    "{{ bos_token }}|{{ eos_token }}|{% if tools is not none %}{{ tools | tojson(indent=1) }}"
    "{{ tools | tojson(sort_keys=true, separators=(',', ':')) }}{% endif %}"
    "{% for d in documents or [] %}[{{ d.title }}: {{ d['text'] }}]{% endfor %}"
    "{% if enable_thinking is defined %}thinks: {{ enable_thinking }} {{ levels }}{% endif %}"
    "{% for m in messages %}{{ m | tojson }}{{ m.thinking }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}answer:{% endif %}"
)
CALLS = [
    {"role": "user", "content": "sun?", "tool_calls": None},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]},
    {"role": "tool", "content": "5", "name": "sun"},
    {"role": "assistant", "content": "five", "reasoning": "thought"},
]
ROWS: list[dict[str, Any]] = [
    {"messages": TALK},
    {"messages": CALLS, "tools": TOOLS},
    {"messages": TALK, "tools": []},
    {"messages": TALK, "tools": None, "documents": None, "chat_template_kwargs": None},
    {"messages": TALK, "documents": DOCUMENTS},
    {
        "messages": TALK,
        "chat_template_kwargs": {"enable_thinking": False, "levels": [1, None], "bos_token": "B"},
    },
    {"messages": CALLS, "tools": TOOLS, "documents": DOCUMENTS,
     "chat_template_kwargs": {"add_generation_prompt": True, "unknown": 1}},
]  # fmt: skip


def rows_as_strings() -> list[dict[str, Any]]:
    """The same rows with every field as a JSON string, as tables with one type for each column have them."""
    return [{key: json.dumps(value) for key, value in row.items()} for row in ROWS]


@pytest.fixture
def chatting(tmp_path):
    model = write_model(tmp_path / "chatting", eos_token="</s>")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def rendered_by_transformers(model) -> list[str]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            row["messages"],
            tools=row.get("tools"),
            documents=row.get("documents"),
            tokenize=False,
            **(row.get("chat_template_kwargs") or {}),
        )
        for row in ROWS
    ]


@pytest.mark.parametrize("rows", [ROWS, rows_as_strings()], ids=["values", "JSON strings"])
def test_rows_are_rendered_as_transformers_renders_them(tmp_path, chatting, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(str(path), chat=load_chat_template(chatting))
    assert found == rendered_by_transformers(chatting)


def test_rows_of_parquet_and_of_the_hub_are_rendered_alike(tmp_path, chatting, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    template = load_chat_template(chatting)
    path = tmp_path / "rows.parquet"
    names = dict.fromkeys(name for row in ROWS for name in row)
    columns = {name: [row.get(name) for row in rows_as_strings()] for name in names}
    parquet.write_table(pyarrow.table(columns), path)
    assert read(str(path), chat=template) == rendered_by_transformers(chatting)
    kwargs = pyarrow.array([[("enable_thinking", True)]], pyarrow.map_("string", pyarrow.bool_()))
    table = pyarrow.table({"messages": [TALK], "chat_template_kwargs": kwargs})
    parquet.write_table(table, path)
    assert "thinks: True" in read(str(path), chat=template)[0]
    loader = SimpleNamespace(load_dataset=lambda *_, **__: iter(ROWS))
    monkeypatch.setitem(sys.modules, "datasets", loader)
    assert read("org/name:train", chat=template) == rendered_by_transformers(chatting)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"tools": {"type": "function"}}, ["tools is dict", "a list of objects"]),
        ({"tools": 3}, ["tools is int"]),
        ({"tools": [["f"]]}, ["tools[0] is list", "an object"]),
        ({"tools": "[{]"}, ["tools is a string that is not JSON"]),
        ({"tools": "[" * 99_999}, ["tools is a string that is not JSON"]),
        ({"tools": ["sun"]}, ["tools[0] is a string that is not JSON"]),
        ({"documents": "text"}, ["documents is a string that is not JSON"]),
        ({"documents": [1]}, ["documents[0] is int"]),
        ({"chat_template_kwargs": [1]}, ["chat_template_kwargs is list", "an object"]),
        ({"chat_template_kwargs": {"tools": []}}, ["has 'tools'", "beside messages"]),
        ({"chat_template_kwargs": {"tokenize": True}}, ["has 'tokenize'"]),
        ({"messages": {"role": "user"}}, ["messages is dict"]),
        ({"messages": [3]}, ["messages[0] is int"]),
    ],
)
def test_malformed_fields_name_the_file_and_the_row(tmp_path, chatting, fields, parts):
    path = tmp_path / "rows.jsonl"
    rows = ({"messages": TALK}, {"messages": TALK, **fields})
    path.write_text("\n".join(map(json.dumps, rows)))
    template = load_chat_template(chatting)
    refused(lambda: read(str(path), chat=template), f"{path}, line 2", *parts)


def test_a_row_that_the_template_refuses_is_named(tmp_path, chatting):
    (chatting / "chat_template.jinja").write_text("{{ raise_exception('x') if documents }}a")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    template = load_chat_template(chatting)
    refused(lambda: read(str(path), chat=template), f"{path}, line 5: the chat template cannot")


def test_rows_without_messages_have_text_or_nothing(tmp_path, chatting):
    path = tmp_path / "rows.jsonl"
    rows = ({"messages": []}, {"messages": None, "text": "plain"}, {"messages": "", "tools": []})
    path.write_text("\n".join(map(json.dumps, rows)))
    template = load_chat_template(chatting)
    assert read(str(path), chat=template) == ["plain"]


def test_columns_that_nothing_uses_are_listed_once(tmp_path, chatting):
    (chatting / "chat_template.jinja").write_text("{{ messages }}{{ tools }}{{ mydocuments }}")
    template = load_chat_template(chatting)
    for name in ("a.jsonl", "b.jsonl"):
        row = {"id": 1, "source": "x", "empty": None, **ROWS[-1]}
        (tmp_path / name).write_text(f"{json.dumps(row)}\n" * 3)
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "t", "messages": None, "tools": TOOLS}))
    unused = UnusedColumns()
    read(str(tmp_path), chat=template, unused=unused)
    assert unused.describe() == (
        "columns that are not used: add_generation_prompt, documents, id, source, unknown in a.jsonl"
        " and 1 more files; tools in c.jsonl"
    )
    unused = UnusedColumns()
    read(f"{tmp_path / 'c.jsonl'}:text", unused=unused)
    assert unused.describe() == "columns that are not used: tools in c.jsonl"
    assert UnusedColumns().describe() == ""


def test_columns_of_a_table_that_are_not_read_are_listed(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a"], "n": [1]}), tmp_path / "a.parquet")
    unused = UnusedColumns()
    read(str(tmp_path / "a.parquet"), unused=unused)
    assert unused.by_file == {"a.parquet": {"n"}}


def test_rows_with_tools_make_other_ids_than_rows_without(tmp_path, chatting):
    digests = set()
    for name, extra in (("with", {"tools": TOOLS}), ("without", {})):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(f"{json.dumps({'messages': TALK, **extra})}\n" * 9)
        chat = load_chat_template(chatting)
        sample = draw(RowRequest(str(path), rows=2, length=32), load_tokenizer(chatting), chat=chat)
        digests.add(sample.report.digest)
    assert len(digests) == 2
