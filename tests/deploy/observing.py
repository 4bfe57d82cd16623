"""Does Prometheus find in a fleet what alerts and dashboards ask for?"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.observed import Observed
from deploy.programs import ROOT
from deploy.queries import Query, alert_queries, alerts, dashboard_queries

PACKAGES = ("kernels", "proto", "router", "worker-agent")
# What this fleet doesn't bring about: it has no TLS, no pairs and no token issuer, and the
# simulator's shim neither audits, demotes nor trims. Such a metric has no line before its first
# event, so its name and labels are looked up in the page that is made from the registries.
NOT_SEEN = {
    "berth_agent_audits_total": {"outcome"},
    "berth_agent_pool_page_faults": {"dp_rank", "kind"},
    "berth_agent_pool_pages": {"dp_rank", "state"},
    "berth_agent_sessions_left_out_total": {"code"},
    "berth_agent_tls_handshakes_failed_total": {"port", "reason"},
    "berth_agent_trim_turns_total": {"plan"},
    "berth_router_auth_jwks_reloads_total": {"result"},
    "berth_router_hand_offs_total": {"outcome"},
    "berth_router_retries_total": {"reason"},
    "berth_router_tls_handshakes_failed_total": {"port", "reason"},
}
# Panels on values of a label that this fleet doesn't bring about.
VALUES_NOT_SEEN = {"sessions: Sessions that lose their KV to others"}
# Labels that Prometheus itself adds.
OF_PROMETHEUS = {"job", "instance", "le"}


@pytest.fixture(scope="module")
def fleet(find_tool: Callable[[str], str], bin_dir: Path, folder: Path) -> Iterator[Observed]:
    programs = Path(find_tool("prometheus"))
    fleet = Observed(programs, bin_dir, folder / "observing")
    try:
        fleet.start()
        fleet.provoke()
        since = time.time()
        fleet.wait("scraped once more", lambda: fleet.sum(
            f"count(up == 1 and timestamp(up) > {since})") == 3)
        fleet.wait("aware of the XID", lambda: fleet.sum(
            "count(berth_agent_gpu_xids_total)") > 0)
        fleet.wait("aware of the expired session", lambda: fleet.sum(
            'berth_agent_session_events_total{event="expired"}') > 0)
        # A rate needs two samples.
        fleet.wait("able to evaluate rates", lambda: fleet.query(
            'rate(berth_agent_session_events_total{event="expired"}[1m])') != [])
        yield fleet
    finally:
        fleet.stop()


def all_queries() -> list[Query]:
    return [*dashboard_queries(), *alert_queries()]


def sources(*folders: str) -> str:
    """Returns the Rust code of these folders as one text."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.rs")]
    return "\n".join(path.read_text() for path in files if "tests" not in path.parts)


def test_every_metric_of_every_query_exists_with_its_labels(fleet: Observed) -> None:
    names, wrong = fleet.names(), []
    used = {metric for query in all_queries() for metric, _ in query.selectors()}
    known = {
        metric: (fleet.labels(metric) if metric in names else set()) | NOT_SEEN.get(metric, set())
        for metric in used
    }
    for query in all_queries():
        selectors = list(query.selectors())
        wrong += [f"{query.place}: no metric {metric}" for metric, _ in selectors
                  if not known[metric]]
        for metric, matchers in selectors:
            asked = {label for label, _, _ in matchers}
            if unknown := asked - known[metric] - OF_PROMETHEUS:
                wrong.append(f"{query.place}: {metric} has no label {unknown}")
        found = OF_PROMETHEUS.union(*(known[metric] for metric, _ in selectors))
        if unknown := query.grouping_labels() - found:
            wrong.append(f"{query.place}: no metric of it has the label {unknown}")
    assert not wrong, "\n".join(wrong)
    assert not set(NOT_SEEN) - used, "listed, and in no query"
    assert not set(NOT_SEEN) & names, "listed, though the fleet has it"


def test_metrics_that_the_fleet_does_not_show_are_registered() -> None:
    page = (ROOT / "deploy/docs/metrics.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    known = {name: set(re.findall(r"`(\w+)`", labels))
             for _, names, _, labels, *_ in rows for name in re.findall(r"`(\w+)`", names)}
    for metric, labels in NOT_SEEN.items():
        assert known[metric] == labels, metric


def test_values_of_labels_are_those_of_the_sources() -> None:
    # An arm of a match, a pair, a line of a table, or an argument of its own.
    places = r'=> "(\w+)"|[(\[]"(\w+)", |^\s+"(\w+)"$|count_\w+\("(\w+)"\)'
    found = re.findall(places, sources(*PACKAGES), re.MULTILINE)
    given, asked = {value for values in found for value in values}, set()
    for query in all_queries():
        for metric, matchers in query.selectors():
            for label, _, value in matchers:
                if ".*" in value:
                    continue
                for each in value.split("|"):
                    assert each in given, f"{query.place}: {metric} with {label}={each}"
                    asked.add((label, each))
    assert len(asked) > 20


def test_prometheus_evaluates_every_query(fleet: Observed) -> None:
    for query in all_queries():
        fleet.query(query.expr)
    fleet.wait("done with all rules", lambda: all(
        rule["health"] != "unknown" for rule in fleet.rules().values()))
    errors = {name: rule.get("lastError") for name, rule in fleet.rules().items()}
    assert errors == dict.fromkeys((rule["alert"] for rule in alerts()), None)


def test_the_economics_are_those_of_the_turns(fleet: Observed) -> None:
    # A scrape that comes late hides all values until the next one.
    cached, computed, prompt = (
        fleet.sum(f"last_over_time(berth_router_{part}_tokens_total[5m])")
        for part in ("cached", "computed", "prompt")
    )
    assert cached > 0 and computed > 0 and cached + computed == prompt
    panel = {query.place: query.expr for query in dashboard_queries()}
    saved = panel["sessions: GPU seconds saved"]
    assert fleet.sum(saved) > 0
    # One query, so one instant: from one scrape to the next, Prometheus extrapolates the
    # increase of a young series to another length.
    rate = "avg(avg_over_time(berth_agent_prefill_rate_tokens_per_second[5m]))"
    increase = "sum(increase(berth_router_cached_tokens_total[5m]))"
    assert fleet.sum(f"({saved}) * {rate} / {increase}") == pytest.approx(1.0)
    assert fleet.sum(panel["sessions: Prompt tokens with a report"]) == pytest.approx(1.0)


def test_an_alert_fires_for_an_engine_that_has_gone_and_for_no_other(fleet: Observed) -> None:
    assert not fleet.firing("BerthEngineDown") and not fleet.firing("BerthSessionsLost")
    gone = fleet.end_an_engine()
    fleet.wait("aware of the engine's end", lambda: fleet.firing("BerthEngineDown") == {gone})
    fleet.wait("aware of lost sessions", lambda: fleet.firing("BerthSessionsLost") == {gone})
    assert not fleet.firing("BerthNoUsableWorker")


def test_panels_show_data(fleet: Observed) -> None:
    may_be_empty = VALUES_NOT_SEEN | {
        query.place for query in dashboard_queries()
        if all(metric in NOT_SEEN for metric, _ in query.selectors())
    }
    # An engine has ended before, and its sessions are lost. A rate needs two samples, and a scrape
    # that comes late hides all values until the next one.
    for query in dashboard_queries():
        if query.place not in may_be_empty:
            fleet.wait(f"able to show {query.place}", lambda: fleet.query(query.expr) != [])
