"""Task files that would run code are refused before any work."""

from __future__ import annotations

import pytest

from quantforge.errors import InputError, RefusedError
from quantforge.evaluation.tasks import Tasks, check, read_task

FINE = """
task: mine
dataset_path: json
dataset_kwargs: {data_files: data.jsonl, trust_remote_code: false}
doc_to_text: "{{question}}"
unsafe_code: no
metric_list:
  - metric: acc
    aggregation: mean
filter_list: [{name: a, filter: [{function: take_first}]}]
"""
CODE = {
    "function": "process_docs: !function utils.f",
    "function in a list": "a: [1, {b: [!function utils.f]}]",
    "function as a key": "? !function utils.f\n: 1",
    "python object": "a: !!python/object/apply:os.system ['true']",
    "python name": "a: !!python/name:os.system",
    "class": "class: my.Task",
    "unsafe": "unsafe_code: true",
    "remote": "dataset_kwargs: {trust_remote_code: True}",
    "script": "dataset_path: ./data/build.py",
    "pickle": "dataset_path: pandas",
    "metric of the hub": "metric_list: [{metric: acc, hf_evaluate: true}]",
    "of one among many": "task: [{task: a, unsafe_code: 1}]",
    "through an anchor": "x: &x {unsafe_code: true}\ny: *x",
}


@pytest.mark.parametrize("name", CODE)
def test_task_files_with_code_are_refused(name, tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text(f"task: mine\n{CODE[name]}\n")
    with pytest.raises(RefusedError, match=r"task\.yaml: \w") as refused:
        check(Tasks((str(file),)))
    assert "--allow-code" in refused.value.hint
    if name != "of one among many":  # its name is the list
        assert read_task(file, allow_code=True) == ("mine", False)


def test_task_files_with_data_and_templates_are_accepted(tmp_path):
    (tmp_path / "base.yaml").write_text(FINE)
    (tmp_path / "task.yaml").write_text("include: base.yaml\ntask: other\n")
    assert read_task(tmp_path / "task.yaml") == ("other", False)
    (tmp_path / "group.yaml").write_text("group: both\ntask: [other, arc_easy]\n")
    assert read_task(tmp_path / "group.yaml") == ("both", True)


@pytest.mark.parametrize("name", ["null", "5", "''", "[a]"])
def test_task_names_must_be_strings(name, tmp_path):
    (tmp_path / "task.yaml").write_text(FINE.replace("task: mine", f"task: {name}"))
    with pytest.raises(InputError, match="has no name"):
        read_task(tmp_path / "task.yaml")


def test_two_task_files_with_one_name_are_refused(tmp_path):
    files = [tmp_path / "a.yaml", tmp_path / "b.yml"]
    for file in files:
        file.write_text(FINE)
    with pytest.raises(InputError, match="two files have one name: mine, mine"):
        check(Tasks(tuple(map(str, files))))


def test_included_task_files_are_checked(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "task.yaml").write_text("include: [sub/one.yaml]\n")
    (tmp_path / "sub" / "one.yaml").write_text("include: two.yaml\n")
    with pytest.raises(InputError, match=r"two\.yaml"):
        read_task(tmp_path / "task.yaml")
    (tmp_path / "sub" / "two.yaml").write_text("include: one.yaml\nx: !function utils.f\n")
    with pytest.raises(RefusedError, match=r"two\.yaml: line 2: !function"):
        read_task(tmp_path / "task.yaml")


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\0", "[" * 50_000, "a: " + "{x: " * 200])
def test_invalid_yaml_is_refused_at_once(text, tmp_path):
    (tmp_path / "task.yaml").write_text(text)
    with pytest.raises(InputError, match="not YAML"):
        read_task(tmp_path / "task.yaml")


def test_nested_yaml_aliases_are_visited_once(tmp_path):
    levels = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40))
    (tmp_path / "task.yaml").write_text(f"task: mine\na0: &a0 [x]\n{levels}\n")
    read_task(tmp_path / "task.yaml")
