"""``quantforge doctor``: check the installation, by running each kernel once."""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quantforge import __version__
from quantforge.artifacts.number_text import size
from quantforge.cli import options
from quantforge.cli.console import Console
from quantforge.errors import GateError

Check = tuple[str, str, str]  # PASS | WARN | FAIL, name, detail or what to do
OPTIONAL_PACKAGES = {  # by the extra of this package that needs it: package, purpose
    "eval": ("lm-eval", "eval --tasks"),
    "llamacpp": ("xllamacpp", "eval --engine llama.cpp"),
    "serve": ("starlette", "serve"),
    "bench": ("aiohttp", "bench --url"),
    "report": ("vl-convert-python", "eval --report FILE.html"),
    "gpu": ("triton", "kernels on a GPU"),
    "datasets": ("datasets", "calibration text of the hub, and parquet"),
    "images": ("pillow", "calibration rows with images"),
    "interop": ("compressed_tensors", "compressed-tensors results in transformers"),
    "signing": ("model-signing", "--sign and verify --key"),
}


def doctor(as_json: options.Json = False) -> None:
    """Check versions, kernels (by running them), disk and optional packages; say what is fast here."""
    console = Console(as_json=as_json)
    checks: list[Check] = [("PASS", "quantforge", __version__)]
    for check in (_packages, _cpu_programs, _cpu_kernels, _cuda, _disk):
        checks += check()
    if as_json:
        rows = [
            {"status": status, "check": name, "detail": detail} for status, name, detail in checks
        ]
        console.print_document({"schema": "quantforge.doctor/1", "checks": rows})
    else:
        console.print_table(
            ("check", "status", "detail"), [(name, status, text) for status, name, text in checks]
        )
    failed_checks = [name for status, name, _ in checks if status == "FAIL"]
    if failed_checks:
        raise GateError(f"failed here: {', '.join(failed_checks)}", "the table says what to do")


def _packages() -> list[Check]:
    checks: list[Check] = []
    for name in ("torch", "transformers", "tokenizers", "numpy", "huggingface_hub"):
        checks.append(_version(name, "FAIL", f"pip install {name}"))
    for extra, (name, purpose) in OPTIONAL_PACKAGES.items():
        checks.append(
            _version(
                name.replace("_", "-"), "WARN", f"for {purpose}: pip install 'quantforge[{extra}]'"
            )
        )
    return checks


def _version(name: str, status_if_missing: str, detail: str) -> Check:
    try:
        return ("PASS", name, version(name))
    except PackageNotFoundError:
        return (status_if_missing, name, detail)


def _cpu_programs() -> list[Check]:
    """Return which instruction set compiled CPU kernels use, or why none are compiled."""
    from quantforge_kernels.cpu import instruction_sets, program_cache

    instruction_set, cache_directory = (
        instruction_sets.best_instruction_set(),
        program_cache.cache_folder(),
    )
    if instruction_set is not None:
        cache_text = "not kept on disk" if cache_directory is None else f"kept in {cache_directory}"
        return [
            (
                "PASS",
                "cpu programs",
                f"{instruction_set}, compiled by llvmlite {version('llvmlite')}, {cache_text}",
            )
        ]
    reason = "the processor has no AVX2"
    if not instruction_sets.programs_enabled():
        reason = f"{instruction_sets.SWITCH_VARIABLE}=off"
    return [("WARN", "cpu programs", f"none: {reason}; torch computes, more slowly")]


def _cpu_kernels() -> list[Check]:
    """Compare the 4-bit and 8-bit kernels of this machine with the fallback kernel."""
    import torch

    from quantforge_kernels import fallback
    from quantforge_kernels.matmul_spec import MatmulSpec
    from quantforge_kernels.select import select_kernel

    checks: list[Check] = []
    generator = torch.Generator().manual_seed(0)
    for bits, group in ((4, 128), (8, 256)):
        spec = MatmulSpec(256, 256, bits, group, True, torch.bfloat16, "cpu")
        kernel = select_kernel(spec)
        codes = torch.randint(0, 1 << bits, (256, 256), generator=generator, dtype=torch.uint8)
        scales = torch.rand(256, 256 // group, generator=generator) * 0.01 + 0.001
        weight = {"scales": scales}
        x = torch.randn(1, 256, generator=generator).bfloat16()
        expected = fallback.matmul(x, fallback.prepare(codes, weight, spec), spec)
        result = kernel.matmul(x, kernel.prepare(codes, weight, spec), spec)
        error = float((result - expected).abs().max() / expected.abs().max())
        status = "PASS" if error < 0.02 else "FAIL"
        checks.append((status, f"int{bits} kernel", f"{kernel.name}, relative error {error:.1e}"))
    return checks


def _cuda() -> list[Check]:
    import torch

    if not torch.cuda.is_available():
        return [("WARN", "cuda", "no device: everything runs on the CPU")]
    name = torch.cuda.get_device_name()
    x = torch.ones(64, 64, device="cuda")
    is_right = bool(((x @ x).cpu() == 64).all())
    return [
        (
            "PASS" if is_right else "FAIL",
            "cuda",
            f"{name}: a product {'is right' if is_right else 'is wrong'}",
        )
    ]


def _disk() -> list[Check]:
    free_bytes = shutil.disk_usage(Path.cwd()).free
    return [("PASS" if free_bytes > 1e9 else "WARN", "disk", f"{size(free_bytes)} free here")]
