"""Read what the peers made: decoded as they decode it, healthy for verify; and copy the small ones to the tests.

python scripts/interop_peers/gather.py check SOURCES PEERS
python scripts/interop_peers/gather.py fixtures PEERS tests/fixtures/peers
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from record import digest

FIXTURES = (
    "autoround", "autoround-asym", "bnb-int8", "bnb-nf4", "bnb-nf4-double", "gptqmodel-3bit-skipped", "gptqmodel-awq",
    "gptqmodel-desc-act", "gptqmodel-v1", "gptqmodel-v2-asym", "llama.cpp-q4_k_m", "llama.cpp-q8_0", "llmc-fp8",
    "llmc-fp8-block", "llmc-mxfp4", "llmc-nvfp4", "llmc-w4a16-awq-asym", "llmc-w4a16-gptq", "llmc-w8a8-smooth",
    "mlx-4bit", "mlx-nvfp4",
)  # fmt: skip


def check(sources: Path, peers: Path) -> None:
    """Print one JSON document: for each artifact what its weights and ``verify`` say."""
    rows = {}
    for file in sorted(peers.glob("*.json")):
        record = json.loads(file.read_text())
        artifact = _artifact(peers, file.stem)
        try:
            weights = _weights(artifact, record, record["decoded"])
            findings = _findings(artifact, sources / record["source"])
        except Exception as error:  # whatever stops us is the result
            weights, findings = f"{type(error).__name__}: {error}", []
        rows[file.stem] = {
            "weights": weights, "findings": findings, "made": record["made"], "versions": record["versions"],
        }  # fmt: skip
        sys.stderr.write(f"{file.stem}: {weights}; {findings or 'healthy'}\n")
    sys.stdout.write(json.dumps(rows) + "\n")


def _artifact(peers: Path, name: str) -> Path:
    return peers / name if (peers / name).is_dir() else peers / f"{name}.gguf"


def _weights(artifact: Path, record: dict[str, str], expected: dict[str, str]) -> str:
    """Compare every decoded weight, rounded to the type that the tool decodes to."""
    import torch

    from quantforge.formats.decoded import decode_checkpoint
    from quantforge.formats.open_model import open_model

    checkpoint = decode_checkpoint(open_model(artifact))
    dtype = getattr(torch, record["dtype"])
    found = {
        name.removesuffix(".weight"): digest(checkpoint.read(name).to(dtype).float().numpy())
        for name in checkpoint.layouts
    }
    wrong = [name for name, value in found.items() if expected.get(name) != value]
    return f"{len(wrong)} of {len(found)} differ" if wrong else f"{len(found)} equal"


def _findings(artifact: Path, source: Path) -> list[str]:
    """What ``verify`` says, alone and against the source."""
    from quantforge.verification.verify import verify

    reports = [verify(artifact, given) for given in (None, source)]
    return [
        f"{item.check} {item.where}: {item.detail}"
        for report in reports
        for item in report.findings
    ]


def fixtures(peers: Path, target: Path) -> None:
    """Replace the committed artifacts by new ones."""
    for name in FIXTURES:
        shutil.copy(peers / f"{name}.json", target)
        artifact = _artifact(peers, name)
        if artifact.is_dir():
            shutil.rmtree(target / name, ignore_errors=True)
            shutil.copytree(artifact, target / name, ignore=shutil.ignore_patterns("*.csv"))
        else:
            shutil.copy(artifact, target)


if __name__ == "__main__":
    {"check": check, "fixtures": fixtures}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
