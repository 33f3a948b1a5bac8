"""There is one way to open a file for reading: nothing else in the packages opens one, but for what is listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from quantforge_files import roles
from tests.repo.test_layers import OPENER, ROOT, modules, parsed

READING = {"open", "read_text", "read_bytes", "fdopen", "memmap", "mmap", "fromfile", "from_file", "safe_open",
           "load_file", "ParquetFile", "GGUFReader", "from_pretrained", "copyfile", "copy2", "copytree"}  # fmt: skip
WRITING = "wax"  # modes of files that we make
OWN = {"read_text"}  # functions of ours; the method of a path has something before its name

# Module and call: why it is no file of somebody else.
EXCEPTIONS = {
    ("quantforge.runtime.memory", "_STATUS_FILE.read_text"): "/proc",
    ("quantforge.numerics.shared_processors", "path.read_text"): "/proc and control groups",
    ("quantforge.files.opener", "os.open"): "a file that an Opener has read before",
    ("quantforge.cli.app", "os.open"): "/dev/null, for writing",
    ("quantforge_calibration.tokenizer", "os.open"): "/dev/null, for writing",
    ("quantforge.cli.recipes", "paths[name].read_text"): "data of the package",
    ("quantforge.planning.recipe_options", "path.read_text"): "data of the package",
    ("quantforge.planning.recipe_options", "builtin[text].read_text"): "data of the package",
    ("quantforge.packers.lattices.points", "numpy.fromfile"): "data of the package",
    ("quantforge_calibration.sources", "file.read_text"): "data of the package",
    ("quantforge_kernels.cpu.program_cache", "os.open"): "this user's own folder, checked",
    ("quantforge_kernels.cpu.program_cache", "os.fdopen"): "likewise, with a limit",
    ("quantforge_calibration.readers", "ParquetFile"): "is given an open file",
    ("quantforge_calibration.image_documents", "pillow.open"): "is given what the Opener read",
    (
        "quantforge_calibration.row_processor",
        "loaders[name].from_pretrained",
    ): "a folder of copies of what the Opener read",
    (
        "quantforge.verification.side_files",
        "AutoTokenizer.from_pretrained",
    ): "a folder of copies of what the Opener read",
}


def openings(name: str) -> Iterator[str]:
    """Calls of a module that open a file and are not plainly for writing."""
    for node in ast.walk(parsed(name)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called.rpartition(".")[2] not in READING or called in OWN:
            continue
        position = 0 if called.endswith(".open") else 1
        modes = [item.value for item in node.keywords if item.arg == "mode"]
        modes += node.args[position : position + 1]
        mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else ""
        if called == "os.open" or "+" in str(mode) or str(mode)[:1] not in set(WRITING):
            yield called


def test_files_are_opened_by_the_opener_alone():
    others = [name for name in modules() if not name.startswith(OPENER)]
    found = {(name, called) for name in others for called in openings(name)}
    assert found - EXCEPTIONS.keys() == set(), "read it through an Opener, with a role"


def test_every_exception_is_there():
    found = {(name, called) for name in modules() for called in openings(name)}
    assert found >= EXCEPTIONS.keys()


def test_the_opener_opens_files_in_one_way():
    found = {name: sorted(openings(name)) for name in modules() if name.startswith(OPENER)}
    assert {name: calls for name, calls in found.items() if calls} == {
        f"{OPENER}.opener": ["open"],  # a descriptor as a file
        f"{OPENER}.system": ["os.open"],  # for everything that opens a descriptor
    }


def test_the_table_in_the_documents_is_the_one_in_the_code():
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    for role in (value for value in vars(roles).values() if isinstance(value, roles.FileRole)):
        size = (
            f"{role.max_bytes >> 20} MiB" if role.max_bytes >> 20 else f"{role.max_bytes >> 10} KiB"
        )
        size = "read in parts" if role.max_bytes == roles.NO_LIMIT else size
        assert (
            f"| {role.name} | {size} | {f'{role.max_values:,}' if role.max_values else ''} |"
            in text
        )


def test_limits_are_four_times_the_largest_that_are_known():
    megabyte = 10**6
    assert roles.TOKENIZER.max_bytes >= 4 * 33 * megabyte
    assert roles.INDEX.max_bytes >= 4 * 70_000 * len(
        '    "model.language_model.layers.100.mlp.experts.255.down_proj.weight_scale_inv": '
        '"model-00001-of-00163.safetensors",\n'
    )
    assert roles.VOCABULARY.max_bytes >= 4 * 19 * megabyte
