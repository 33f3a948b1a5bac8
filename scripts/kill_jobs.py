"""Kill random workers of a shared release at random instants, replace each, and compare every file with a lone run's.

    python scripts/kill_jobs.py [--kills 60] [--workers 3] [--seed N] [--model DIR] [--work DIR]

Workers are processes that give the same command with ``--join``, so that an instant may also fall into their start, the
scoring or the checksums. A killed one is replaced at once, three times in a release; then the release is left to end.
Exits 5 at the first file that differs, worker that fails, or hidden folder that is left.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAD = """model = "{model}"
[calibration]
samples = 8
length = 128
[evaluation]
text = "builtin"
windows = 2
length = 64
"""
VARIANT = '[[variant]]\nname = "{}"\nrecipe = {}\n{}\n'
VARIANTS = (
    ("int4", '{method = "gptq", scheme = "int4:g128:sym"}', 'format = "compressed-tensors"'),
    ("int3", '{method = "gptq", scheme = "int3:g128:sym"}', 'format = "compressed-tensors"'),
    ("Q4", '{method = "gptq"}', 'type = "Q4_K_M"'),
    ("Q3", '{method = "gptq"}', 'type = "Q3_K_M"'),
    ("awq", '{method = "awq", scheme = "int4:g128:asym"}', 'format = "awq"'),
    ("fp8", '{method = "rtn", scheme = "fp8:row"}', 'format = "compressed-tensors"'),
)
IN_A_RELEASE = 3  # kills
SHORTEST = 0.3  # seconds between two


class Release:
    """A release file, and processes that make it."""

    def __init__(self, model: Path, work: Path) -> None:
        self._spec = work / "release.toml"
        variants = "".join(VARIANT.format(*variant) for variant in VARIANTS)
        self._spec.write_text(HEAD.format(model=model) + variants)

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """Start a worker."""
        command = [sys.executable, "-m", "quantforge", "release", self._spec, "-o", out]
        return subprocess.Popen(
            [*command, "--join", "--quiet"], env={**os.environ, "SOURCE_DATE_EPOCH": "0"},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip


def tree(directory: Path) -> dict[str, str]:
    """Return the digest of every file, and the name of every hidden folder."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in directory.rglob("*")
        if path.is_file() or path.name.startswith(".")
    }  # fmt: skip


def killed(release: Release, out: Path, workers: int, most: int, longest: float) -> int:
    """Make a release while workers die; return how many were killed."""
    running = [release.start(out) for _ in range(workers)]
    kills = 0
    while kills < most:
        time.sleep(random.uniform(SHORTEST, longest))
        alive = [worker for worker in running if worker.poll() is None]
        if not alive:
            break
        victim = random.choice(alive)
        victim.kill()
        victim.communicate()
        running.remove(victim)
        running.append(release.start(out))
        kills += 1
    for worker in running:
        said = worker.communicate()[1].decode()
        if worker.returncode:
            print(f"a worker failed with {worker.returncode}: {said}")
            sys.exit(5)
    return kills


def main() -> None:
    """Kill until there were enough kills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--work", type=Path, help="an empty directory (default: a temporary one)")
    asked = parser.parse_args()
    random.seed(asked.seed)
    with tempfile.TemporaryDirectory() as temporary:
        work = (asked.work or Path(temporary)).resolve()
        release = Release(asked.model.resolve(), work)
        start = time.monotonic()
        killed(release, work / "alone", 1, 0, 0.0)
        whole, longest = tree(work / "alone"), 0.7 * (time.monotonic() - start)
        kills = releases = 0
        while kills < asked.kills:
            most = min(IN_A_RELEASE, asked.kills - kills)
            out = work / f"shared-{releases}"
            kills += killed(release, out, asked.workers, most, longest)
            releases += 1
            found = tree(out)
            differing = sorted(
                name for name in {*found, *whole} if found.get(name) != whole.get(name)
            )
            left = [path.name for path in work.iterdir() if path.name.startswith(".")]
            if differing or left:
                print(f"release {releases}: {differing} differ, {left} are left")
                sys.exit(5)
            print(
                f"{kills} kills, {releases} releases of {len(whole)} files, all byte-identical",
                flush=True,
            )


main()
