"""Tests that the shim finds its seams, and that a missing one switches off only what needs it.

Most tests use a package `sglang` that has exactly the seams of the shim's list (`seamed.py`). They
look at it as both the running engine and `python -m berth_shim` do."""

import ast
import importlib
import json
import operator
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import berth_shim
import pytest
from berth_shim.probe import EngineSources, ImportedEngine, find_missing, off_reasons
from berth_shim.seams import FUNCTIONS, SEAMS, Kind, Seam
from berth_shim.trimmer import Trimmer

from .seamed import VERSION, Tree, lacking

SHIM = Path(berth_shim.__file__).parent
SCHEDULER_FUNCTIONS = [each for each in FUNCTIONS if each != "trimming"]


def forget_engine() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture
def tree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    """The package, which this process can import."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget_engine()
    yield Tree(folder)
    forget_engine()


def missing(tree: Tree) -> dict[str, list[str]]:
    """Returns what is missing. Both ways to look must see the same."""
    forget_engine()
    by_import = find_missing(ImportedEngine())
    assert find_missing(EngineSources(tree.package)) == by_import
    return by_import


def expected_off(seam: Seam) -> set[str]:
    """Returns the functions that are off without the seam."""
    off = set(seam.functions)
    return off | set(SCHEDULER_FUNCTIONS) if "reports" in off else off


def test_an_engine_with_all_seams_has_all_functions(tree: Tree) -> None:
    tree.write()
    assert missing(tree) == {}


def changes() -> list[tuple[Seam, str]]:
    """Returns each seam with the ways in which it can be missing."""
    gone = [(seam, "gone") for seam in SEAMS if not seam.path.endswith("__init__")]
    return gone + [(seam, "renamed") for seam in SEAMS if seam.needs not in ((), ("self",))]


@pytest.mark.parametrize(
    "seam, how", changes(), ids=lambda value: value if isinstance(value, str) else value.path
)
def test_a_missing_seam_switches_off_what_needs_it(tree: Tree, seam: Seam, how: str) -> None:
    tree.write(lacking(seam, how))
    found = missing(tree)
    assert set(found) == expected_off(seam)
    [problem] = {problem for problems in found.values() for problem in problems}
    assert problem.startswith(seam.paths[0][1]), problem


def test_a_parameter_that_a_call_lacks_switches_off_but_a_hook_takes_it(tree: Tree) -> None:
    for name, is_off in (("release_kv_cache", True), ("Session.finish_req", False)):
        [seam] = [each for each in SEAMS if each.paths[0][1] == name]
        in_order = [need for need in seam.needs if not need.endswith("=")]
        by_name = [need for need in seam.needs if need.endswith("=")]
        more = seam._replace(needs=(*in_order, "more", *by_name))
        tree.write([more if each is seam else each for each in SEAMS])
        assert bool(missing(tree)) == is_off, name


def test_either_of_two_names_is_enough(tree: Tree) -> None:
    older = {"checkpoint=|is_insert=": "is_insert=", "lock|last_node": "last_node",
             "lock|lock_receipt": "lock_receipt", "num_dp_ranks|dp_size": "dp_size",
             "lock|swa_prefix_lock_released": "swa_prefix_lock_released", "dp_rank|ps": "ps"}
    used = {need for seam in SEAMS for need in seam.needs if "|" in need}
    assert used == set(older)
    tree.write([seam._replace(needs=tuple(older.get(need, need) for need in seam.needs))
                for seam in SEAMS])
    assert missing(tree) == {}


def test_inherited_and_redefined_parts_count(tree: Tree) -> None:
    seams = (
        Seam(Kind.FIELDS, "sglang.a:Child", ("own", "inherited", "assigned"), ("reports",)),
        Seam(Kind.CALL, "sglang.a:Child.method", ("self", "x"), ("reports",)),
        Seam(Kind.HOOK, "sglang.a:Child.__init__", ("self",), ("reports",)),
    )
    tree.write(())
    (tree.package / "b.py").write_text(
        "class Base:\n    inherited: int\n    def method(self, x): self.assigned, self.b = x, x\n"
    )
    (tree.package / "a.py").write_text(
        "class Child: ...\nfrom sglang.b import Base as Named\nclass Child(Named):\n    own = 1\n"
    )
    for engine in (EngineSources(tree.package), ImportedEngine()):
        assert find_missing(engine, seams) == {}


def test_the_reason_names_the_seam_and_the_version(tree: Tree) -> None:
    tree.write([each for each in SEAMS if each.functions != ("demotion",)])
    reasons = off_reasons(ImportedEngine(), VERSION, SCHEDULER_FUNCTIONS)
    why = "release_kv_cache is missing on SGLang 9.9.9, and "
    assert list(reasons) == ["demotion"] and reasons["demotion"].startswith(why)
    assert off_reasons(ImportedEngine(), VERSION, ["trimming"]) == {}


def imports_of_sglang() -> set[tuple[str, str]]:
    """Returns the modules and names that the shim imports from SGLang."""
    found = set()
    for file in SHIM.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang"):
                found |= {(str(node.module), each.name) for each in node.names}
            elif isinstance(node, ast.Import):
                # The package itself has only the version, which every SGLang has.
                assert all(each.name in ("sglang", "torch") or "sglang" not in each.name
                           for each in node.names), file
    return found


def test_every_import_is_a_seam() -> None:
    listed = {(module, name.split(".")[0]) for seam in SEAMS for module, name in seam.paths}
    imports = imports_of_sglang()
    assert len(imports) > 8 and imports <= listed, imports - listed


# What the shim's variables hold, by their names without a leading underscore.
HELD = {
    "allocator": "BaseTokenToKVPoolAllocator", "batch": "ScheduleBatch",
    "body": "GenerateReqInput OpenSessionReqInput CloseSessionReqInput",
    "controller": "SessionController HiCacheController",
    "copy": "HiCacheAck CacheOperation", "forward_mode": "ForwardMode",
    "grammar_manager": "GrammarManager", "kv": "ReqKvInfo", "kv_events": "KVCacheEventRecorder",
    "load": "HiCacheAck",
    "manager": "TokenizerManager", "node": "UnifiedTreeNode SessionReqNode",
    "other": "Req", "parallel": "ParallelContext", "parent": "UnifiedTreeNode",
    "pool": "HostPoolGroup", "pool_stats": "PoolStats", "pool_stats_observer": "SchedulerPoolStatsObserver",
    "publisher": "SchedulerKvEventsPublisher", "req_to_token_pool": "ReqToTokenPool",
    "request": "Req OpenSessionReqInput", "request_state": "ReqState",
    "result": "OpenSessionReqOutput UpdateWeightFromDiskReqOutput", "root": "UnifiedTreeNode",
    "row_pool": "ReqToTokenPool", "running_batch": "ScheduleBatch",
    "sampling_params": "SamplingParams", "scheduler": "Scheduler", "serving": "Serving",
    "session": "Session StreamingSession", "session_controller": "SessionController",
    "slot": "SessionSlot", "state": "ReqState", "token_to_kv_pool_allocator":
    "BaseTokenToKVPoolAllocator", "tokenized": "TokenizedGenerateReqInput",
    "tree": "UnifiedRadixCache UnifiedTreeCore", "tree_cache": "UnifiedRadixCache",
}
# Read only where a check says that it is there.
CHECKED = {("state", "abort_sent"), ("kv", "cache_inserted_len")}


def test_every_read_of_an_engine_object_is_a_seam() -> None:
    listed: dict[str, set[str]] = {}
    for seam in SEAMS:
        for _, name in seam.paths:
            owner, _, method = name.partition(".")
            names = {part for need in seam.needs for part in need.split("|")}
            listed.setdefault(owner, set()).update({method} if method else names)
    reads = set()
    for file in set(SHIM.glob("*.py")) - {SHIM / "probe.py", SHIM / "seams.py"}:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                name = getattr(node.value, "id", getattr(node.value, "attr", "")).lstrip("_")
                reads.add((name, node.attr))
    reads = {read for read in reads if read[0] in HELD and not read[1].startswith("__")}
    assert {name for name, _ in reads} == set(HELD), "a variable that is gone"
    unlisted = {(name, attribute) for name, attribute in reads - CHECKED
                if not any(attribute in listed[owner] for owner in HELD[name].split())}
    assert not unlisted


def hooked(tree: Tree) -> set[str]:
    """Registers the shim as in a scheduler's process and in the first one. Returns the targets."""
    forget_engine()
    importlib.import_module("sglang.srt.managers.scheduler")
    berth_shim.register()
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    return {target for target, _, _ in registry.HOOKED}


def test_every_hook_is_a_seam_and_every_seam_is_hooked(tree: Tree) -> None:
    tree.write()
    listed = {".".join(seam.paths[0]) for seam in SEAMS if seam.kind is Kind.HOOK}
    assert hooked(tree) == listed
    updater = tree.package / "srt/managers/scheduler_components/weight_updater.py"
    source = updater.read_text()
    updater.write_text(f"{source}\n    def end_weight_update(self): ...\n")
    [more] = hooked(tree) - listed
    assert more.endswith(".SchedulerWeightUpdaterManager.end_weight_update")


def without(tree: Tree, function: str) -> None:
    """Writes the engine without a seam that only this function needs."""
    tree.write(lacking([each for each in SEAMS if each.functions == (function,)][-1], "gone"))


def test_without_reports_only_the_start_is_hooked(tree: Tree) -> None:
    without(tree, "reports")
    targets = {target for target in hooked(tree) if "tokenizer" not in target}
    assert targets == {"sglang.srt.managers.scheduler.Scheduler.__init__"}


def test_without_trimming_only_the_start_of_its_process_is_hooked(tree: Tree) -> None:
    without(tree, "trimming")
    targets = {target for target in hooked(tree) if "okenizer" in target}
    assert len(targets) == 2 and all(target.endswith(".__init__") for target in targets)


def scheduler() -> Any:
    """Returns a scheduler of which the shim reads only this at its start."""
    streaming = SimpleNamespace(slots={})
    tree_cache = type("UnifiedRadixCache", (), {})()
    tree_cache.__dict__ |= dict(session=streaming, page_size=16, disable=False)
    return SimpleNamespace(
        server_args=SimpleNamespace(port=1), tree_cache=tree_cache, page_size=16,
        max_total_num_tokens=64, idle_sleeper=None,
        req_to_token_pool=SimpleNamespace(
            size=8, req_to_token=SimpleNamespace(device=SimpleNamespace(type="cpu"))),
        token_to_kv_pool_allocator=SimpleNamespace(
            get_kvcache=lambda: None, page_size=16, size=64),
        enable_pdmux=False, dllm_config=None, draft_worker=None,
        session_controller=SimpleNamespace(sessions={}), is_hybrid_swa=False, is_hybrid_ssm=False,
        enable_hierarchical_cache=False, enable_hisparse=False, enable_lmcache=False,
        disaggregation_mode=SimpleNamespace(value="null"),
        kv_events_publisher=SimpleNamespace(enable_kv_cache_events=False),
    )


def started(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts the shim in this process. Returns its hello."""
    forget_engine()
    context = importlib.import_module("sglang.srt.runtime_context")
    ranks = SimpleNamespace(pp_rank=0, attn_tp_rank=0, attn_cp_rank=0, dp_rank=None,
                            attn_tp_size=1, attn_cp_size=1, pp_size=1)
    monkeypatch.setattr(context, "get_parallel", lambda: ranks)
    monkeypatch.setattr(context, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    monkeypatch.setattr(
        context, "get_serving", lambda: SimpleNamespace(strip_thinking_cache=False), raising=False)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setenv("BERTH_SHIM_SOCKET", str(tree.folder / "nobody.sock"))
    shim = berth_shim._Shim()
    shim.install_hooks()
    shim._start(scheduler())
    return shim._hello


REASONS = {
    "reports": "inert_reason", "demotion": "undemotable_reason", "audit": "unauditable_reason",
    "republishing": "unpublishable_reason", "guarding": "pin_safety.unguarded_reason",
}


@pytest.mark.parametrize("function", ["", *REASONS])
def test_the_hello_says_what_is_off(
    tree: Tree, function: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if function:
        without(tree, function)
    else:
        tree.write()
    hello = started(tree, monkeypatch)
    for name, field in REASONS.items():
        reason = operator.attrgetter(field)(hello) or ""
        is_off = name == function or (function == "reports" and name in ("demotion", "guarding"))
        assert (f"on SGLang {VERSION}" in reason) == is_off, (name, reason)
    logged = [record.args[0] for record in caplog.records if "is off" in record.msg]
    assert logged == (SCHEDULER_FUNCTIONS if function == "reports" else [function] * bool(function))


def test_the_trimmer_says_that_it_is_off(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree.write()
    forget_engine()
    monkeypatch.setenv("BERTH_SHIM_SOCKET", str(tree.folder / "nobody.sock"))
    trimmer, why = Trimmer(bytes(16), "0"), "a seam is missing"
    trimmer.install_hooks(VERSION, why)
    trimmer._start(SimpleNamespace(server_args=SimpleNamespace(port=1)), VERSION, why)
    assert trimmer._inert_reason == why
    assert [record.args for record in caplog.records] == [("trimming", why)]


def test_a_probe_that_fails_switches_all_off(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.write()
    (tree.package / "srt/managers/scheduler.py").write_text("raise RuntimeError('planted')\n")
    hello = started(tree, monkeypatch)
    assert hello.inert_reason == "probe: RuntimeError: planted"


def check(*arguments: str | Path) -> tuple[int, str]:
    made = subprocess.run(
        [sys.executable, "-B", "-m", "berth_shim", *map(str, arguments)],
        capture_output=True, text=True, cwd=SHIM.parent, timeout=60,
    )
    assert not made.stderr, made.stderr
    return made.returncode, made.stdout


def test_the_self_check_prints_functions_and_seams(tree: Tree) -> None:
    tree.write()
    status, text = check("--source", tree.folder)
    assert status == 0 and text.count("found") == len(SEAMS) and "MISSING" not in text
    without(tree, "trimming")
    status, text = check("--source", tree.folder, "--json")
    report = json.loads(text)
    assert status == 1 and report["sglang"] is None
    states = {name: each["on"] for name, each in report["functions"].items()}
    assert states == {name: name != "trimming" for name in FUNCTIONS}
    assert [each["functions"] for each in report["seams"] if not each["found"]] == [["trimming"]]


def test_the_self_check_without_an_engine_prints_the_seams(tmp_path: Path) -> None:
    status, text = check("--source", tmp_path)
    assert status == 3 and "no SGLang here" in text
    assert all(seam.path in text for seam in SEAMS)
    status, text = check("--source", tmp_path, "--json")
    assert status == 3
    assert {each["on"] for each in json.loads(text)["functions"].values()} == {None}
