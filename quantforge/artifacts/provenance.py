"""Provenance files for supply-chain tools, made from the manifest: unsigned, without time or place.

* An in-toto statement v1 with a SLSA provenance v1 predicate (https://slsa.dev/spec/v1.0/provenance): the files of the
  result as subjects, the recipe as external parameters, the source's files and the packages as resolved dependencies.
* A CycloneDX 1.6 bill of materials (ECMA-424): the result as a machine-learning model whose ancestor is the source, the
  calibration text as data.

`quantforge.artifacts.signing` signs the directory that contains them. The manifest lists both as outputs. They list
every other file, but neither each other nor the manifest.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantforge import __version__
from quantforge.artifacts.manifest import NAME, VERSIONED_PACKAGES, file_digests
from quantforge.files.output_names import MANIFEST_SUFFIX
from quantforge.files.previous_output import SIGNATURE_SUFFIX

STATEMENT, BILL = "provenance.intoto.json", "bom.cdx.json"
BUILD_TYPE = "quantforge/quantize/v1"


def provenance(document: Mapping[str, Any], stage: Path, name: str) -> dict[str, bytes]:
    """Return the two provenance files, by name, for a result whose files are in ``stage``.

    Args:
        document: the manifest without its outputs (see `quantforge.artifacts.manifest.build_manifest`).
        stage: directory with every file of the result except the manifest.
        name: name of the result.
    """
    # Possibly left by an interrupted publication
    excluded_endings = (NAME, MANIFEST_SUFFIX, STATEMENT, BILL, SIGNATURE_SUFFIX)
    files = [
        path
        for path in stage.rglob("*")
        if path.is_file() and not path.name.endswith(excluded_endings)
    ]
    outputs = file_digests(stage, files)
    documents = {
        STATEMENT: in_toto_statement(document, outputs),
        BILL: bill_of_materials(document, outputs, name),
    }
    return {
        key: (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
        for key, value in documents.items()
    }


def in_toto_statement(document: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an in-toto statement: these files were made with that recipe from those files."""
    source, versions = document["source"], document["versions"]
    files = [
        _resource(f"{source['model']}/{name}", entry)
        for name, entry in sorted(source["files"].items())
    ]
    packages = [
        {"name": name, "annotations": {"version": versions[name]}} for name in VERSIONED_PACKAGES
    ]
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {"recipe": document["recipe"], "model": source["model"]},
        "internalParameters": {"versions": versions},
        "resolvedDependencies": [*files, *packages],
    }
    builder = {"id": f"quantforge/{__version__}"}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [_resource(name, entry) for name, entry in sorted(outputs.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {"buildDefinition": definition, "runDetails": {"builder": builder}},
    }


def _resource(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": entry["sha256"]}}


def bill_of_materials(
    document: Mapping[str, Any], outputs: Mapping[str, Any], name: str
) -> dict[str, Any]:
    """Return a CycloneDX bill of materials: a model, its ancestor, its calibration text and the tools."""
    source, kind = document["source"], "machine-learning-model"
    ancestor = {"type": kind, "name": source["model"], "components": _files(source["files"])}
    if "revision" in source:
        ancestor["version"] = source["revision"]
    model = {
        "type": kind,
        "bom-ref": "model",
        "name": name,
        "pedigree": {"ancestors": [ancestor]},
        "components": _files(outputs),
        "modelCard": {
            "modelParameters": {
                "modelArchitecture": document["model_type"],
                "approach": {"type": "self-supervised"},
            }
        },
        "properties": [
            {"name": f"quantforge:{key}", "value": str(document[key])}
            for key in ("method", "format", "bits_per_weight")
        ],
    }
    tools = [{"type": "application", "name": "quantforge", "version": __version__}]
    versions = document["versions"]
    tools += [
        {"type": "library", "name": key, "version": versions[key]} for key in VERSIONED_PACKAGES
    ]
    body = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": model, "tools": {"components": tools}},
        "components": _calibration(document["calibration"]),
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return {**body, "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, digest).urn}


def bom_result_name(document: Mapping[str, Any]) -> str:
    """Return the name of the result in a bill of materials, "" if there is none."""
    value: Any = document
    for key in ("metadata", "component", "name"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else ""


def _files(entries: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": entry["sha256"]}]}
        for name, entry in sorted(entries.items())
    ]


def _calibration(described: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if described is None:
        return []
    return [
        {
            "type": "data",
            "bom-ref": "calibration",
            "name": "calibration rows",
            "hashes": [{"alg": "SHA-256", "content": described["digest"]}],
            "data": [{"type": "dataset", "name": name} for name in described["sources"]],
        }
    ]
