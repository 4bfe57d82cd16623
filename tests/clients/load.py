"""Load generators that people measure engines with: no request fails, and turns are sessions.

Each runs as its users start it, with conversations of three turns. The router's own metrics say
how many turns went to their session's worker.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from clients.places import Cluster, Target, added, traces
from clients.plugin import Case
from clients.programs import environment, run
from clients.traces import made_agents, recorded_agents

CONVERSATIONS, TURNS, TOKENS = 6, 3, 16
# Every turn of a conversation but its first.
LATER_TURNS = CONVERSATIONS * (TURNS - 1)
NOUNS = "ship sail rope mast deck keel helm hull port crew tide wave wind star moon sand".split()
# So that no tool asks for a model's files, it may look only at this machine, where none are.
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9"}


def aiperf(target: Target, folder: Path, *flags: str) -> dict[str, Any]:
    """Runs aiperf and returns its report."""
    command = [
        str(environment("aiperf") / "bin/aiperf"), "profile", "--model", target.model,
        "--url", target.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", target.model_path, "--artifact-dir", str(folder / "report"),
        "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--random-seed", "1", *flags,
    ]
    # Told to stay offline, aiperf takes the path of a tokenizer for a name.
    env = NO_HUB | {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}
    status, printed = run("aiperf", command, folder, env, seconds=600)
    assert status == 0, f"aiperf's status: {status}\n{printed[-3000:]}"
    report = json.loads((folder / "report/profile_export_aiperf.json").read_text())
    assert report["error_summary"] == [], "aiperf's errors"
    return report


def conversations(folder: Path) -> Path:
    """Writes conversations in aiperf's form."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "conversations.jsonl"
    path.write_text("\n".join(
        json.dumps({"session_id": f"talk-{talk}", "turns": [
            {"text": " ".join(NOUNS[(talk + 3 * turn + word) % len(NOUNS)] for word in range(12))}
            for turn in range(TURNS)
        ]})
        for talk in range(CONVERSATIONS)
    ))
    return path


@pytest.mark.at(launch="main", quick=("simulator",))
def test_aiperf_conversations(
    cluster: Cluster, case: Case, target_of: Target, tmp_path: Path
) -> None:
    before = cluster.placements()
    report = aiperf(
        target_of, tmp_path, "--input-file", str(conversations(tmp_path)),
        "--custom-dataset-type", "multi-turn", "--conversation-num", str(CONVERSATIONS),
        "--concurrency", "3", "--extra-inputs", f"max_tokens:{TOKENS}",
    )
    assert report["request_count"]["avg"] == CONVERSATIONS * TURNS, "requests"
    if not case.bare:
        need_sessions(cluster, before, LATER_TURNS)


@pytest.mark.at(launch="main")
def test_aiperf_agents(cluster: Cluster, target_of: Target, tmp_path: Path) -> None:
    """The agentic scenario, with a small trace made here."""
    agents(target_of, tmp_path, made_agents(tmp_path / "trace"))


@pytest.mark.at(launch="agents", kinds=("simulator",))
def test_aiperf_recorded_agents(
    cluster: Cluster, target_of: Target, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The agentic scenario, with recorded conversations, whose contexts only the simulator holds."""
    folder = traces(pytestconfig.option.traces)
    if not folder or not (recorded := folder / "claude_code.jsonl.gz").exists():
        pytest.skip("no claude_code.jsonl.gz: name its folder with --traces or BERTH_TRACES")
    agents(target_of, tmp_path, recorded_agents(recorded, tmp_path / "trace"))


def agents(target: Target, folder: Path, trace: Path) -> None:
    report = aiperf(
        target, folder, "--input-file", str(trace), "--custom-dataset-type", "weka-trace",
        "--scenario", "inferencex-agentx-mvp",
        # The scenario's own 15 minutes are for results that are published.
        "--unsafe-override", "--benchmark-duration", "20", "--concurrency", "3",
        "--system-idle-gap-cap-seconds", "1",
    )
    assert report["request_count"]["avg"] > 3, "requests"


def need_sessions(cluster: Cluster, before: dict[str, float], turns: int) -> None:
    """Checks that the router sent so many turns to the worker of their session."""
    since = added(before, cluster.placements())
    assert since.get("sticky", 0) >= turns, f"turns that weren't known as their session's: {since}"


@pytest.mark.at(launch="main", quick=("simulator",))
def test_guidellm(target_of: Target, cluster: Cluster, tmp_path: Path) -> None:
    """guidellm names no conversation: only that no request fails is asked."""
    backend = f"kind=openai_http,target={target_of.url},model={target_of.model}"
    command = [
        str(environment("guidellm") / "bin/guidellm"), "run",
        "--backend", f"{backend},request_format=/v1/chat/completions",
        "--profile", "kind=concurrent,streams=3", "--constraint", "kind=max_requests,count=18",
        "--tokenizer", f"kind=huggingface_auto,model={target_of.model_path}",
        "--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={TOKENS},turns={TURNS}",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console-interactive",
    ]
    status, printed = run("guidellm", command, tmp_path / "home", NO_HUB)
    assert status == 0, f"guidellm's status: {status}\n{printed[-3000:]}"
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (18, 0), f"requests: {totals}"


def bench_serving(target: Target, folder: Path, backend: str, *flags: str) -> None:
    python = str(environment("kits") / "bin/python")
    command = [
        python, "-W", "ignore", "-m", "sglang.bench_serving", "--backend", backend,
        "--base-url", target.url, "--model", target.model, "--tokenizer", target.model_path,
        "--disable-tqdm", "--max-concurrency", "3", "--output-file", str(folder / "report.jsonl"),
        "--seed", "1", *flags,
    ]
    status, printed = run("bench_serving", command, folder / "home")
    assert status == 0, f"bench_serving's status: {status}\n{printed[-3000:]}"
    report = json.loads((folder / "report.jsonl").read_text().splitlines()[-1])
    assert report["completed"] == CONVERSATIONS * TURNS, f"completed requests:\n{printed[-3000:]}"


GROWING = (
    "--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(CONVERSATIONS),
    "--gsp-prompts-per-group", "1", "--gsp-num-turns", str(TURNS), "--gsp-system-prompt-len", "40",
    "--gsp-question-len", "20", "--gsp-output-len", str(TOKENS), "--gsp-send-routing-key",
)


@pytest.mark.at(launch="main", quick=("simulator",))
def test_bench_serving_conversations(
    cluster: Cluster, case: Case, target_of: Target, tmp_path: Path
) -> None:
    before = cluster.placements()
    bench_serving(target_of, tmp_path, "sglang-oai-chat", *GROWING)
    if not case.bare:
        need_sessions(cluster, before, LATER_TURNS)


@pytest.mark.at(launch="main", quick=("simulator",))
def test_bench_serving_flushes(cluster: Cluster, target_of: Target, tmp_path: Path) -> None:
    requests = CONVERSATIONS * TURNS
    bench_serving(
        target_of, tmp_path, "sglang", "--flush-cache", "--dataset-name", "random-ids",
        "--num-prompts", str(requests), "--random-input-len", "64", "--random-output-len", "8",
    )
