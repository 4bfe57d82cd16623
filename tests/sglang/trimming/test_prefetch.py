"""Tests when the shim loads a session's KV from the host, against a model of the engine's tree."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from berth_shim.prefetch import GROWTH_TOKENS_MAX, Prefetcher

CONTEXT = "sglang.srt.runtime_context"


class Key(list):
    """Tokens in a namespace, as the engine's."""

    extra_key, cache_salt = None, "x"

    def raw_token_ids(self) -> list[int]:
        return self


def node(id: int, parent: Any, tokens: int, evicted: bool, used: int = 0) -> Any:
    key = Key([id] * tokens)
    return SimpleNamespace(id=id, parent=parent, key=key, evicted=evicted, last_access_time=used)


class Tree:
    """Two sessions: of the KV of `a` the host alone has 300 tokens after 100, of `b` nothing."""

    disable = False
    host_memory_mode = "cache"
    load_back_threshold = 10

    def __init__(self, device: str):
        self.device = device
        root = node(0, None, 0, False)
        kept = node(1, root, 100, False)
        middle = node(2, kept, 200, True)
        self.nodes = {1: kept, 2: middle, 3: node(3, middle, 100, True, used=2)}
        self.nodes[5] = node(5, kept, 9, True)
        leaves = {
            "a": [self.nodes[3], node(4, root, 50, True, used=1)], "b": [kept],
            "short": [self.nodes[5]],
        }
        self.components = {"full": SimpleNamespace(_session_leaves=leaves)}
        events = SimpleNamespace(record_store=None)
        self.tree_core = SimpleNamespace(node_by_id=self.nodes.get, kv_events=events)
        self.cache_controller = SimpleNamespace(load_queue=[], ack_load_queue=[])
        self.session = SimpleNamespace(slots={})
        self.ongoing_load_back: dict[int, Any] = {}
        self.loads: list[tuple[int, int]] = []
        self.has_slot = True
        self.begun = self.matches = 0

    def load_back(self, node_id: int, mem_quota: int) -> bool:
        """The engine counts what it loads, and what the load locks."""
        self.loads.append((node_id, mem_quota))
        if mem_quota < 400:
            return False
        self.ongoing_load_back[node_id] = object()
        return True

    def ready_to_load_host_cache(self) -> int:
        self.begun += 1
        self.cache_controller.ack_load_queue.append(SimpleNamespace(finish_event=self.begun))
        return 0

    def has_free_load_back_slot(self) -> bool:
        return self.has_slot

    def match_prefix(self, params: Any) -> Any:
        """As far as the tokens are those of the nodes, or of the demoted session."""
        assert params.key.salt == "x"
        self.matches += 1
        matched = {0: 3, 1: 1, 3: 3, 5: 5}[params.key.tokens[-1]]
        return SimpleNamespace(best_match_node=matched)


class Stream:
    def __init__(self) -> None:
        self.waits: list[int] = []

    def wait_event(self, event: int) -> None:
        self.waits.append(event)


class Engine:
    def __init__(self, device: str = "cpu"):
        self.tree = Tree(device)
        self.free, self.evictable, self.rows = 150, 350, 1
        stats = lambda: SimpleNamespace(
            full_available_size=self.free, full_evictable_size=self.evictable
        )
        current = Stream()
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree, waiting_queue=[], chunked_req=None, is_hybrid_swa=False,
            _engine_paused=False,
            is_hybrid_ssm=False, disaggregation_mode=SimpleNamespace(value="null"),
            req_to_token_pool=SimpleNamespace(available_size=lambda: self.rows),
            running_batch=SimpleNamespace(reqs=[]),
            pool_stats_observer=SimpleNamespace(get_pool_stats=stats),
            session_controller=SimpleNamespace(sessions={}),
            forward_stream=Stream(),
            device_module=SimpleNamespace(current_stream=lambda: current),
        )
        self.current_stream = current
        self.prefetcher = Prefetcher(self.scheduler)

    def prefetch(self, id: str, tokens_max: int = 1000) -> tuple[int, str]:
        return self.prefetcher.prefetch(id, tokens_max)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the engine that the shim asks, and the sizes of its groups of ranks."""
    ranks = SimpleNamespace(attn_tp_size=1, attn_cp_size=1, pp_size=1)
    parts = {
        CONTEXT: {"get_parallel": lambda: ranks},
        "sglang.srt.mem_cache.base_prefix_cache": {
            "MatchPrefixParams": lambda key: SimpleNamespace(key=key),
        },
        "sglang.srt.mem_cache.radix_cache": {
            "RadixKey": lambda tokens, extra_key, cache_salt: SimpleNamespace(
                tokens=tokens, extra_key=extra_key, salt=cache_salt
            ),
        },
    }
    for name, names in parts.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return ranks


def test_the_newest_kv_of_a_session_is_loaded_with_all_room_that_nobody_holds() -> None:
    engine = Engine()
    assert engine.prefetch("a") == (300, "")
    assert engine.tree.loads == [(3, 500)], "the deepest node, and what is free or evictable"
    assert engine.tree.begun == 1, "the copy is begun"
    # Evicted first again would be what the engine doesn't take for used.
    assert engine.tree.matches == 1


@pytest.mark.parametrize("id, tokens_max, reason, matches", [
    # What isn't on the host is not looked up: that would be a use of it.
    ("nobody", 1000, "unknown", 0), ("b", 1000, "resident", 0), ("a", 299, "too_long", 1),
    # The engine loads so little for no turn.
    ("short", 1000, "resident", 1),
])
def test_nothing_is_loaded_without_need_or_beyond_the_bound(
    id: str, tokens_max: int, reason: str, matches: int
) -> None:
    engine = Engine()
    assert engine.prefetch(id, tokens_max) == (0, reason)
    assert engine.tree.loads == []
    assert engine.tree.matches == matches


def set_waiting(engine: Engine) -> None:
    engine.scheduler.waiting_queue.append("a prompt")


def set_paused(engine: Engine) -> None:
    engine.scheduler._engine_paused = True


def set_chunked(engine: Engine) -> None:
    engine.scheduler.chunked_req = "half a prompt"


def set_full(engine: Engine) -> None:
    engine.rows = 0


def set_queued(engine: Engine) -> None:
    engine.tree.cache_controller.load_queue.append("a turn's load")


def set_no_slot(engine: Engine) -> None:
    engine.tree.has_slot = False


@pytest.mark.parametrize(
    "make_busy", [set_waiting, set_paused, set_chunked, set_full, set_queued, set_no_slot]
)
def test_a_load_gives_way_to_all_other_work(make_busy: Callable[[Engine], None]) -> None:
    engine = Engine()
    make_busy(engine)
    assert engine.prefetch("a") == (0, "busy")
    assert (engine.tree.loads, engine.tree.matches) == ([], 0), "not even a use is counted"


def test_one_load_at_a_time() -> None:
    engine = Engine()
    engine.prefetch("a")
    assert engine.prefetcher.is_loading
    assert engine.prefetch("a") == (0, "busy")
    engine.tree.ongoing_load_back.clear()
    assert not engine.prefetcher.is_loading
    assert engine.prefetch("a") == (300, "")


def test_running_turns_keep_the_room_that_they_need_meanwhile() -> None:
    engine = Engine()
    engine.scheduler.running_batch.reqs = ["a turn", "another"]
    assert engine.prefetch("a") == (0, "no_room")
    assert engine.tree.loads == [(3, 500 - 2 * GROWTH_TOKENS_MAX)]
    assert engine.tree.begun == 0


def test_a_demoted_session_is_found_by_its_tokens() -> None:
    engine = Engine()
    request = SimpleNamespace(
        origin_input_ids=[1, 2], output_ids=[0], extra_key=None, cache_salt="x"
    )
    engine.scheduler.session_controller.sessions["s"] = SimpleNamespace(
        streaming=True, committed_origin_len=2,
        req_nodes={"r": SimpleNamespace(req=request)},
    )
    assert engine.prefetch("s") == (300, "")
    # With a row of its own it has its KV.
    engine.tree.ongoing_load_back.clear()
    engine.tree.session.slots["s"] = object()
    assert engine.prefetch("s") == (0, "unknown")


def test_on_a_gpu_all_that_is_computed_next_waits_for_the_load() -> None:
    engine = Engine("cuda")
    engine.prefetch("a")
    assert (engine.scheduler.forward_stream.waits, engine.current_stream.waits) == ([1], [1])


def test_an_engine_that_cant_says_why(ranks: SimpleNamespace) -> None:
    assert Prefetcher(Engine().scheduler, "a seam is gone").prefetch("a", 1) == (0, "a seam is gone")
    ranks.attn_tp_size = 2
    assert Engine().prefetch("a") == (0, "several ranks share a session")
    ranks.attn_tp_size = 1
    engine = Engine()
    engine.tree.tree_core.kv_events = None
    reason = "the tree's core doesn't expose its nodes"
    assert Prefetcher(engine.scheduler).prefetch("a", 1) == (0, reason)
    engine.tree.cache_controller = None
    assert Prefetcher(engine.scheduler).prefetch("a", 1) == (0, "the engine has no host tier")
