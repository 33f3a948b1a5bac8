"""Change one operator, constant or condition at a time: does a test notice? Formats, runs, publishing.

    python scripts/mutation.py [MODULE ...] [--sample N] [--seed N] [--report FILE.md] [--save FILE] [--saved FILE]

A mutant that no test kills shows a line that nothing holds to what it is. Every mutant runs in a forked child, against
those of the tests of `TESTS` that come through its line, until one fails (see `mutation_trial`). Messages, annotations,
decorators and docstrings are left alone: they are read, not computed with. Mutants that compute the same are listed
with the reason in ``mutation_same.toml``, by the text of their line, and not counted.

``--save FILE`` writes a sample of mutants as statements, and ``--saved FILE`` tries them later, wherever statements
and tests are by then; modules are named as they were when they were saved (see `saved_mutants`).

``--sample`` draws as many mutants as that from each module, evenly over its lines. A mutant that takes far longer than
its tests do without it is killed too: an endless loop or wait is noticed. Exits 6 below 90 % of any module.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import platform
import random
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from mutation_trial import killed

ROOT = Path(__file__).parents[1]
SAME = Path(__file__).with_name("mutation_same.toml")
WANTED = 0.9
# Module: the tests that hold it, the quickest first.
TESTS: dict[str, tuple[str, ...]] = {
    "quantforge.packers.bits": ("property/test_bits.py", "golden/test_packing.py"),
    "quantforge.packers.integer": ("unit/packers/test_integer.py", "property/test_rounding.py"),
    "quantforge.packers.nf4": ("unit/packers/test_scale_searches.py", "unit/packers/test_low_precision_grids.py"),
    "quantforge.packers.fp4": ("unit/packers/test_scale_searches.py", "unit/packers/test_low_precision_grids.py"),
    "quantforge.packers.fp8": ("unit/packers/test_scale_searches.py", "unit/packers/test_low_precision_grids.py"),
    "quantforge.packers.scale_search": (
        "unit/packers/test_scale_searches.py", "unit/packers/test_integer_searches.py",
        "unit/packers/test_integer.py", "property/test_rounding.py",
    ),
    "quantforge.packers.ggml.blocks": (
        "golden/test_ggml_bytes.py", "unit/packers/test_ggml.py", "unit/packers/test_lattices.py",
    ),
    "quantforge.files.safetensors": (
        "unit/files/test_checkpoint_limits.py", "unit/files/test_safetensors.py",
        "property/test_safetensors_differential.py",
    ),
    "quantforge.files.opener": (
        "unit/files/test_checkpoint_limits.py", "unit/files/test_safetensors.py",
        "unit/files/test_reader.py",
    ),
    "quantforge.files.reader": (
        "unit/files/test_checkpoint_limits.py", "unit/files/test_reader.py",
    ),
    "quantforge.files.writer": (
        "unit/files/test_writer_limits.py", "unit/files/test_writer.py",
    ),
    "quantforge.formats.gguf.container": (
        "unit/formats/gguf/test_gguf_container.py", "unit/formats/gguf/test_gguf_limits.py",
        "unit/formats/gguf/test_gguf_reader.py",
        "unit/formats/gguf/test_gguf_files.py",
    ),
    "quantforge.formats.gguf.parsing": (
        "unit/formats/gguf/test_gguf_limits.py", "unit/formats/gguf/test_gguf_reader.py",
    ),
    "quantforge.files.disk": (
        "unit/files/test_disk.py", "faults/test_foreign_files.py", "faults/test_publish.py",
    ),
    "quantforge.files.lock": (
        "unit/files/test_disk.py", "faults/test_foreign_files.py", "faults/test_publish.py",
    ),
    "quantforge.files.previous_output": (
        "unit/files/test_disk.py", "faults/test_foreign_files.py", "faults/test_publish.py",
    ),
    "quantforge.files.stage": (
        "unit/files/test_disk.py", "faults/test_foreign_files.py", "faults/test_publish.py",
        "faults/test_publish_faults.py::test_too_little_disk_space_is_refused_before_work",
        "faults/test_publish_file.py",
    ),
    "quantforge.files.output_names": ("faults/test_publish_file.py", "faults/test_foreign_files.py"),
    "quantforge.files.checksums": (
        "faults/test_source_changes.py::test_checksums_cover_every_byte",
        "faults/test_source_changes.py::test_checksums_are_small_and_reads_touch_few_chunks",
        "faults/test_source_changes.py::test_a_file_truncated_during_its_digest_is_detected",
    ),
    "quantforge.evaluation.divergence": ("unit/evaluation/test_divergence.py",),
    "quantforge.execution.journal": ("unit/execution/test_journal.py",),
    "quantforge.execution.claims": ("unit/execution/test_claims.py", "faults/test_join.py"),
    "quantforge.execution.shared_run": ("faults/test_join.py",),
    "quantforge.execution.units": ("unit/execution/test_units.py", "unit/execution/test_journal.py"),
    **{f"quantforge.execution.{name}": (
        "unit/execution/test_unit_output.py", "faults/test_execution.py", "faults/test_experts.py",
        "unit/execution/test_quantized_inputs.py",
        "equivalence/test_zeros.py::test_half_of_every_linear_is_gone",
        "faults/test_resume.py::test_a_crash_after_any_part_resumes_to_the_same_bytes",
        "faults/test_resume.py::test_resume_detects_a_changed_byte_of_finished_work",
        "faults/test_run.py::test_a_non_finite_weight_is_named_without_leftovers",
    ) for name in ("execute", "calibrated_block", "calibrated_experts", "data_free",
                   "rounding", "unit_output")},
    "quantforge.execution.expert_saliency": ("equivalence/test_fewer_experts.py",),
    "quantforge.files.without_experts": ("equivalence/test_fewer_experts.py",),
    "quantforge.files.computed_tensors": (
        "unit/formats/test_low_precision_sources.py", "unit/formats/test_adapters.py",
        "equivalence/test_fewer_experts.py",
    ),
    "quantforge.files.unstacked_experts": (
        "unit/files/test_unstacked_experts.py",
        "faults/test_experts.py::test_a_misshapen_expert_stack_is_refused_by_name",
        "equivalence/test_derived.py::test_error_feedback_helps_a_family_that_nobody_declared",
    ),
    "quantforge.formats.patterns": ("unit/formats/test_patterns.py",),
    "quantforge.formats.sources.adapter": ("unit/formats/test_adapter_config.py", "unit/formats/test_adapters.py"),
    "quantforge.formats.sources.merged": ("unit/formats/test_adapters.py",),
    "quantforge.formats.decoded": ("unit/formats/test_low_precision_sources.py",),
    **{f"quantforge.formats.sources.{name}": ("unit/formats/test_low_precision_sources.py",)
       for name in ("low_precision", "modelopt", "mxfp4_stacks")},
    "quantforge.artifacts.publish": (
        "faults/test_verbs.py", "unit/artifacts/test_manifest.py", "faults/test_signing.py",
        "faults/test_source_changes.py::test_side_files_edited_after_the_plan_are_detected",
        "faults/test_source_changes.py::test_a_header_edited_after_the_plan_is_detected",
        "faults/test_provenance.py::test_provenance_is_written_only_on_request",
    ),
    "quantforge.api.quantize": (
        "faults/test_verbs.py",
        "faults/test_publish_file.py::test_repeating_a_command_after_a_late_kill_finds_the_result",
        "faults/test_source_changes.py::test_an_imatrix_edited_during_its_read_is_detected",
        "faults/test_signing.py::test_an_unusable_signing_key_is_refused_before_work",
    ),
    "quantforge.artifacts.manifest": ("unit/artifacts/test_manifest.py", "faults/test_provenance.py"),
}  # fmt: skip

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip


Sampled = TypeVar("Sampled")
# What has the line, its text, the change
Place = tuple[ast.AST, Callable[[], str], Callable[[], None]]


@dataclass(frozen=True)
class Mutant:
    """One change: its line, what it is, and the source that has it."""

    line: int
    what: str
    source: str
    text: str  # of the line


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    count = sum(1 for _ in _places(tree))
    found, lines = [], source.splitlines()
    for number in range(count):
        changed = copy.deepcopy(tree)
        node, shown, change = next(place for n, place in enumerate(_places(changed)) if n == number)
        before = shown()
        change()
        if (after := shown()) != before:
            found.append(
                Mutant(
                    line := getattr(node, "lineno", 0),
                    f"{before} -> {after}"[:100],
                    ast.unparse(changed),
                    lines[line - 1],
                )
            )
    return sorted(found, key=lambda mutant: mutant.line)


def _places(node: ast.AST) -> Iterator[Place]:
    """Every place that can be changed; nothing inside of messages, annotations and imports of types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(node, ast.AnnAssign | ast.arg) and child is node.annotation:
            continue
        if isinstance(node, ast.FunctionDef) and child is node.returns:
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and child in node.decorator_list:
            continue
        if isinstance(node, ast.Call) and _is_message(node):
            continue
        yield from _changes(child)
        yield from _places(child)


def _is_message(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    return name.endswith(("error", "Error", "_refuse", "refuse"))


def _changes(node: ast.AST) -> Iterator[Place]:
    for change in _of_operators(node):
        yield node, partial(ast.unparse, node), change
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield (
            node.test,
            lambda: ast.unparse(node.test),
            partial(setattr, node, "test", ast.Constant(value=False)),
        )


def _of_operators(node: ast.AST) -> Iterator[Callable[[], None]]:
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in _SWAPS:
        if not (isinstance(node, ast.BinOp) and _is_type(node)):
            yield lambda: setattr(node, "op", _SWAPS[type(node.op)]())
    elif isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            if type(op) in _SWAPS:
                yield lambda at=at, op=op: node.ops.__setitem__(at, _SWAPS[type(op)]())  # type: ignore[misc]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda: setattr(node, "op", ast.UAdd())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda: setattr(node, "value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda: setattr(node, "value", node.value + 1)


def _is_type(node: ast.BinOp) -> bool:
    """Whether it is a union of types, or of sets of names, by the look of it."""
    return isinstance(node.op, ast.BitOr) and any(
        ast.unparse(side) in {"None", "str", "int", "list", "dict"}
        for side in (node.left, node.right)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=list(TESTS), metavar="MODULE")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    parser.add_argument(
        "--save", type=Path, help="write mutants as statements, by default 20 of each module"
    )
    parser.add_argument(
        "--saved", type=Path, help="try the mutants of this file, wherever their statements are now"
    )
    parser.add_argument("--earlier", type=Path, help="with --saved: a report of an older version")
    parser.add_argument("--tests", action="append", default=[], help="with --saved: more tests")
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "calibration"), str(ROOT / "kernels")]
    import torch

    torch.set_num_threads(1)
    same = tomllib.loads(SAME.read_text())
    if options.save or options.saved:
        import saved_mutants

        if options.save:
            return saved_mutants.save(options.save, options.sample or 20, options.seed, same)
        named = [] if options.modules == list(TESTS) else options.modules
        return saved_mutants.try_again(
            options.saved, named, options.tests, options.report, options.earlier
        )
    rows, survivors, tried, dead, enough = [], [], 0, 0, True
    for module in options.modules:
        path = ROOT / Path(*module.split(".")).with_suffix(".py")
        every = mutants(path.read_text())
        all_of = [mutant for mutant in every if not _same(mutant, same.get(module, []))]
        chosen = _sample(all_of, options.sample, random.Random(f"{module} {options.seed}"))
        tests = [str(ROOT / "tests" / name) for name in TESTS[module]]
        dead_ones = killed(
            module, tests, [(one.line, one.source) for one in chosen], path.read_text()
        )
        alive = [mutant for mutant, dead_one in zip(chosen, dead_ones, strict=True) if not dead_one]
        enough = enough and len(chosen) - len(alive) >= WANTED * len(chosen)
        tried, dead = tried + len(chosen), dead + len(chosen) - len(alive)
        rows.append(
            f"| `{module}` | {len(every)} | {len(every) - len(all_of)} | {len(chosen)} | {len(chosen) - len(alive)} |"
        )
        survivors += [f"- `{module}`, line {mutant.line}: `{mutant.what}`" for mutant in alive]
        sys.stdout.write(
            rows[-1] + "\n" + "".join(f"{line}\n" for line in survivors[-len(alive) :] if alive)
        )
        sys.stdout.flush()
        if options.report:
            options.report.write_text(_report(rows, survivors, tried, dead))
    return 0 if enough else 6


def _same(mutant: Mutant, known: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it is listed: by its line, and what of it is changed where not every change computes the same."""
    return any(
        entry["line"] == mutant.text.strip() and mutant.what in entry.get("changes", [mutant.what])
        for entry in known
    )


def _sample(found: list[Sampled], count: int, chance: random.Random) -> list[Sampled]:
    """One mutant out of each of ``count`` equal stretches of a module."""
    if not count or count >= len(found):
        return found
    edges = [len(found) * n // count for n in range(count + 1)]
    return [found[chance.randrange(first, last)] for first, last in pairwise(edges)]


def _report(rows: Sequence[str], survivors: Sequence[str], tried: int, dead: int) -> str:
    head = ["| module | mutants | of these the same | tried | killed |", "|---|---|---|---|---|"]
    foot = [f"| all | | | {tried} | {dead} ({dead / max(tried, 1):.1%}) |", "", "Survivors:", ""]
    return (
        "\n".join(
            [
                *head,
                *rows,
                *foot,
                *(survivors or ["none"]),
                "",
                f"Python {platform.python_version()}.",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
