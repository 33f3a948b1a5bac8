"""Low precision: speed of rounding against bitsandbytes and a memory copy, divergence against the libraries' rounding.

    python benchmarks/low_precision.py --model M --outliers M --calibration cal.txt --evaluation eval.txt --out PREFIX

Speed: (bytes in + bytes out) per second of one thread on a 4096x4096 float32 matrix, best of five, over that of a
memory copy in the same run. Divergence: KL to the source in nats per token over windows of 512 tokens. Peers round the
same weights: compressed-tensors by its own `quantize` and `dequantize` with absmax scales, bitsandbytes by its
`quantize_4bit`. Writes PREFIX.json and PREFIX.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from quantforge import api
from quantforge.notation import parse
from quantforge.packers import get_packer
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.runtime.load import load
from quantforge.settings import Settings
from quantforge_calibration.draw import RowRequest, draw
from quantforge_calibration.tokenizer import load_tokenizer

# label: model, method, scheme, format, further options
RUNS = (
    ("int8 row, absmax", "model", "rtn", "int8:row:sym:bf16", "compressed-tensors", {"scales": "absmax"}),
    ("int8 row, search", "model", "rtn", "int8:row:sym:bf16", "compressed-tensors", {}),
    ("fp8 row, absmax", "model", "rtn", "fp8:row", "compressed-tensors", {"scales": "absmax"}),
    ("fp8 row, search", "model", "rtn", "fp8:row", "compressed-tensors", {}),
    ("nf4, absmax", "model", "rtn", "nf4", "bnb", {"scales": "absmax"}),
    ("nf4, search", "model", "rtn", "nf4", "bnb", {}),
    ("nf4 double, search", "model", "rtn", "nf4:g64:sym:double", "bnb", {}),
    ("nf4, gptq", "model", "gptq", "nf4", "bnb", {}),
    ("fp4, absmax", "model", "rtn", "fp4", "bnb", {"scales": "absmax"}),
    ("fp4, search", "model", "rtn", "fp4", "bnb", {}),
    ("nvfp4, absmax", "model", "rtn", "nvfp4", "compressed-tensors", {"scales": "absmax"}),
    ("nvfp4, search without data", "model", "rtn", "nvfp4", "compressed-tensors", {"source": "none"}),
    ("nvfp4, search", "model", "rtn", "nvfp4", "compressed-tensors", {}),
    ("nvfp4, gptq", "model", "gptq", "nvfp4", "compressed-tensors", {}),
    ("mxfp4, absmax", "model", "rtn", "mxfp4", "compressed-tensors", {"scales": "absmax"}),
    ("mxfp4, search", "model", "rtn", "mxfp4", "compressed-tensors", {}),
    ("mxfp8, absmax", "model", "rtn", "mxfp8", "compressed-tensors", {"scales": "absmax"}),
    ("mxfp8, search", "model", "rtn", "mxfp8", "compressed-tensors", {}),
    ("W8A8", "model", "rtn", "W8A8", "compressed-tensors", {"scales": "absmax"}),
    ("W8A8 with outliers", "outliers", "rtn", "W8A8", "compressed-tensors", {"scales": "absmax"}),
    ("W8A8 with outliers, smooth", "outliers", "smooth", "W8A8", "compressed-tensors", {"scales": "absmax"}),
    ("LLM.int8()", "model", "rtn", "LLM_INT8", "bnb", {"scales": "absmax"}),
    ("LLM.int8() with outliers", "outliers", "rtn", "LLM_INT8", "bnb", {"scales": "absmax"}),
    ("LLM.int8() with outliers, gptq", "outliers", "gptq", "LLM_INT8", "bnb", {}),
)  # fmt: skip


def main() -> None:
    """Measure and write."""
    options = arguments()
    torch.set_num_threads(1)
    document = {"setting": setting(options), "speed": speed()}
    rows = draw(
        RowRequest(str(options.evaluation), options.windows, 512, 0), load_tokenizer(options.model)
    ).ids
    references = {"model": log_probabilities(options.model, rows)}
    references["outliers"] = log_probabilities(options.outliers, rows)
    document["divergence"] = [
        *peers(options.model, rows, references["model"]),
        *(ours(options, run, rows, references[run[1]]) for run in RUNS if options.only in run[0]),
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(report(document))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "outliers", "calibration", "evaluation", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--only", default="", help="runs whose label contains this")
    return parser.parse_args()


def setting(options: argparse.Namespace) -> dict[str, object]:
    """What was measured with what."""
    names = ("torch", "bitsandbytes", "compressed-tensors", "transformers")
    return {
        "models": f"{options.model.name}, {options.outliers.name}",
        "calibration": f"{options.calibration.name}, {options.samples} rows of {options.length}",
        "evaluation": f"{options.evaluation.name}, {options.windows} windows of 512",
        "machine": platform.machine(),
        **{name: version(name) for name in names},
    }


def best(work: Callable[[], object]) -> float:
    """Least seconds of five calls, after one that compiles."""
    work()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def speed() -> list[dict[str, object]]:
    """Bytes per second of rounding, over those of a copy."""
    import bitsandbytes.functional as functional

    weight = torch.randn(4096, 4096)
    other = torch.empty_like(weight)
    count, copy = weight.numel(), best(lambda: other.copy_(weight))
    copied = 8 * count / copy

    def rounding(text: str) -> Callable[[], object]:
        scheme = parse(text)
        packer = get_packer(scheme)

        def work() -> object:
            codes = packer.encode(weight, packer.fit(weight, scheme), scheme)
            if scheme.bits == 8:
                return codes
            flat = codes.flatten()
            return (flat[::2] << 4) | flat[1::2]

        return work

    measured = [
        ("memory copy", copy, 8.0),
        (
            "nf4, bitsandbytes",
            best(lambda: functional.quantize_4bit(weight, quant_type="nf4")),
            4.5625,
        ),
        ("nf4", best(rounding("nf4:g64:sym:f32")), 4.5625),
        ("fp8 row", best(rounding("fp8:row:sym:f32")), 5.0),
        ("int8 row", best(rounding("int8:row:sym:f32")), 5.0),
    ]
    return [
        {"what": what, "seconds": seconds, "gigabytes_per_second": size * count / seconds / 1e9,
         "over_copy": size * count / seconds / copied}
        for what, seconds, size in measured
    ]  # fmt: skip


@torch.no_grad()
def log_probabilities(path: Path, rows: torch.Tensor) -> list[torch.Tensor]:
    """Of every window, float32."""
    model = load(path).model
    return [torch.log_softmax(model(row[None]).logits[0], -1) for row in rows]


@torch.no_grad()
def divergence(model: torch.nn.Module, rows: torch.Tensor, reference: list[torch.Tensor]) -> float:
    """KL divergence in nats per token."""
    found = []
    for row, before in zip(rows, reference, strict=True):
        after = torch.log_softmax(model(row[None]).logits[0], -1)
        found.append(float((before.exp() * (before - after)).sum(-1, dtype=torch.float64).mean()))
    return sum(found) / len(found)


def peers(path: Path, rows: torch.Tensor, reference: list[torch.Tensor]) -> list[dict[str, object]]:
    """The libraries' own rounding of the same weights."""
    import bitsandbytes.functional as functional
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    def row_wise(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
        form = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="channel")

        def work(weight: torch.Tensor) -> torch.Tensor:
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
            scale, zero = calculate_qparams(low, high, form)
            return fake_quantize(weight, scale, zero, form)

        return work

    def blocks(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda weight: functional.dequantize_4bit(
            *functional.quantize_4bit(weight, quant_type=kind)
        )

    work = {
        "compressed-tensors int8 row": row_wise("int"),
        "compressed-tensors fp8 row": row_wise("float"),
        "bitsandbytes nf4": blocks("nf4"),
        "bitsandbytes fp4": blocks("fp4"),
    }
    found = []
    for label, function in work.items():
        model = load(path).model
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and "layers" in name:
                module.weight.data = function(module.weight.data)
        found.append({"what": label, "kl": divergence(model, rows, reference)})
        print(json.dumps(found[-1]), flush=True)
    return found


def ours(
    options: argparse.Namespace, run: tuple, rows: torch.Tensor, reference: list[torch.Tensor]
) -> dict[str, object]:
    """One run of ours."""
    label, which, method, scheme, form, given = run
    given = dict(given)
    source = given.pop("source", str(options.calibration))
    calibration = CalibrationOptions(source, options.samples, options.length)
    recipe = Recipe(method, scheme=scheme, format=form, calibration=calibration, **given)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        done = api.quantize(str(getattr(options, which)), recipe, out, Settings(threads=1))
        seconds = time.perf_counter() - start
        found = divergence(load(out).model, rows, reference)
    gc.collect()
    result = {
        "what": label,
        "scheme": scheme,
        "kl": found,
        "bits": done.plan.bits_per_weight,
        "seconds": seconds,
    }
    print(json.dumps(result), flush=True)
    return result


def report(document: dict) -> str:
    """Two tables."""
    lines = [f"- {key}: {value}" for key, value in document["setting"].items()]
    lines += [
        "",
        "| rounding 4096x4096 float32 | seconds | GB/s | of a copy |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['what']} | {row['seconds']:.4f} | {row['gigabytes_per_second']:.2f} | {row['over_copy']:.3f} |"
        for row in document["speed"]
    ]
    lines += ["", "| | KL, nats per token | bits per weight |", "|---|---|---|"]
    lines += [
        f"| {row['what']} | {row['kl']:.6f} | {row.get('bits', float('nan')):.3f} |"
        for row in document["divergence"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
