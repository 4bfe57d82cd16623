"""Looks for the seams in an engine, and says which functions of the shim are off.

The version of SGLang plays no part. The hooks are installed by what `ImportedEngine` finds at the
engine's start. `EngineSources` imports nothing, for `python -m berth_shim`; the imported engine
needs it too, because a class doesn't show the fields that its methods assign to `self`.
"""

import ast
import importlib
import inspect
import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .seams import FUNCTIONS, SEAMS, Kind, Seam

_log = logging.getLogger(__name__)

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Parameters(NamedTuple):
    """The parameters of a function, without `*args` and `**kwargs`."""

    # May be passed by position, in order.
    positional: list[str]
    # May be passed by name.
    named: set[str]
    required: set[str]


class Engine(Protocol):
    """A way to look at an engine. Both methods return None for what doesn't exist."""

    def parameters(self, module: str, name: str) -> Parameters | None: ...

    def fields(self, module: str, name: str, wanted: Iterable[str]) -> set[str] | None:
        """Returns at least those of the `wanted` names that the class has."""


def find_missing(engine: Engine, seams: Iterable[Seam] = SEAMS) -> dict[str, list[str]]:
    """Returns the missing seams by function. In a scheduler, nothing works without `reports`."""
    missing: dict[str, list[str]] = {}
    for seam in seams:
        if problem := find_problem(engine, seam):
            for function in seam.functions:
                missing.setdefault(function, []).append(problem)
    for function in FUNCTIONS:
        if "reports" in missing and function != "trimming":
            missing.setdefault(function, missing["reports"])
    return {function: missing[function] for function in FUNCTIONS if function in missing}


def off_reasons(engine: Engine, version: str, functions: Iterable[str]) -> dict[str, str]:
    """Returns why functions of the shim are off, of those named, in a text for an operator."""
    seams = [seam for seam in SEAMS if not {*functions}.isdisjoint(seam.functions)]
    reasons = {}
    for function, problems in find_missing(engine, seams).items():
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        reasons[function] = f"{problems[0]} on SGLang {version}{more}"
    return {function: why for function, why in reasons.items() if function in functions}


def log_off(reasons: dict[str, str]) -> None:
    """Tells the engine's log why functions are off."""
    for function, reason in reasons.items():
        _log.warning("a function of Berth's shim is off: function=%s reason=%s", function, reason)


def find_problem(engine: Engine, seam: Seam) -> str:
    """Returns what is missing of a seam; empty if nothing is."""
    if seam.kind is Kind.FIELDS:
        wanted = [name for need in seam.needs for name in need.split("|")]
        found = [engine.fields(module, name, wanted) for module, name in seam.paths]
        if not any(each is not None for each in found):
            return f"{_shown(seam)} is missing"
        names = set().union(*(each for each in found if each))
        lacking = [need for need in seam.needs if names.isdisjoint(need.split("|"))]
        return f"{_shown(seam)}.{lacking[0]} is missing" if lacking else ""
    [(module, name)] = seam.paths
    parameters = engine.parameters(module, name)
    if parameters is None:
        return f"{_shown(seam)} is missing"
    in_order = [need for need in seam.needs if not need.endswith("=")]
    by_name = [need.replace("=", "").split("|") for need in seam.needs if need.endswith("=")]
    has_named = not any(parameters.named.isdisjoint(names) for names in by_name)
    has_all = parameters.positional[: len(in_order)] == in_order and has_named
    asks_more = parameters.required - {*in_order}.union(*by_name)
    if has_all and not (seam.kind is Kind.CALL and asks_more):
        return ""
    return f"{_shown(seam)} has other parameters"


def _shown(seam: Seam) -> str:
    """Returns a seam's name for an operator: the class or function, without its module."""
    return seam.paths[0][1]


class ImportedEngine:
    """The engine whose modules this process can import."""

    def __init__(self) -> None:
        import sglang

        self._sources = EngineSources(Path(sglang.__file__).parent)

    def parameters(self, module: str, name: str) -> Parameters | None:
        if not callable(function := _imported(module, name)):
            return None
        try:
            signature = inspect.signature(function)
        except ValueError:
            # Some functions that aren't written in Python have no signature.
            return None
        positional, named, required = [], set(), set()
        for parameter in signature.parameters.values():
            if parameter.kind in _STARRED:
                continue
            if parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append(parameter.name)
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                named.add(parameter.name)
            if parameter.default is parameter.empty:
                required.add(parameter.name)
        return Parameters(positional, named, required)

    def fields(self, module: str, name: str, wanted: Iterable[str]) -> set[str] | None:
        found = _imported(module, name)
        if not inspect.isclass(found):
            return None
        names = {each for each in wanted if hasattr(found, each)}
        for base in found.__mro__:
            names |= set(getattr(base, "__annotations__", ()))
            if not names.issuperset(wanted):
                names |= self._sources.members(base.__module__, base.__qualname__) or frozenset()
        return names


def _imported(module: str, name: str) -> Any:
    """Returns what has this name in the module; None if there is no such module or name."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


class EngineSources:
    """The source files of an engine, whose package `sglang` is this folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._tree = cache(self._read_tree)
        self.members = cache(self._members)

    def parameters(self, module: str, name: str) -> Parameters | None:
        owner, _, method = name.rpartition(".")
        node = self._method(module, owner, method) if owner else self._find(module, name)
        if isinstance(node, ast.ClassDef):
            return Parameters(["self"], {"self"}, {"self"}) if owner else _constructor(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        listed, is_bound = node.args, _has_decorator(node, "classmethod")
        positional = [each.arg for each in (*listed.posonlyargs, *listed.args)]
        without_default = positional[: len(positional) - len(listed.defaults)]
        required = set(without_default[1:] if is_bound else without_default)
        required |= {each.arg for each, default in zip(listed.kwonlyargs, listed.kw_defaults)
                     if default is None}
        named = {each.arg for each in (*listed.args, *listed.kwonlyargs)}
        return Parameters(positional[1:] if is_bound else positional, named, required)

    def _method(self, module: str, owner: str, method: str) -> ast.AST | None:
        """Returns a method's definition, also a base's; the class itself for a constructor that no
        class defines."""
        if not isinstance(node := self._find(module, owner), ast.ClassDef):
            return None
        if found := self._find(module, f"{owner}.{method}"):
            return found
        inherited = (self._method(*origin, method) for origin in self._bases(module, node))
        return next(filter(None, inherited), node if method == "__init__" else None)

    def fields(self, module: str, name: str, wanted: Iterable[str]) -> set[str] | None:
        if not isinstance(node := self._find(module, name), ast.ClassDef):
            return None
        names = set(self.members(module, name) or ())
        for origin in self._bases(module, node):
            names |= self.fields(*origin, wanted) or set()
        return names

    def _bases(self, module: str, node: ast.ClassDef) -> list[tuple[str, str]]:
        """Returns the modules and names of a class's bases, as far as they are known."""
        named = [base.id for base in node.bases if isinstance(base, ast.Name)]
        origins = [self._origin(module, name) for name in named]
        return [origin for origin in origins if origin]

    def _members(self, module: str, name: str) -> frozenset[str] | None:
        """Returns what a class itself defines, in its body and on `self`; None without source."""
        if not isinstance(node := self._find(module, name), ast.ClassDef):
            return None
        names = {each.name for each in node.body
                 if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
        names |= {target.id for each in node.body for target in _targets(each)
                  if isinstance(target, ast.Name)}
        return frozenset(names) | {
            target.attr
            for each in ast.walk(node) for target in _targets(each)
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"
        }

    def _read_tree(self, module: str) -> ast.Module | None:
        path = self._folder.joinpath(*module.split(".")[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if module.startswith("sglang.") and file.is_file():
                return ast.parse(file.read_bytes())
        return None

    def _find(self, module: str, name: str) -> ast.AST | None:
        """Returns the definition of a class or function."""
        node: ast.AST | None = self._tree(module)
        for part in name.split("."):
            found = [each for each in getattr(node, "body", ())
                     if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                     and each.name == part]
            # The last definition counts, as in Python.
            node = found[-1] if found else None
        return node

    def _origin(self, module: str, name: str) -> tuple[str, str] | None:
        """Returns the module and the name of a class that a module defines or imports."""
        if self._find(module, name):
            return module, name
        for node in getattr(self._tree(module), "body", ()):
            if isinstance(node, ast.ImportFrom) and not node.level:
                for each in node.names:
                    if (each.asname or each.name) == name:
                        return str(node.module), each.name
        return None


def _constructor(node: ast.ClassDef) -> Parameters:
    """Returns the parameters of a class whose annotated fields are its parameters."""
    fields = [each for each in node.body
              if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    names = [each.target.id for each in fields]
    required = {each.target.id for each in fields if each.value is None}
    is_keyword_only = any(each.arg == "kw_only" for each in node.keywords)
    return Parameters([] if is_keyword_only else names, set(names), required)


def _targets(node: ast.AST) -> list[ast.expr]:
    """Returns what a statement assigns to."""
    match node:
        case ast.Assign(targets=targets):
            return [each for target in targets for each in _unpacked(target)]
        case ast.AnnAssign(target=target):
            return [target]
    return []


def _unpacked(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def _has_decorator(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in node.decorator_list)
