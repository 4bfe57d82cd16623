"""Writes a package `sglang` that has exactly the seams of the shim's list, for their tests."""

import re
from collections.abc import Iterable
from pathlib import Path

from berth_shim.seams import SEAMS, Kind, Seam

VERSION = "9.9.9"
REGISTRY = "sglang.srt.plugins.hook_registry"
# The registry of hooks, which a test reads afterwards.
HOOKS = '''
HOOKED = []

class HookType:
    AFTER, AROUND, BEFORE = "after", "around", "before"

class HookRegistry:
    @classmethod
    def register(cls, target, hook, hook_type="after", *, source=None):
        HOOKED.append((target, hook_type, hook))
'''


class Tree:
    """The package's folder. `write` writes it anew, from other seams."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.package = folder / "sglang"

    def write(self, seams: Iterable[Seam] = SEAMS) -> None:
        modules: dict[str, dict[str, dict]] = {}
        for seam in seams:
            # Where an object is built from several classes, the first one has all fields.
            module, name = seam.paths[0]
            owner, _, method = name.partition(".")
            definition = modules.setdefault(module, {}).setdefault(
                owner, {"fields": [], "methods": {}, "function": None})
            if seam.kind is Kind.FIELDS:
                definition["fields"] += [need.split("|")[0] for need in seam.needs]
            elif method:
                definition["methods"][method] = seam.needs
            else:
                definition["function"] = seam.needs
        sources = {module: "\n".join(_source(*each) for each in named.items())
                   for module, named in modules.items()}
        # A registry without a seam has nothing to record.
        if {each for each in SEAMS if each.paths[0][0] == REGISTRY} <= {*seams}:
            sources[REGISTRY] = HOOKS
        self._write_files({"sglang": f"__version__ = {VERSION!r}\n"} | sources)

    def _write_files(self, sources: dict[str, str]) -> None:
        wanted = set()
        for module, source in sources.items():
            path = self.folder.joinpath(*module.split("."))
            is_package = module == "sglang" or any(
                other.startswith(f"{module}.") for other in sources
            )
            file = path / "__init__.py" if is_package else path.with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            wanted.add(file)
            if not file.is_file() or file.read_text() != source:
                file.write_text(source)
        for file in self.package.rglob("*.py"):
            if file not in wanted:
                file.unlink()


def _source(name: str, definition: dict) -> str:
    fields = list(dict.fromkeys(definition["fields"]))
    if definition["function"] is not None:
        return f"def {name}({_parameters(definition['function'])}): ..."
    # Half of the fields are declared, the other half is assigned by a method.
    lines = [f"class {name}:", *(f"    {each}: int" for each in fields[::2])]
    lines += ["    def _assign(self):", "        self.nothing = 0",
              *(f"        self.{each} = 0" for each in fields[1::2])]
    for method, needs in definition["methods"].items():
        lines.append(f"    def {method}({_parameters(needs)}): ...")
    return "\n".join(lines)


def _parameters(needs: tuple[str, ...]) -> str:
    by_name = [need.split("=")[0] for need in needs if need.endswith("=")]
    in_order = [need for need in needs if not need.endswith("=")]
    only_named = ["*", *(f"{each}=None" for each in by_name)] if by_name else []
    return ", ".join([*in_order, *only_named])


def lacking(seam: Seam, how: str) -> list[Seam]:
    """Returns all seams, but without this one, or with its fields or first parameter renamed."""
    if how == "gone":
        changed = []
    else:
        first = 1 if seam.needs[:1] == ("self",) else 0
        last = len(seam.needs) if seam.kind is Kind.FIELDS else first + 1
        renamed = [re.sub(r"\w+", r"other_\g<0>", need) for need in seam.needs[first:last]]
        changed = [seam._replace(needs=(*seam.needs[:first], *renamed, *seam.needs[last:]))]
    return [each for each in SEAMS if each is not seam] + changed
