"""The shape of the project: who may import whom, what never appears in the packages, and what the wheel holds."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from scripts import structure
from scripts.structure import ORDER, PACKAGES, ROOT, folder, imports, modules, parsed

OPENER = "quantforge_files"  # the one leaf that others stand on: there is one way to open a file
# Planning, inspecting, refusing: none of these needs torch, not even through what it imports.
WITHOUT_TORCH = (
    "errors", "events", "scheme", "notation", "plans", "recipe", "settings", "artifacts", "planning", "api", "engines",
    "files", "formats", "architectures", "quantizers", "cli", "model.statistics", "numerics.allocator",
    "execution.journal", "progress", "grids", "arguments", "cache_kinds",
)  # fmt: skip
HEAVY = ("torch", "transformers", "datasets", "triton", "numpy", "safetensors", "tokenizers")


def test_no_module_imports_against_the_order_of_folders():
    assert {folder(name) for name in modules()} == set(ORDER)
    assert structure.upwards() == []


def test_unit_tests_lie_in_the_folders_of_what_they_test():
    unit, product = ROOT / "tests" / "unit", {*structure.LEAVES}
    product |= {path.parent.relative_to(ROOT / "quantforge").as_posix() for path in modules().values()
                if path.is_relative_to(ROOT / "quantforge")}  # fmt: skip
    tests = {path.relative_to(unit) for path in unit.rglob("test_*.py")}
    assert {path.parent.as_posix() for path in tests} <= product
    alone = {path.stem.removeprefix("test_") for path in tests if path.parent == Path()}
    assert alone <= {folder(name) for name in modules()}, "it is of no file at the top"


def test_no_modules_import_each_other_in_a_circle():
    assert structure.circles() == []


def test_imports_in_functions_and_for_types_count_too():
    tree = ast.parse(
        "if TYPE_CHECKING:\n    import quantforge.plans\ndef f():\n    from quantforge import recipe\n"
    )
    assert structure.imported(tree) == ("quantforge.plans", "quantforge.recipe")


def test_an_import_upwards_and_a_circle_would_be_seen(monkeypatch):
    known = structure.edges()
    planted = {"quantforge.errors": {"quantforge.recipe"}}
    monkeypatch.setattr(structure, "edges", lambda: known | planted)
    assert ("quantforge.errors", "quantforge.recipe") in structure.upwards()
    assert any("quantforge.errors" in group for group in structure.circles())
    leaf = {"quantforge_kernels.matmul_spec": {"quantforge_calibration"}}
    monkeypatch.setattr(structure, "edges", lambda: known | leaf)
    assert structure.upwards() == [("quantforge_kernels.matmul_spec", "quantforge_calibration")]


def test_the_script_fails_on_an_import_upwards_and_on_no_figure_of_form(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["structure.py"])
    monkeypatch.setattr(structure, "figures", lambda **_: {"code lines": 10**9})
    assert structure.main() == 0
    known = structure.edges()
    upwards = {"quantforge.errors": {"quantforge.recipe"}}
    monkeypatch.setattr(structure, "edges", lambda: known | upwards)
    assert structure.main() == 1
    assert "quantforge.errors imports quantforge.recipe" in capsys.readouterr().err


def test_a_module_listed_in_a_table_is_not_used_there_and_one_named_in_a_call_is():
    tree = ast.parse("from a import llama, tool\nFAMILIES = (llama.FAMILY,)\nuse(tool)\n")
    assert structure.table_entries(tree) == {"llama"}
    tree = ast.parse("x = import_module('quantforge.errors')\ny = {'z': 'quantforge.events'}\n")
    assert structure.named_in_calls(tree) == {"quantforge.errors"}


def test_a_summary_is_cut_at_a_pause_outside_of_brackets(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""Round (Xiao et al., 2022) in turn: columns, rows. More."""')
    assert structure.summary(path, 60) == "Round (Xiao et al., 2022) in turn: columns, rows"
    assert structure.summary(path, 40) == "Round (Xiao et al., 2022) in turn"
    assert structure.summary(path, 20) == "Round"


def test_every_folder_is_in_the_design():
    told = (ROOT / "docs" / "design.md").read_text()
    for name in ORDER:
        if name and not name.startswith("__"):
            assert re.search(rf"`[\w/]*\b{name}(/|\.py)`", told), name


def test_the_order_is_told():
    told = " > ".join(name for name in ORDER if name)
    assert told in " ".join((ROOT / "docs" / "design.md").read_text().split())


def test_planning_imports_no_torch():
    wanted = [
        name
        for name in modules()
        if name.startswith("quantforge.")
        and f"{name.partition('.')[2]}.".startswith(tuple(f"{part}." for part in WITHOUT_TORCH))
        and not imports_torch_by_design(name)
    ]
    assert len(wanted) > 50
    script = f"""
import importlib, json, sys
found = {{}}
for name in {wanted}:
    importlib.import_module(name)
    heavy = [word for word in {HEAVY} if word in sys.modules]
    if heavy:
        found[name] = heavy
        break
print(json.dumps(found))
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == {}


def imports_torch_by_design(name: str) -> bool:
    """The methods themselves (not their table), and the tensor type."""
    return name == "quantforge.packers.tensor" or name.startswith("quantforge.quantizers.")


FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def test_nothing_runs_what_a_model_brings_along():
    for name in modules():
        roots = {other.split(".")[0] for other in imports(name)}
        assert not roots & FORBIDDEN_MODULES, name
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                forbidden = {"eval", "exec", "compile", "__import__", "torch.load"}
                assert called not in forbidden, (name, called)
                for keyword in node.keywords:
                    value = ast.unparse(keyword.value)
                    assert keyword.arg != "trust_remote_code" or value == "False", name


WRITING = {"write_text", "write_bytes", "touch", "tofile", "mkstemp", "NamedTemporaryFile", "memmap", "truncate",
           "copyfile", "copy2", "copytree", "symlink_to", "hardlink_to"}  # fmt: skip
WRITER = "quantforge.files.disk"
# Copies of files that were read already, in a new directory of its own, for a library that takes paths.
PRIVATE = ("quantforge_calibration.row_processor",)


def opens_for_writing(call: ast.Call) -> bool:
    """Whether a call opens a file in a way that can change or make it."""
    name = ast.unparse(call.func)
    words = [item.value for item in ast.walk(call) if isinstance(item, ast.Constant)]
    modes = [
        word for word in words if isinstance(word, str) and re.fullmatch("[rwaxbt+]{1,3}", word)
    ]
    if name in {"os.open", "os.mknod", "os.mkfifo"}:
        flags = ast.unparse(call)
        return (
            "os.devnull" not in flags
            and re.search("O_CREAT|O_WRONLY|O_RDWR|O_APPEND|O_TRUNC", flags) is not None
        )
    if name.split(".")[-1] == "open":
        return bool(modes) and re.search("[wax+]", "".join(modes)) is not None
    return name.split(".")[-1] in WRITING


def test_files_are_opened_for_writing_in_one_place():
    """Links, pipes and files of others: `quantforge.files.disk` knows about them; open through it."""
    found = [
        (name, ast.unparse(node))
        for name in set(modules()) - {WRITER, *PRIVATE}
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.Call) and opens_for_writing(node)
    ]
    assert found == []


def test_other_ways_to_write_would_be_seen():
    for text in (
        "open(p, 'w')",
        "p.open('ab')",
        "os.open(p, os.O_RDWR)",
        "p.write_text('')",
        "open(p, mode='r+')",
    ):
        (call,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        assert opens_for_writing(call), text
    for text in (
        "open(p)",
        "p.open('rb')",
        "os.open(p, os.O_RDONLY)",
        "os.open(os.devnull, os.O_WRONLY)",
    ):
        (call,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        assert not opens_for_writing(call), text


def test_modules_say_what_they_are_and_do_not_print():
    for name in modules():
        assert ast.get_docstring(parsed(name)), name
        every = [*ast.walk(parsed(name))]
        if name not in {"quantforge.cli.console", "quantforge.cli.progress_bar"}:
            calls = {ast.unparse(node.func) for node in every if isinstance(node, ast.Call)}
            assert not calls & {"print", "sys.stdout.write", "sys.stderr.write"}, name
        for node in every:
            assert not isinstance(node, ast.Global), name
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), name


# Where a library raises what it likes at foreign input, or others go on: every one of them says so in a comment.
CATCHING = {"quantforge.cli.app", "quantforge.evaluation.tasks",
            "quantforge.evaluation.task_model", "quantforge.artifacts.signing",
            "quantforge_calibration.image_documents", "quantforge_calibration.row_processor",
            "quantforge.serving.engine_thread",  # one command, one step
            "quantforge.verification.side_files", "quantforge_calibration.tokenizer",
            "quantforge_calibration.chat",
            "quantforge_calibration.readers", "quantforge.model.transformers_loading"}  # fmt: skip


def test_only_boundaries_to_foreign_code_catch_everything():
    catching = {
        name
        for name in modules()
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.ExceptHandler)
        and node.type
        and ast.unparse(node.type) == "Exception"
    }
    assert catching <= CATCHING


def tracked() -> list[Path]:
    """The files of the project: what git tracks, or where there is no git what is there."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        return [
            ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()
        ]
    return [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]


TEXTS = {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", "", ".sh"}


def test_nothing_names_the_machine_that_it_was_made_on():
    place = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/")
    found = []
    for path in tracked():
        if path.suffix in TEXTS and path.stat().st_size < 1_000_000 and path != Path(__file__):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if place.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def test_links_of_documents_lead_somewhere():
    for path in pages():
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in LINK.findall(text):
            if not re.match(r"[a-z]+:", target) and not target.startswith("#"):
                assert (path.parent / target.partition("#")[0]).exists(), (path.name, target)


def test_files_that_documents_name_are_there():
    names = [f"/{file.relative_to(ROOT)}" for file in tracked()]
    for path in pages():
        if path.name == "CHANGELOG.md":
            continue  # tells of what was
        for named in re.findall(r"`([\w./-]+\.py)(?:::\w+)?`", path.read_text(encoding="utf-8")):
            if "NAME" not in named:
                assert any(name.endswith(f"/{named}") for name in names), (path.name, named)


# The pattern of a page about something that is to be added, and a verb in a list of verbs.
PLACEHOLDERS = re.compile(r"NAME|\*|^quantforge/evaluations$|^docs/results/quality$")


def test_paths_that_documents_name_are_there():
    """Every path from the root of the repository, in text, commands and tables: folders and other files, too."""
    names = [file.relative_to(ROOT) for file in tracked()]
    there = {name.as_posix() for file in names for name in (file, *file.parents)}
    folders = "|".join(sorted({name.parts[0] for name in names if len(name.parts) > 1}))
    path_pattern = re.compile(rf"(?<![\w./<-])((?:{folders})/[\w./*-]*[\w*])")
    found = {
        path.name: missing
        for path in pages()
        if path.name != "CHANGELOG.md"
        and (missing := [name for name in path_pattern.findall(path.read_text(encoding="utf-8"))
                         if name not in there and not PLACEHOLDERS.search(name)])
    }  # fmt: skip
    assert found == {}


def test_the_wheel_is_asked_for_all_packages_and_their_data():
    """That it holds all of their files is seen in `test_wheel`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {Path(name).name for name in wheel["packages"]} == set(PACKAGES)
    assert wheel["force-include"] == {
        "recipes": "quantforge/recipes",
        "models/demo": "quantforge/models/demo",
    }
    assert all((place / "py.typed").exists() for place in PACKAGES.values())
