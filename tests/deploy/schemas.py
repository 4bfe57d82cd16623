"""Writes the schemas of a cluster's objects for kubeconform, as the API server describes them."""

import json
from pathlib import Path
from typing import Any

# Where kubeconform looks for the schema of an object.
SCHEMA_FILE = "{{.ResourceKind}}{{.KindSuffix}}.json"
INT_OR_STRING = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"


def write_schemas(openapi: dict[str, Any], folder: Path) -> None:
    """Writes a file for each kind in `openapi`, the answer of /openapi/v2, and one of all types."""
    folder.mkdir()
    # kubeconform finds no relative references.
    shared = folder / "definitions.json"
    base = f"{shared.as_uri()}#/definitions/"
    definitions = {name: _strict(each, base) for name, each in openapi["definitions"].items()}
    # The description calls them texts; numbers are taken too.
    for name in (INT_OR_STRING, QUANTITY):
        definitions[name] = {"type": ["string", "number"]}
    shared.write_text(json.dumps({"definitions": definitions}))
    for name, each in openapi["definitions"].items():
        for kind in each.get("x-kubernetes-group-version-kind", []):
            # As kubeconform names them: by the first part of the group, if there is one.
            parts = (kind["kind"].lower(), kind["group"].split(".")[0], kind["version"])
            file = "-".join(filter(None, parts))
            (folder / f"{file}.json").write_text(json.dumps({"$ref": base + name}))


def _strict(value: Any, base: str) -> Any:
    """Returns a schema that allows no members beside those that it describes, and that refers to
    the types below `base`."""
    if isinstance(value, list):
        return [_strict(each, base) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("x-kubernetes-int-or-string") or value.get("format") == "int-or-string":
        return {"type": ["string", "integer"]}
    made = {key: _strict(each, base) for key, each in value.items() if key != "properties"}
    if isinstance(reference := value.get("$ref"), str):
        made["$ref"] = reference.replace("#/definitions/", base)
    if members := value.get("properties"):
        # Names of members are no keywords, even where a member is called `properties`.
        made["properties"] = {name: _strict(each, base) for name, each in members.items()}
        if not value.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made
