"""Running the product in tests: the command line in this process or in a forked one, small recipes, whole trees."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.api.variants import plan_variants
from quantforge.cli.app import app, main
from quantforge.progress import Progress
from quantforge.recipe import CalibrationOptions, GptqOptions, Recipe
from quantforge.settings import Settings

GLOBAL_FLAGS = {"--help", "--debug", "--version"}
CALIBRATION = CalibrationOptions(samples=6, length=24, micro_batch=4)
# The same as options of the command line (micro_batch has none: it belongs to recipes).
CALIBRATION_ARGUMENTS = ("--samples", "6", "--length", "24")
HANG_TIMEOUT_S = 120  # seconds, of a child that takes a few


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    code: int
    out: str
    err: str


def run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> CommandResult:
    """Run the command line in this process, its error boundary included."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    before, sys.argv = sys.argv, ["quantforge", *map(str, arguments)]
    capsys.readouterr()
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
        for number, handler in handlers.items():
            signal.signal(number, handler)
    captured = capsys.readouterr()
    code = ended.value.code
    check_hints(str(arguments[0]) if arguments else "", captured.err)
    return CommandResult(code if isinstance(code, int) else 0, captured.out, captured.err)


def check_hints(verb: str, printed: str) -> None:
    """Fail where a hint that a verb has printed says something that the verb would refuse when typed."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for hint in re.findall(r"^hint: (.*(?:\n(?!\w+:).+)*)", printed, re.MULTILINE):
        named = re.findall(r"quantforge ([a-z]+)", hint)
        assert {*named} <= {*commands, "help"}, hint
        # A key of its file is named as their option
        files = ("quantize", "eval") if verb == "release" else ()
        verbs = [commands[name] for name in (verb, *named, *files) if name in commands]
        known = {
            flag
            for one in verbs
            for option in one.params
            for flag in (*option.opts, *option.secondary_opts)
        }
        ours = re.sub(r"\b(hf|pip|torchrun) .*", "", hint)  # commands of others
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", ours):
            assert not known or flag in known | GLOBAL_FLAGS, (
                f"{verb} printed a hint with {flag}, which it does not take: {hint}"
            )


def recipe(method: str = "rtn", **values: Any) -> Recipe:
    """Build a recipe that runs in a moment."""
    values.setdefault("calibration", CALIBRATION)
    return Recipe(method=method, **values)


def fast_recipe(method: str = "rtn", **values: Any) -> Recipe:
    """Build one whose GPTQ goes over the columns once, in a third of the time: for tests of runs, not of rounding."""
    if "gptq" in method:
        values.setdefault("gptq", GptqOptions(refine=0))
    return recipe(method, **values)


def quantize(model: Path, out: Path, wanted: Recipe, **settings: Any) -> api.Outcome:
    """Quantize in this process."""
    return api.quantize(str(model), wanted, out, Settings(**settings))


def fork_child(work: Callable[[], object], errors: Path) -> int:
    """Start ``work`` in a child process (its imports are those of this one); its stderr goes to ``errors``.

    A child that hangs ends with 1, and says there where.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(descriptor), "w") for _ in range(2))
        faulthandler.dump_traceback_later(HANG_TIMEOUT_S, exit=True, file=descriptor)
        torch.set_num_threads(1)
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for_exit_code(child: int) -> int:
    """Wait for a child: its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def file_digests(directory: Path) -> dict[str, str]:
    """Every file of a directory by its relative name, with its digest."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def copy_model(model: Path, place: Path) -> Path:
    """Copy a model to a place where it may be damaged."""
    shutil.copytree(model, place)
    return place


def keep_first_blocks(model: Path, count: int) -> Path:
    """Take all but the first blocks out of a model of one file."""
    config = json.loads((model / "config.json").read_text())
    assert config["num_hidden_layers"] > count
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    tensors = load_file(model / "model.safetensors")
    blocks = {name: re.search(r"\.layers\.(\d+)\.", name) for name in tensors}
    kept = {name: tensors[name] for name, at in blocks.items() if not at or int(at[1]) < count}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    return model


def move_command(away: Path) -> str:
    return f"mv {{}} {shlex.quote(str(away))}"


def python_command(place: Path, text: str) -> str:
    """Return a command that runs lines of Python with the shard as ``shard`` and this folder as ``place``."""
    file = place / "command.py"
    file.write_text(
        f"import os, shutil, signal, sys\nfrom pathlib import Path\n"
        f"shard, place = Path(sys.argv[1]), Path({str(place)!r})\n{text}\n"
    )
    return shlex.join([sys.executable, str(file)])


def leftovers(out: Path) -> set[str]:
    """What lies beside an output, but for files named m."""
    return {path.name for path in out.parent.iterdir()} - {"m"}


class StopError(Exception):
    """Stands for a crash."""


def crash_after(part: str) -> Callable[[Progress], None]:
    """Return a progress callback that ends the run when a part is done."""

    def progress(done: Progress) -> None:
        if done.part == part:
            raise StopError

    return progress


def interrupt_measurement(patch: pytest.MonkeyPatch) -> list[int]:
    """Interrupt the measurement of candidates at the third block, once; return the blocks that begin."""
    from quantforge.execution import candidate_errors

    original: Any = candidate_errors.CandidateErrors.measure_block
    seen: list[int] = []

    def counted(own: Any, part: Any, *rest: Any) -> Any:
        seen.append(part.index)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return original(own, part, *rest)

    patch.setattr(candidate_errors.CandidateErrors, "measure_block", counted)
    return seen


def make_variants(
    model: str | Path,
    recipes: Mapping[str, Recipe],
    place_of: Callable[[str, str], Path],
    settings: Settings,
) -> tuple[str, ...]:
    """Make results of one model, and return the names of those that were not there; as `plan_variants`."""
    variants, errors = plan_variants(model, recipes, place_of, settings)
    for error in errors.values():
        raise error
    return variants.make(Path(), 0)
