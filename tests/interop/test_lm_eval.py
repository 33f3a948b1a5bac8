"""lm-evaluation-harness, where it is installed, runs local tasks through our runtime, and agrees with itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from quantforge.cli.app import app
from quantforge.errors import InputError, RefusedError
from quantforge.evaluation import tasks as task_library
from quantforge.evaluation.task_model import TaskModel, disjoint_windows
from quantforge.evaluation.tasks import Tasks, check, run
from quantforge.runtime.load import load
from tests.evaluations import load_tokenizer

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: multiple_choice
test_split: train
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: ["model", "grid", "row"]
metric_list:
  - metric: acc
"""
TEXTS = """
task: local_texts
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: loglikelihood_rolling
test_split: train
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: word_perplexity
"""
WRITE = """
task: local_write
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: generate_until
test_split: train
doc_to_text: "{{{{question}}}}"
doc_to_target: "model"
generation_kwargs:
  until: ["."]
  max_gen_toks: 5
  do_sample: false
metric_list:
  - metric: exact_match
"""


@pytest.fixture
def indexed(monkeypatch):
    """Index one folder of the library's tasks: all take ten seconds."""
    from lm_eval import tasks
    from lm_eval.tasks._index import TaskIndex

    build, folder = TaskIndex.build, Path(tasks.__file__).parent / "arc"
    monkeypatch.setattr(
        TaskIndex, "build", staticmethod(lambda paths: build([folder] if paths else []))
    )


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Three task files on local data; nothing may be asked of the hub."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [
        {"question": "the weights of the", "answer": 0}, {"question": "the nearest point of the", "answer": 1},
        {"question": "row by", "answer": 2}, {"question": "rounded to the nearest point of the", "answer": 1},
    ]  # fmt: skip
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = []
    for name, text in (("choice", CHOICE), ("texts", TEXTS), ("write", WRITE)):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(text.format(data=data))
    return [str(file) for file in files], rows


def test_local_tasks(tiny, tasks):
    files, rows = tasks
    answers = TaskModel(load(tiny("llama")).model, load_tokenizer(tiny("llama")), 64)
    found = run(answers, Tasks(tuple(files)))
    choices = [" model", " grid", " row"]
    right = 0
    for row in rows:
        values = [
            v for v, _ in answers.score_continuations([(row["question"], c) for c in choices])
        ]
        right += values.index(max(values)) == row["answer"]
    assert found["local_choice"]["acc"] == pytest.approx(right / len(rows))
    words = sum(len(row["question"].split()) for row in rows)
    total = sum(answers.score_texts([row["question"] for row in rows]))
    from math import exp

    assert found["local_texts"]["word_perplexity"] == pytest.approx(exp(-total / words))
    assert 0 <= found["local_write"]["exact_match"] <= 1


@pytest.mark.usefixtures("indexed")
@pytest.mark.parametrize(
    ("name", "hint"), [("local_tesk", "did you mean 'local_texts'?"), ("zzz*", "lm-eval ls tasks")]
)
def test_a_misspelled_name_is_refused(tasks, name, hint):
    with pytest.raises(InputError, match="no task") as refusal:
        check(Tasks((*tasks[0], name)))
    assert hint in str(refusal.value.hint)


@pytest.mark.usefixtures("indexed")
def test_a_pattern_that_means_thousands_of_tasks_is_refused(tasks, monkeypatch):
    monkeypatch.setattr(task_library, "MAX_TASKS", 2)
    with pytest.raises(InputError, match="means more than 2 tasks"):
        check(Tasks((*tasks[0], "local_*")))


def test_what_is_not_there_is_refused_before_anything_heavy_is_imported(tiny, tmp_path):
    (tmp_path / "t.yaml").write_text("output_type: loglikelihood\n")
    script = (
        "import sys\nfrom quantforge import api\n"
        "for asked in 'nosuch.yaml', 't.yaml':\n"
        f"    try: api.evaluate({str(tiny('llama-wide'))!r}, tasks=[asked])\n"
        "    except Exception as error: print(error)\n"
        "print(sorted({'torch', 'lm_eval.tasks', 'transformers'} & {*sys.modules}))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "no file nosuch.yaml" in ran.stdout
    assert "has no name" in ran.stdout
    assert ran.stdout.endswith("[]\n")


BROKEN = {
    "an unknown key": ("zzz: 5", "zzz"),
    "choices that are none": ("doc_to_choice: 5", "InputError|TypeError"),
    "no choice": ("doc_to_choice: []", "Error"),
    "a division by zero": ('doc_to_text: "{{ 1 / 0 }}"', "ZeroDivisionError"),
    "a sum of unlike things": ("doc_to_text: \"{{ 1 + 'a' }}\"", "TypeError"),
    "a loop without end": ('doc_to_text: "{% for i in range(9999999999) %}x{% endfor %}"', "range"),
    "metrics that are none": ("metric_list: [5]", "Error"),
    "data that is nowhere": ("dataset_kwargs: {data_files: nowhere.json}", "nowhere.json"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_task_that_cannot_be_asked_is_refused_before_any_work(tasks, what, tmp_path):
    line, match = BROKEN[what]
    data = yaml.safe_load(Path(tasks[0][0]).read_text()) | yaml.safe_load(line)
    file = tmp_path / "broken.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(InputError, match=match):
        check(Tasks((str(file),)))


@pytest.mark.parametrize("how", ["the hub is not reached", "the option"])
def test_data_that_are_nowhere_are_told_from_a_name_that_is_not(tasks, how, tmp_path, monkeypatch):
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "empty")
    asked = []

    def unreached(*_, **__):
        asked.append(how)
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.hf_hub_download", unreached)
    (tmp_path / "own").mkdir()
    file = tmp_path / "own" / "t.yaml"
    data = yaml.safe_load(Path(tasks[0][0]).read_text())
    file.write_text(yaml.safe_dump({**data, "dataset_path": "acme/nosuch", "dataset_kwargs": {}}))
    with pytest.raises(InputError, match="not in the local cache") as refusal:
        check(Tasks((str(file),), offline=how == "the option"))
    assert bool(asked) == (how != "the option")
    assert "HF_HOME" in refusal.value.hint
    assert "data_files" in refusal.value.hint
    assert not datasets.config.HF_HUB_OFFLINE  # as before


@pytest.mark.parametrize("names", ["", ",", " , "])
def test_no_name_is_not_no_wish(tiny, names):
    ended = CliRunner().invoke(app, ["eval", str(tiny("llama")), "--tasks", names])
    assert ended.exit_code == 2 or "no task" in str(ended.exception)


@pytest.mark.thorough
def test_a_group_means_tasks_of_other_files_and_of_the_library(tiny, tasks, tmp_path):
    file, group = tmp_path / "t.yaml", tmp_path / "g.yaml"
    file.write_text(Path(tasks[0][0]).read_text().replace("local_choice", "my task"))
    group.write_text("group: ours\ntask:\n  - my task\n")
    wanted = Tasks((str(file), str(group)))
    check(wanted)
    model = TaskModel(load(tiny("llama")).model, load_tokenizer(tiny("llama")), 64)
    assert {"my task", "ours"} <= run(model, wanted).keys()
    assert len(task_library._resolve_tasks(wanted)[0].all_tasks) > 1000


def test_other_files_beside_a_task_file_are_not_read(tasks, tmp_path):
    """Not even looked at: a pipe that nobody writes to, a deep nesting, the same name."""
    file = tmp_path / "own" / "b.yaml"
    file.parent.mkdir()
    file.write_text(Path(tasks[0][0]).read_text())
    os.mkfifo(file.with_name("a.yaml"))
    file.with_name("c.yaml").write_bytes(b"task: " + b"[" * 50_000)
    file.with_name("d.yaml").write_text(file.read_text())
    check(Tasks((str(file),)))
    with pytest.raises(InputError, match=r"no file .*a\.yaml"):
        check(Tasks((str(file.with_name("a.yaml")),)))


def test_nothing_of_a_task_reaches_the_terminal_and_no_program_is_asked(
    tiny, tasks, tmp_path, capfd, monkeypatch
):
    (tmp_path / "own").mkdir()
    text = Path(tasks[0][0]).read_text()
    for name in ("b", "c"):  # two of one name, for which the library warns
        file = tmp_path / "own" / f"{name}.yaml"
        file.write_text(text.replace("local_choice", '"z\\x1b[31mred"'))
    file = tmp_path / "own" / "a.yaml"
    file.write_text(text)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program"))
    answers = TaskModel(load(tiny("llama")).model, load_tokenizer(tiny("llama")), 64)
    capfd.readouterr()
    check(Tasks((str(file),)))
    run(answers, Tasks((str(file),)))
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("indexed")
def test_patterns_are_all_that_they_mean(tiny, tasks, tmp_path):
    answers = TaskModel(load(tiny("llama")).model, load_tokenizer(tiny("llama")), 64)
    wanted = Tasks((*tasks[0], "local_te*"))
    check(wanted)
    assert set(run(answers, wanted)) == {"local_choice", "local_texts", "local_write"}


def test_our_own_errors_are_not_those_of_a_task(tiny, tasks, monkeypatch):
    answers = TaskModel(load(tiny("llama")).model, load_tokenizer(tiny("llama")), 64)

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(TaskModel, "score_continuations", broken)
    with pytest.raises(ZeroDivisionError):
        run(answers, Tasks((tasks[0][0],)))


def test_windows_are_those_of_the_library():
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for length in (1, 5, 16, 17, 40, 47):
        ids = list(range(100, 100 + length))
        theirs = [
            ((*context, *continuation), len(continuation))
            for context, continuation in map(
                make_disjoint_window,
                get_rolling_token_windows(
                    token_list=ids, prefix_token=7, max_seq_len=16, context_len=1
                ),
            )
        ]
        assert [(part.ids, part.count) for part in disjoint_windows(ids, 7, 16)] == theirs


@pytest.mark.usefixtures("indexed")
def test_the_command(tiny, tasks):
    files, _ = tasks
    arguments = ["eval", str(tiny("llama")), "--tasks", files[0], "--no-speed", "--windows", "1",
                 "--length", "16", "--json"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["models"][0]
    assert 0 <= row["tasks"]["local_choice"]["acc"] <= 1
    table = CliRunner().invoke(app, arguments[:-1])
    assert "local_choice acc" in table.stdout
    missing = CliRunner().invoke(app, [*arguments[:2], "--tasks", "arc_eazy"])
    assert isinstance(missing.exception, InputError)
    assert missing.exception.hint == "did you mean 'arc_easy'?"
    assert "windows" not in missing.stderr  # before any work


def test_code_is_kept_from_running_wherever_the_library_finds_it(tiny, tasks, tmp_path):
    """A function, a metric of the hub, a template that reaches for Python; and --allow-code."""
    (file, *_), _ = tasks
    ran = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nf = lambda d: d\n"
    (tmp_path / "helper.py").write_text(ran)
    text = (tmp_path / "choice.yaml").read_text()
    coded = tmp_path / "coded.yaml"
    coded.write_text(text.replace("local_choice", "coded") + "process_docs: !function helper.f\n")
    answers = TaskModel(load(tiny("llama")).model, load_tokenizer(tiny("llama")), 64)
    with pytest.raises(RefusedError, match="!function"):
        run(answers, Tasks((str(coded),)))
    assert not (tmp_path / "ran").exists()
    run(answers, Tasks((str(coded),), allow_code=True))
    assert (tmp_path / "ran").exists()
    script = tmp_path / "script.py"
    script.write_text(ran)
    (tmp_path / "ran").unlink()
    coded.write_text(text.replace("metric: acc", f"metric: {script}"))
    with pytest.raises(RefusedError, match="a script of the hub"):
        run(answers, Tasks((str(coded),)))
    assert not (tmp_path / "ran").exists()
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() | length }}"
    (tmp_path / "choice.yaml").write_text(text.replace("{{question}}", escape))
    with pytest.raises(InputError, match="SecurityError"):
        run(answers, Tasks((file,)))
