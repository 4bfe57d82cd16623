"""Writes JSON schemas of a cluster's objects for kubeconform, from the API server's own description."""

import json
from pathlib import Path
from typing import Any

# Where kubeconform looks for the schema of an object.
SCHEMA_FILE = "{{.ResourceKind}}{{.KindSuffix}}.json"
DEFINITIONS = "definitions.json"
INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"


def write_schemas(openapi: dict[str, Any], folder: Path) -> None:
    """Writes a file for each kind of `openapi`, the answer of /openapi/v2, and one with all types."""
    folder.mkdir()
    definitions = {name: _strict(each) for name, each in openapi["definitions"].items()}
    # The description calls them texts; numbers are taken too.
    for name in (INT_OR_STRING, QUANTITY):
        definitions[name] = {"type": ["string", "number"]}
    (folder / DEFINITIONS).write_text(json.dumps({"definitions": definitions}))
    for name, each in openapi["definitions"].items():
        for kind in each.get("x-kubernetes-group-version-kind", []):
            # As kubeconform names them: by the first part of the group, if there is one.
            parts = (kind["kind"].lower(), kind["group"].split(".")[0], kind["version"])
            file = "-".join(filter(None, parts))
            (folder / f"{file}.json").write_text(json.dumps({"$ref": f"{DEFINITIONS}#/definitions/{name}"}))


def _strict(value: Any) -> Any:
    """Returns a schema that allows no members beside those that it describes."""
    if isinstance(value, list):
        return [_strict(each) for each in value]
    if not isinstance(value, dict):
        return value
    made = {key: _strict(each) for key, each in value.items()}
    if isinstance(reference := value.get("$ref"), str):
        made["$ref"] = reference.replace("#/definitions/", f"{DEFINITIONS}#/definitions/")
    if "properties" in value and "additionalProperties" not in value:
        if not value.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    if value.get("x-kubernetes-int-or-string") or value.get("format") == "int-or-string":
        return {"type": ["string", "integer"]}
    return made
