"""Tests the figures of the host tier, against a model of the engine's cache controller."""

from types import SimpleNamespace
from typing import Any

import pytest
from berth_shim.host import HostTier
from berth_shim.wire import HostFacts


class Event:
    """A moment on a device's stream, in milliseconds; not reached while it is None."""

    def __init__(self, milliseconds: float | None):
        self.milliseconds = milliseconds

    def query(self) -> bool:
        return self.milliseconds is not None

    def elapsed_time(self, end: "Event") -> float:
        return end.milliseconds - self.milliseconds


def begun(tokens: int, begin: float | None = None, end: float | None = None) -> Any:
    """A copy that has begun, timed on its stream if `begin` is given."""
    return SimpleNamespace(
        num_tokens=tokens, timing_enabled=begin is not None,
        start_event=Event(begin), finish_event=Event(end),
    )


def queued(tokens: int) -> Any:
    return SimpleNamespace(device_indices=range(tokens))


class Engine:
    """A tree with 1,000 tokens of host memory, of which 600 are in use, and 300 on the device."""

    def __init__(self, device: str = "cpu", is_write_back: bool = False, mode: str = "cache"):
        self.controller = SimpleNamespace(
            mem_pool_host=SimpleNamespace(logical_size=1000, available_size=lambda: 400),
            load_queue=[], ack_load_queue=[], write_queue=[], ack_write_queue=[],
        )
        self.tree = SimpleNamespace(
            cache_controller=self.controller, host_memory_mode=mode, device=device,
            is_write_back=is_write_back, evictable_size=lambda: 250, protected_size=lambda: 50,
        )
        self.scheduler = SimpleNamespace(tree_cache=self.tree)

    def host(self) -> HostTier:
        return HostTier(self.scheduler)


def test_kv_on_the_device_is_not_evictable_on_the_host() -> None:
    assert Engine().host().read() == HostFacts(1000, 600, 300, 0, 0, 0, 0)
    engine = Engine()
    engine.controller.mem_pool_host.available_size = lambda: 900
    assert engine.host().read().evictable_tokens == 0, "less is copied than the device has"


def test_with_write_back_copies_of_what_the_device_has_are_evictable_too() -> None:
    engine = Engine(is_write_back=True)
    engine.controller.ack_load_queue += [begun(40)]
    assert engine.host().read() == HostFacts(1000, 600, 560, 40, 0, 0, 0)


def test_copies_under_way_are_counted_from_their_queue_to_their_end() -> None:
    engine = Engine()
    engine.controller.load_queue += [queued(10), queued(20)]
    engine.controller.ack_load_queue += [begun(100), begun(200)]
    engine.controller.write_queue += [queued(1)]
    engine.controller.ack_write_queue += [begun(4)]
    assert engine.host().read() == HostFacts(1000, 600, 265, 330, 5, 0, 0)


def test_a_load_is_timed_on_its_stream_and_counted_when_it_has_ended() -> None:
    engine = Engine(device="cuda")
    host = engine.host()
    loads = [begun(100, 5.0), begun(200, 7.0, 8.5)]
    for load in loads:
        engine.controller.ack_load_queue.append(load)
        host.record_load(begin_ns=0)
    assert host.read().loaded_tokens == 0, "the second ends after the first"
    loads[0].finish_event.milliseconds = 7.0
    # The engine may have noticed both ends before.
    engine.controller.ack_load_queue.clear()
    read = host.read()
    assert (read.loaded_tokens, read.loads_us, read.loading_tokens) == (300, 3500, 0)
    assert host.read().loaded_tokens == 300, "each load once"


def test_a_load_on_a_cpu_takes_as_long_as_the_engine_s_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    host = engine.host()
    engine.controller.ack_load_queue.append(begun(64))
    monkeypatch.setattr("berth_shim.host.time.perf_counter_ns", lambda: 9_000_000)
    host.record_load(begin_ns=2_000_000)
    assert (host.read().loaded_tokens, host.read().loads_us) == (64, 7000)


def test_a_load_without_a_time_is_not_counted() -> None:
    engine = Engine(device="npu")
    host = engine.host()
    engine.controller.ack_load_queue.append(begun(64))
    host.record_load(begin_ns=0)
    assert (host.read().loaded_tokens, host.read().loading_tokens) == (0, 64)


def test_an_engine_without_a_tier_has_no_figures() -> None:
    # There the host's memory is only a buffer on the way to a storage.
    buffered = Engine(mode="buffer_only").host()
    without = HostTier(SimpleNamespace(tree_cache=SimpleNamespace(cache_controller=None)))
    off = HostTier(Engine().scheduler, "a seam is missing")
    for host in (buffered, without, off):
        host.record_load(begin_ns=0)
        assert host.read() is None
