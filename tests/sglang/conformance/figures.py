"""What the engine reports about itself: `/v1/loads` is current, `/metrics` lags."""

import time

from conformance.engine import Engine, ids
from conformance.groups import in_groups


REPORT_SECONDS_MAX = 20


def gauge(engine: Engine, name: str) -> float:
    text = engine.get("/metrics").body.decode()
    for line in text.splitlines():
        if line.startswith(f"sglang:{name}{{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"/metrics has no {name}")


def gauge_soon(engine: Engine, name: str, wanted: float) -> float:
    """Waits until a gauge of `/metrics` has the wanted value, and returns the last value seen. A
    report reaches `/metrics` some time after the answer of its turn."""
    deadline = time.monotonic() + REPORT_SECONDS_MAX
    while (found := gauge(engine, name)) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@in_groups("page16", "page1")
def test_metrics_lag_and_loads_do_not(engine: Engine) -> None:
    session = engine.open()
    # The prefill makes the only token, so there is no decode step and no second report is due.
    engine.turn(session, ids(64, 1), 1).good()
    engine.until_used(64)
    used = gauge_soon(engine, "kv_used_tokens", 64)
    engine.expect("used by /metrics after a turn", used, 64)
    engine.close(session)
    engine.until_used(0)
    engine.expect("used by /metrics after the close", gauge(engine, "kv_used_tokens"), 64)
    # The next prefill triggers a report, and its own request has ended when the report is made.
    engine.turn(None, ids(16, 2), 1).good()
    used = gauge_soon(engine, "kv_used_tokens", 0)
    engine.expect("used by /metrics after a prefill", used, 0)
    evictable = gauge_soon(engine, "kv_evictable_tokens", 16)
    engine.expect("evictable by /metrics", evictable, 16)


@in_groups("page16", "page1")
def test_session_gauges_move_every_forty_decode_steps(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(64, 1), 100).good()
    sessions = gauge_soon(engine, "num_streaming_sessions", 1)
    engine.expect("open sessions by /metrics", sessions, 1)
    held = gauge(engine, "streaming_session_held_tokens")
    # The held tokens don't include the first prompt, which is locked in the radix tree.
    engine.expect("held, of 163 tokens", 0 < held <= 100 + engine.group.page_size, True)
    engine.close(session)
    for salt in (2, 3):
        # The prefill makes the only token, so there is no decode step and no report is due.
        engine.turn(engine.open(), ids(64, salt), 1).good()
    late = gauge(engine, "num_streaming_sessions")
    engine.expect("with two open, and no report since one was", late, 1)


@in_groups("page16", "page1")
def test_loads_add_up(engine: Engine) -> None:
    session = engine.open()
    engine.turn(session, ids(64, 1), 20).good()
    page = engine.group.page_size
    engine.until_used(-(-83 // page) * page)
    load = engine.load()
    total = load["max_total_num_tokens"]
    assert total == engine.group.pool_tokens, "the pool's size"
    assert load["max_running_requests"] == engine.group.rows, "the rows"
    assert load["num_total_tokens"] == load["num_used_tokens"], "tokens with nothing queued"
    assert load["token_usage"] == round(load["num_used_tokens"] / total, 4), "the usage"
    bad = engine.get("/v1/loads?include=nonsense")
    engine.expect("the status of an unknown section", bad.status, 500)


def prefilled(engine: Engine) -> tuple[int, int]:
    """Returns the prompt tokens computed so far, and the microseconds that took."""
    load = engine.load()
    return load["total_prefill_uncached_tokens"], load["total_prefill_busy_us"]


@in_groups("page16", "page1")
def test_what_was_prefilled_is_counted_with_its_time(engine: Engine) -> None:
    tokens, busy = prefilled(engine)
    # The second request finds the whole pages of all but its last token in the cache.
    page = engine.group.page_size
    for prompt, computed in ((ids(300, 1), 300), (ids(300, 1), 300 - 299 // page * page)):
        engine.turn(None, prompt, 4).good()
        tokens += computed
        engine.until("the prompt is counted", lambda: prefilled(engine)[0] >= tokens)
        found, took = prefilled(engine)
        engine.expect("tokens computed", found, tokens)
        engine.expect("it took some time", busy < took, True)
        busy = took


@in_groups("page16", "page1")
def test_prompts_that_wait_are_estimated(engine: Engine) -> None:
    with engine.slow(0.2):
        running = [engine.flow(None, ids(20, salt), 150) for salt in range(engine.group.rows)]
        for flow in running:
            flow.first()
        waiting = engine.pending(None, ids(200, 40), 1)
        engine.until_queued(1)
        estimate = engine.load()["num_waiting_uncached_tokens"]
        engine.expect("no more than wait", 0 < estimate <= 200, True)
        engine.abort(all=True)
        for flow in running:
            flow.rest()
        waiting.end()
    engine.until_idle()
    engine.expect("when none wait", engine.load()["num_waiting_uncached_tokens"], 0)


@in_groups("page16", "page1")
def test_server_info_names_the_sizes(engine: Engine) -> None:
    info = engine.get("/server_info").json()
    group = engine.group
    found = {
        key: info[key]
        for key in (
            "page_size", "max_total_num_tokens", "max_req_input_len", "enable_streaming_session",
            "enable_session_radix_cache", "version", "status",
        )
    }
    expected = {
        "page_size": group.page_size, "max_total_num_tokens": group.pool_tokens,
        "max_req_input_len": group.context_tokens - 6, "enable_streaming_session": True,
        "enable_session_radix_cache": False, "version": "0.5.23", "status": "ready",
    }
    assert found == expected, "/server_info"
    rows = info["internal_states"][0]["effective_max_running_requests_per_dp"]
    assert rows == group.rows, "the rows"
    assert engine.get("/get_load").status == 404, "the status of /get_load"
