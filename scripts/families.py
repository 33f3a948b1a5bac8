"""Every decoder family that transformers builds, tiny, through all verbs: what works, what does not, and why.

    python scripts/families.py --work DIR [--families llama,mixtral] [--only plan,rtn] [--resume] [--report FILE.md]

A report keeps the rows of families that were not run as the JSON beside it has them.

For each family (`tiny_families` makes it, `save_pretrained` writes it, so that names are those of published files):

- ``plan``, then ``rtn``, ``gptq`` and ``awq`` into compressed-tensors, all with ``--for transformers`` where that loads
  the result only then;
- ``logits``: the artifact of rtn in stock transformers, beside what our decoder of the format reads from its files put
  into the source's names and loaded by stock transformers: two ways from files to logits that share nothing of ours;
- ``eval`` of the source and of each artifact by our own runtime, whose logits have to be those of transformers;
- ``verify`` of each artifact.

"Silently wrong" is what ends with 0 although: logits differ; a router, an embedding, a layer of another tower or what
is no linear was rounded; or experts or linears of the decoder stay in 16 bits and neither an event nor the line of the
plan names them. What a stored tensor is follows from its values: they are looked for among the parameters of the
running model, whose modules say what they are.

Every family runs in a process of its own, forked from one that has imported everything, with a limit of time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from scripts.family_kinds import misjudged  # noqa: E402
from scripts.family_report import (  # noqa: E402
    CRASH,
    LATE,
    OK,
    REFUSED,
    SKIPPED,
    UNLOADED,
    WRONG,
    table,
    verdict,
)  # fmt: skip

METHODS = ("rtn", "gptq", "awq")
STEPS = ("plan", *METHODS, "logits", "eval", "verify")
OPTIONS: dict[str, Any] = {"scheme": "int4:g16:sym"}
SMALL: dict[str, Any] = {"samples": 16, "length": 64}
CLOSE = 2e-3  # of the largest logit, both in float32: sums are taken in another order


@dataclass
class Family:
    """One family on its way through the steps.

    Attributes:
        found: what became of each step, and why.
        wrong: what is silently wrong, in words.
        share: of the weights inside blocks that the plan of rtn quantizes.
        options: of every run; with ``--for transformers`` where it loads the result only then.
    """

    name: str
    place: Path
    found: dict[str, tuple[str, str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    share: float = float("nan")
    seconds: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))

    @property
    def source(self) -> Path:
        """Return where the model is."""
        return self.place / "source"

    def document(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return {"family": self.name, "commit": commit(), "found": self.found, "wrong": self.wrong, "share": self.share,
                "seconds": {step: round(value, 1) for step, value in self.seconds.items()}}  # fmt: skip


@cache
def commit() -> str:
    """Return the commit that the program is of, with a "+" where files were changed since; "" outside of a clone."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip()


# --- the steps ------------------------------------------------------------------------------


def made(family: Family) -> str:
    """Write the source."""
    from scripts import tiny_families

    shutil.rmtree(family.place, ignore_errors=True)
    family.place.mkdir(parents=True)
    tiny_families.write(family.name, family.source, TOKENIZER[0])
    family.options = options_for(family)
    return "--for transformers" if "engine" in family.options else ""


def options_for(family: Family) -> dict[str, Any]:
    """Return the options of every run, with the engine named where only then it loads the result."""
    import quantforge
    from quantforge.errors import QuantForgeError

    named = {**OPTIONS, "engine": "transformers"}
    try:
        plan = quantforge.plan(str(family.source), method="rtn", **OPTIONS)
        if next(v for v in plan.engines if v.engine == "transformers").loads is False:
            quantforge.plan(str(family.source), method="rtn", **named)
            return named
    except QuantForgeError:  # what is refused is said by the steps
        pass
    return dict(OPTIONS)


def planned(family: Family) -> str:
    """Plan, and look at what the plan says."""
    import quantforge
    from quantforge.planning.coverage import coverage

    plan = quantforge.plan(str(family.source), method="rtn", **family.options)
    family.share = coverage(plan.tensors).share
    family.wrong += [f"plan: {text}" for text in misjudged(family.name, family.source, plan)]
    return f"{family.share:.1%}"


def quantized(family: Family, method: str) -> str:
    """Quantize with one method."""
    import quantforge

    out = family.place / method
    made = quantforge.quantize(
        str(family.source), method=method, out=out, **family.options, **SMALL
    )
    return ", ".join(sorted({event.kind for event in made.events}))


class UnloadedError(Exception):
    """Stock transformers does not take an artifact, and nobody was told that it does."""


def same_logits(family: Family) -> str:
    """Compare the artifact in stock transformers with our decoding of its files."""
    import quantforge

    says = next(
        v for v in quantforge.plan(str(family.source), method="rtn", **family.options).engines
        if v.engine == "transformers"
    )  # fmt: skip
    theirs = _stock(family, family.place / "rtn") if says.loads is not False else None
    if theirs is None:
        raise UnloadedError(says.reason[:200])
    if isinstance(theirs, str):
        if isinstance(source := _stock(family, family.source), str):
            raise UnloadedError(f"nor does transformers run the source: {source}")
        family.wrong.append(f"stock transformers does not load or run it: {theirs}")
        return "does not load"
    ours = _stock(family, _decoded(family.place / "rtn", family.place / "plain"))
    if isinstance(ours, str):
        return f"decoded: {ours}"
    apart = _apart(theirs, ours)
    if apart <= CLOSE:
        return _compared(family, "stock transformers", theirs, ours)
    theirs, ours = _in_float32(family)
    if isinstance(theirs, str) or isinstance(ours, str):
        return f"{apart:.1g} in bfloat16; in float32 {theirs} {ours}"[:200]
    return f"{apart:.1g}, in float32 {_compared(family, 'stock transformers', theirs, ours)}"


def _in_float32(family: Family) -> tuple[Any, Any]:
    """Return both logits of the same weights stored in float32: of others it computes experts in bfloat16."""
    import quantforge
    from scripts import tiny_families

    source, out = family.place / "source32", family.place / "rtn32"
    tiny_families.write(family.name, source, TOKENIZER[0], "float32")
    quantforge.quantize(str(source), method="rtn", out=out, **family.options, **SMALL)
    return _stock(family, out), _stock(family, _decoded(out, family.place / "plain32"))


def evaluated(family: Family) -> str:
    """Run source and artifacts by our runtime, and compare its logits with those of transformers."""
    import torch

    import quantforge

    made = [family.place / method for method in METHODS if family.found[method][0] == OK]
    models = [str(path) for path in made]
    found = quantforge.evaluate(str(family.source), models, windows=1, length=32, speed=False)
    kl = {path.name: row["kl_mean"] for path, row in zip(made, found.rows[1:], strict=True)}
    model = quantforge.load(str(family.source)).model
    with torch.inference_mode():
        ours = model(input_ids=_ids()).logits.float()
    theirs = _stock(family, family.source)
    if not isinstance(theirs, str):
        _compared(family, "our runtime of the source", ours, theirs)
    if not all(0 <= value < 5 for value in kl.values()):
        family.wrong.append(f"divergence of artifacts: {kl}")
    return " ".join(f"{name} {value:.3g}" for name, value in kl.items())


def verified(family: Family) -> str:
    """Verify all artifacts."""
    import quantforge

    for method in METHODS:
        if family.found[method][0] == OK:
            report = quantforge.verify(str(family.place / method), source=str(family.source))
            if report.findings:
                first = report.findings[0]
                family.wrong.append(
                    f"verify {method}: {first.check} {first.where} {first.detail}"[:200]
                )
    return ""


def _decoded(path: Path, out: Path) -> Path:
    """Write an artifact as float32 weights under the names that it stores."""
    import torch
    from safetensors.torch import save_file

    from quantforge.files.reader import open_checkpoint
    from quantforge.formats.decoded import decode_checkpoint

    out.mkdir(exist_ok=True)
    found = decode_checkpoint(open_checkpoint(path))
    tensors = {name: found.read(name).to(torch.float32).contiguous() for name in found.entries}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(dict(found.config)))
    return out


def _stock(family: Family, path: Path) -> Any:
    """Return the logits of a directory in stock transformers, or what it says instead."""
    import torch

    from scripts import tiny_families

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded, info = tiny_families.class_of(family.name).from_pretrained(
                path, dtype=torch.float32, output_loading_info=True
            )
        lost = sorted(info["missing_keys"]) + sorted(info["mismatched_keys"])
        if lost:
            return f"parameters left random: {len(lost)}, {lost[0]}"[:200]
        with torch.inference_mode():
            return loaded.eval()(input_ids=_ids()).logits.float()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _ids() -> Any:
    import torch

    return torch.arange(40).reshape(1, 40) * 7 % 300 + 2


def _apart(first: Any, second: Any) -> float:
    if isinstance(second, str) or first.shape != second.shape:
        return 0.0
    return float((first - second).abs().max() / second.abs().max().clamp_min(1e-9))


def _compared(family: Family, what: str, first: Any, second: Any) -> str:
    import torch

    if (
        isinstance(second, str)
        or first.shape != second.shape
        or not bool(torch.isfinite(second).all())
    ):
        return "not comparable: not finite, or other shapes"
    apart = _apart(first, second)
    if not apart <= CLOSE:
        family.wrong.append(f"{what}: logits differ by {apart:.2g} of the largest")
    return f"{apart:.1g}"


# --- processes ------------------------------------------------------------------------------

TOKENIZER: list[Any] = []
RUN: Mapping[str, Callable[[Family], str]] = {
    "build": made,
    "plan": planned,
    **{method: (lambda family, method=method: quantized(family, method)) for method in METHODS},
    "logits": same_logits,
    "eval": evaluated,
    "verify": verified,
}


def step(family: Family, name: str) -> None:
    """Take one step and sort what comes of it."""
    from quantforge.errors import QuantForgeError

    began = time.monotonic()
    known = len(family.wrong)
    try:
        said = RUN[name](family)
        family.found[name] = (WRONG if len(family.wrong) > known else OK, said)
    except UnloadedError as error:
        family.found[name] = (UNLOADED, str(error))
    except QuantForgeError as error:
        family.found[name] = (REFUSED, f"{error.code}: {error.message}"[:300])
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({where})"
        family.found[name] = (CRASH, text)
    family.seconds[name] = time.monotonic() - began


def run(family: Family, steps: Sequence[str], tell: Callable[[dict[str, Any]], None]) -> None:
    """Take the steps in order, those that need an artifact only where there is one."""
    step(family, "build")
    tell(family.document())
    if family.found["build"][0] != OK:
        return
    for name in METHODS:
        family.found[name] = (SKIPPED, "")
    for name in steps:
        needs = {"logits": ["rtn"], "verify": METHODS}.get(name, [])
        if needs and not any(family.found[method][0] in {OK, WRONG} for method in needs):
            family.found[name] = (SKIPPED, "nothing to look at")
            continue
        step(family, name)
        tell(family.document())


def forked(name: str, work: Path, steps: Sequence[str], limit: float) -> dict[str, Any]:
    """Run one family in a process of its own; return its document, with what was running where time was up."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 1
        with contextlib.suppress(BaseException), os.fdopen(write, "w") as pipe:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)

            def tell(document: dict[str, Any]) -> None:
                pipe.write(json.dumps(document) + "\n")
                pipe.flush()

            run(Family(name, work / name), steps, tell)
            code = 0
        os._exit(code)
    os.close(write)
    text, ended = _read(read, time.monotonic() + limit)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    lines = text.splitlines()
    document: dict[str, Any] = json.loads(lines[-1]) if lines else Family(name, work).document()
    if not ended or status:
        at = next(
            (s for s in ("build", *steps) if document["found"].get(s, (SKIPPED,))[0] == SKIPPED),
            "?",
        )
        document["found"][at] = (
            LATE if not ended else CRASH,
            f"limit of {limit:.0f} s" if not ended else "died",
        )
    return document


def _read(pipe: int, until: float) -> tuple[str, bool]:
    chunks = []
    while (left := until - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                os.close(pipe)
                return b"".join(chunks).decode(), True
            chunks.append(chunk)
    os.close(pipe)
    whole = b"".join(chunks)
    return whole[: whole.rfind(b"\n") + 1].decode(), False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the families; return 5 if anything is silently wrong or crashed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="where models and artifacts are made"
    )
    parser.add_argument("--families", default="", help="these alone, separated by commas")
    parser.add_argument("--only", default=",".join(STEPS), help=f"steps, of {','.join(STEPS)}")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each family")
    parser.add_argument(
        "--resume", action="store_true", help="skip families that are in the JSON already"
    )
    parser.add_argument("--keep", action="store_true", help="keep the models and artifacts")
    parser.add_argument(
        "--report",
        type=Path,
        help="write the table there, and JSON beside it; rows of families that are not run stay",
    )
    options = parser.parse_args(arguments)
    steps = [name for name in STEPS if name in options.only.split(",")]
    _prepare()
    from scripts import tiny_families

    wanted = [n for n in options.families.split(",") if n] or tiny_families.families()
    options.work.mkdir(parents=True, exist_ok=True)
    kept = options.work / "families.json"
    earlier = json.loads(kept.read_text()) if options.resume and kept.exists() else []
    documents = {document["family"]: document for document in earlier}
    for name in wanted:
        if name in documents:
            continue
        documents[name] = forked(name, options.work, steps, options.limit)
        kept.write_text(json.dumps(list(documents.values()), indent=1))
        if not options.keep:
            shutil.rmtree(options.work / name, ignore_errors=True)
        said = " ".join(
            f"{s}:{documents[name]['found'].get(s, ('',))[0]}" for s in ("build", *steps)
        )
        print(name, verdict(documents[name]), said, *documents[name]["wrong"][:2], flush=True)
    if options.report:
        documents = merged(options.report.with_suffix(".json"), documents, tiny_families.families())
    ordered = [documents[name] for name in sorted(documents)]
    counts = Counter(verdict(document) for document in ordered)
    print(dict(counts))
    if options.report:
        options.report.write_text(table(ordered, steps))
        options.report.with_suffix(".json").write_text(json.dumps(ordered, indent=1) + "\n")
    return 5 if counts["silently wrong"] + counts["crash"] else 0


def merged(
    path: Path, made: Mapping[str, dict[str, Any]], known: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the documents of a report with those that were made in the place of its own.

    Args:
        path: of the report's JSON; it need not be there.
        made: documents by family.
        known: families; a report may have others of an earlier transformers, which go.
    """
    earlier = json.loads(path.read_text()) if path.exists() else []
    found = {document["family"]: document for document in earlier}
    return {name: document for name, document in {**found, **made}.items() if name in known}


def _prepare() -> None:
    """Import everything once, so that each family's process has it."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
    warnings.simplefilter("ignore")
    import torch
    import transformers

    import quantforge.api  # noqa: F401  # forked with it
    from quantforge.runtime import load  # noqa: F401
    from tests.conftest import tiny_tokenizer

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    TOKENIZER.append(tiny_tokenizer())
    commit()


if __name__ == "__main__":
    sys.exit(main())
