"""A run on a model that contains code opens no socket, process or foreign file, as an audit hook shows."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantforge import api
from quantforge.recipe import Recipe
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests.conftest import NUMBA_CACHE_VARIABLE, Tiny
from tests.runs import copy_model, fast_recipe, file_digests, fork_child, recipe, wait_for_exit_code

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGING = {
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.chmod",
    "os.truncate",
}
NETWORK = {
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendto",
    "socket.bind",
}
PROCESS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"}
EVIL = "raise SystemExit('code of the model ran')\n"


class Audit:
    """Collects violations while ``watching``: paths that are written must lie under ``writable_directories``."""

    def __init__(self, model: Path, secret: Path, writable_directories: tuple[Path, ...]) -> None:
        self.model, self.secret, self.writable_directories = model, secret, writable_directories
        self.violations: list[str] = []
        self.opened: set[str] = set()
        self.watching = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        self.watching = False  # what the hook itself does is not looked at
        try:
            self.violations += self.judged(event, arguments)
        finally:
            self.watching = True

    def judged(self, event: str, arguments: tuple[Any, ...]) -> Iterator[str]:
        if event in NETWORK:
            yield f"{event} {arguments[1:]}"
        elif event in PROCESS:
            yield f"{event} {arguments[:2]}"
        elif event in CHANGING:
            paths = [item for item in arguments[:2] if isinstance(item, str | bytes | os.PathLike)]
            folders = [item for item in arguments[-len(paths) :] if isinstance(item, int)]
            for path, folder in zip(paths, folders or [-1] * len(paths), strict=bool(paths)):
                if not self.allowed(target := absolute(path, folder)):
                    yield f"{event} {target}"
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path, flags = absolute(arguments[0]), arguments[2]
            self.opened.add(str(path))
            if isinstance(flags, int) and flags & WRITING and not self.allowed(path):
                yield f"writes {path}"
            if path == self.secret or (path.is_relative_to(self.model) and path.suffix == ".py"):
                yield f"opens {path}"

    def allowed(self, path: Path) -> bool:
        return path == Path(os.devnull) or any(
            path.is_relative_to(directory) for directory in self.writable_directories
        )


def absolute(path: Any, folder: int = -1) -> Path:
    """Return the absolute path of a path that may be relative to an open directory."""
    base = Path(f"/proc/self/fd/{folder}").resolve() if folder >= 0 else Path.cwd()
    return Path(os.path.normpath(base / os.fsdecode(path)))


@pytest.fixture
def hostile(tiny: Tiny, tmp_path: Path) -> Path:
    """A model with Python code, keys that load it, a pickle, and a link to a file outside."""
    model = copy_model(tiny("llama-wide"), tmp_path / "model")
    (tmp_path / "secret.txt").write_text("secret")
    (model / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (model / "modeling_evil.py").write_text(EVIL)
    (model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for name in ("config.json", "tokenizer_config.json"):
        document = json.loads((model / name).read_text())
        document["auto_map"] = {
            "AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model",
            "AutoTokenizer": ["modeling_evil.Tokenizer", None],
        }  # fmt: skip
        document |= {"trust_remote_code": True, "_attn_implementation_internal": "evil/kernel",
                     "custom_pipelines": {"x": {"impl": "modeling_evil.X"}}}  # fmt: skip
        (model / name).write_text(json.dumps(document))
    return model


def run_every_verb(model: Path, out: Path, audit: Audit) -> None:
    """Plan, quantize, export and verify under the audit hook."""
    sys.addaudithook(audit.hook)
    audit.watching = True
    settings = Settings(offline=True)
    api.plan(str(model), recipe(), Settings(offline=True))
    api.quantize(str(model), fast_recipe("awq+gptq", scheme="int4:g32:asym"), out / "a", settings)
    api.quantize(
        str(model), fast_recipe("gptq", type="Q4_0", format="gguf"), out / "b.gguf", settings
    )
    api.export(str(out / "a"), Recipe(format="mlx"), out / "c", settings, allow_inexact=True)
    report = verify(out / "a", model)
    audit.watching = False
    problems = audit.violations + [f"{item.check} {item.where}" for item in report.findings]
    if problems or not any(name.endswith("model.safetensors") for name in audit.opened):
        sys.stderr.write("\n".join(problems) or "the hook saw nothing")
        sys.exit(9)


def test_a_run_opens_no_socket_process_or_foreign_file(hostile, tmp_path):
    out = tmp_path / "results"
    out.mkdir()
    before = file_digests(hostile)
    # Loops are kept by the tests alone (`tests.conftest`).
    writable_directories = (
        out,
        Path(tempfile.gettempdir()) / "torchinductor",
        Path(os.environ[NUMBA_CACHE_VARIABLE]),
    )
    audit = Audit(hostile, tmp_path / "secret.txt", writable_directories)

    def work() -> None:
        sys.dont_write_bytecode = True  # of modules that no test has imported yet
        run_every_verb(hostile, out, audit)

    code = wait_for_exit_code(fork_child(work, tmp_path / "errors"))
    assert code == 0, (tmp_path / "errors").read_text()
    assert file_digests(hostile) == before
    copied_names = {Path(name).name for name in file_digests(out)}
    assert not copied_names & {"modeling_evil.py", "pytorch_model.bin", "notes.txt"}
    assert "secret" not in {path.read_text(errors="ignore") for path in out.rglob("*.txt")}


def test_the_audit_hook_reports_each_violation(tmp_path):
    """A write, a socket and a process each give a violation, so that the test above can fail."""
    audit = Audit(tmp_path / "m", tmp_path / "secret.txt", (tmp_path / "out",))
    violations = [
        *audit.judged("open", (str(tmp_path / "else"), "w", os.O_WRONLY | os.O_CREAT)),
        *audit.judged("open", (str(tmp_path / "secret.txt"), "r", os.O_RDONLY)),
        *audit.judged("open", (str(tmp_path / "m" / "x.py"), "r", os.O_RDONLY)),
        *audit.judged("socket.connect", (None, ("127.0.0.1", 80))),
        *audit.judged("subprocess.Popen", ("sh", ["sh"])),
        *audit.judged("os.rename", (str(tmp_path / "out" / "a"), str(tmp_path / "b"), -1, -1)),
    ]
    assert len(violations) == 6
    assert not list(audit.judged("open", (str(tmp_path / "out" / "x"), "w", os.O_WRONLY)))
