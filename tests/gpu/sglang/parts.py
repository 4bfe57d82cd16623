"""What the script asks of SGLang on a GPU, part by part. A part that fails raises.

The small engine answers with the suite's model, whose answers depend on every token before them.
The large one has KV of a real size and weights that mean nothing.
"""

import json
import math
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engines import Lane
from integration import wire
from integration.pages import audit, differences, faults
from integration.processes import wait_until
from integration.seams import written
from integration.turns import new_id, open_session, sampling

SETTLE_SECONDS_MAX = 30
REQUEST_SECONDS_MAX = 60
TURNS, TURN_TOKENS = 5, 16
# A GPU's sums depend on the shape of a batch. The probabilities of two answers may differ by this
# many times what they differ by for one prompt, computed whole and from the cache.
NOISE_FACTOR = 4
# How many tokens with their probabilities are asked for, at each place of an answer.
LIKELY = 8
SHORT_CLIENTS, SHORT_TOKENS = 3, 100
Figures = Callable[[str, Any], None]


@dataclass(frozen=True)
class Said:
    """An answer of `/generate`."""

    ids: list[int]
    text: str
    # At each place, the logarithms of the probabilities of the likeliest tokens.
    likely: list[dict[int, float]]
    prompt_tokens: int
    cached_tokens: int


def letters(tokens: int, seed: object = None) -> str:
    """Returns a text of so many tokens. Without a seed, one that was never sent before."""
    source = random.Random(None if seed is None else str(seed))
    return "".join(source.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(tokens))


def ask(url: str, text: str, tokens: int, headers: dict | None = None, **more: Any) -> Said:
    request = {
        "text": text, "sampling_params": sampling(tokens), "return_logprob": True,
        "top_logprobs_num": LIKELY, **more,
    }
    answer = wire.post(f"{url}/generate", request, headers, REQUEST_SECONDS_MAX)
    assert answer.status == 200, f"the status of {answer}"
    said, meta = answer.json(), answer.json()["meta_info"]
    likely = [{id: value for value, id, *_ in place} for place in meta["output_top_logprobs"]]
    return Said(
        said["output_ids"], said["text"], likely, meta["prompt_tokens"], meta["cached_tokens"]
    )


def difference(one: Said, other: Said) -> float:
    """Returns the most by which the logarithms of one token's probability differ between two
    answers, up to the first place where they have different tokens: after it they have different
    contexts. A token that is not among the likely ones of the other answer differs without bound."""
    most = 0.0
    for a, b, p, q in zip(one.ids, other.ids, one.likely, other.likely, strict=True):
        for token in (a, b):
            most = max(most, abs(p.get(token, math.inf) - q.get(token, -math.inf)))
        if a != b:
            break
    return most


def noise(lane: Lane) -> float:
    """Returns the most by which the probabilities of one answer differ between a prompt that is
    computed whole and the same prompt from the cache, as a difference of logarithms."""
    differences = []
    for seed in range(8):
        lane.flush()
        text = letters(700, seed)
        whole, cached = (ask(lane.engine_url, text, TURN_TOKENS) for _ in range(2))
        differences.append(difference(whole, cached))
    return max(differences)


def answers(lane: Lane, figure: Figures) -> None:
    """Holds a pinned, a tagged and a plain conversation, and compares each answer with the
    engine's own to the whole history."""
    measured = noise(lane)
    figure("noise of one answer, log probability", round(measured, 6))
    bound = max(NOISE_FACTOR * measured, 1e-4)
    for retention in ("pinned", "tagged", "none"):
        session, history, parted = new_id(retention), "", 0
        if retention == "pinned":
            open_session(lane, session_id=session, retention=retention)
        for number in range(TURNS):
            text = letters(90, (retention, number)) + " "
            before, whole = len(history), history + text
            if retention == "pinned":
                said = ask(lane.router_url, text, TURN_TOKENS, session_params={"id": session})
                expected = (before - 1, before)
            else:
                headers = {"x-berth-session-id": session, "x-berth-retention": retention}
                said = ask(lane.router_url, whole, TURN_TOKENS, headers)
                pages = max(written(before), 0) // lane.page_size * lane.page_size
                expected = (pages,)
            assert said.prompt_tokens == len(whole), f"{retention}, turn {number}: {said}"
            if before:
                assert said.cached_tokens in expected, f"{retention}, turn {number}: {said}"
            alone = ask(lane.engine_url, whole, TURN_TOKENS)
            parted += said.ids != alone.ids
            apart = difference(said, alone)
            assert apart <= bound, f"{retention}, turn {number}: {apart}, {said}, {alone}"
            history = whole + said.text
        figure(f"{retention}: answers equal to the engine's alone", f"{TURNS - parted} of {TURNS}")
        if retention != "none":
            close(lane, session)


def close(lane: Lane, session: str) -> None:
    closed = wire.request("DELETE", f"{lane.router_url}/v1/sessions/{session}")
    assert closed.status == 204, f"the status of the close of {session}: {closed}"


def usage(lane: Lane, figure: Figures) -> None:
    """Follows a pinned session's KV in the figures that operators see."""
    def load() -> dict:
        return lane.worker_shown()["load"]

    lane.flush()
    shown = load()["kv_physical_usage"]
    assert shown["source"] == "shim", f"who knows the pool: {shown}"
    for device in load()["devices"]:
        parts = {name: figure_of["value"] for name, figure_of in device.items()
                 if isinstance(figure_of, dict)}
        figure(f"device {device['uuid']}", json.dumps(parts))
        if lane.machine.has_gpu:
            assert device["kv_physical_usage"]["source"] == "shim", device
            # Not every driver tells the memory of a process.
            if engine := device.get("engine_bytes"):
                assert device["kv_pool_bytes"]["value"] <= engine["value"], device
    wait_until(lane.agent, "empty", lambda: load()["kv_physical_usage"]["value"] < 0.01,
               SETTLE_SECONDS_MAX)
    session = new_id("usage")
    open_session(lane, session_id=session, retention="pinned")
    ask(lane.router_url, letters(1500), 4, session_params={"id": session})
    share = 1500 / lane.shape.pool_tokens
    for what, reached in (
        ("open", lambda: load()["kv_physical_usage"]["value"] >= share
            and load()["pinned_tokens"]["value"] > 0),
        ("close", lambda: load()["pinned_tokens"]["value"] == 0),
    ):
        begin = time.monotonic()
        if what == "close":
            close(lane, session)
        wait_until(lane.agent, f"told of the {what}", reached, SETTLE_SECONDS_MAX)
        figure(f"figures follow the {what} after, s", round(time.monotonic() - begin, 2))
    figure("kv_physical_usage of the cache that is left", load()["kv_physical_usage"]["value"])


def audits(lane: Lane, figure: Figures) -> None:
    """Audits pages while the engine decodes, and compares the steps with those without audits."""
    ratios = []
    for _ in range(3):
        with_audits, count = _decode_ms(lane, audited=True)
        without, _ = _decode_ms(lane, audited=False)
        ratios.append(with_audits / without)
        figure("ms a token with audits, without, audits",
               f"{with_audits:.3f}, {without:.3f}, {count}")
    figure("steps with audits by steps without, median", round(statistics.median(ratios), 3))
    lane.pool_at_rest()
    found = differences(lane)
    assert not found, f"where audit and engine differ: {found}"


def _decode_ms(lane: Lane, audited: bool) -> tuple[float, int]:
    """Returns the milliseconds of one token of a long answer, and the number of audits beside it."""
    tokens = lane.machine.decode_tokens

    def answer_ms() -> float:
        begin = time.monotonic()
        ask(lane.engine_url, letters(40), tokens)
        return 1000 * (time.monotonic() - begin)

    with ThreadPoolExecutor(1) as pool:
        answer, count = pool.submit(answer_ms), 0
        while audited and not answer.done():
            assert not faults(audit(lane)["pages"]), "faults beside a running turn"
            count += 1
    return answer.result() / tokens, count


def disturbances(lane: Lane, figure: Figures) -> None:
    """Demotes, restarts and kills the agent, aborts and overlaps turns. Nothing may be left."""
    session = new_id("disturbed")
    open_session(lane, session_id=session, retention="pinned")
    def turn(text: str) -> Said:
        return ask(lane.router_url, text, 8, session_params={"id": session})

    first = letters(300)
    history = first + turn(first).text
    assert wire.post(f"{lane.router_url}/v1/sessions/{session}/demote", {}).status == 204, "demotion"
    said = turn(" After the demotion.")
    assert said.prompt_tokens == len(history) + 20, f"the history after a demotion: {said}"
    figure("cached after a demotion", f"{said.cached_tokens} of {said.prompt_tokens}")
    history += " After the demotion." + said.text
    lane.restart_agent(settings=lane.settings)
    lane.wait_shim()
    said = turn(" After the restart.")
    assert said.cached_tokens >= len(history) - 1, f"the KV after a planned restart: {said}"
    close(lane, session)
    killed = new_id("killed")
    open_session(lane, session_id=killed, retention="pinned")
    ask(lane.router_url, letters(300), 8, session_params={"id": killed})
    lane.kill_agent()
    lane.start_agent(settings=lane.settings)
    lane.wait_placing()
    lane.wait_shim()
    again = wire.post(f"{lane.router_url}/generate", {
        "text": " After the kill.", "sampling_params": sampling(4), "session_params": {"id": killed},
    })
    figure("a pinned session's turn after kill -9 of its agent", again.status)
    wire.request("DELETE", f"{lane.router_url}/v1/sessions/{killed}")
    _abort_and_overlap(lane, figure)
    lane.flush()
    left = lane.wait_pool(0)
    assert left == 0, f"{left} tokens are held after all closes"
    found = differences(lane)
    assert not found, f"where audit and engine differ: {found}"


def _abort_and_overlap(lane: Lane, figure: Figures) -> None:
    session = new_id("aborted")
    open_session(lane, session_id=session, retention="pinned")
    request = {
        "text": letters(200), "sampling_params": sampling(500), "stream": True,
        "session_params": {"id": session},
    }
    stream = wire.stream(f"{lane.router_url}/generate", request)
    next(stream.events())
    stream.vanish()

    def turn(_: int) -> int:
        sent = request | {"text": " again", "sampling_params": sampling(4), "stream": False}
        return wire.post(f"{lane.router_url}/generate", sent).status

    with ThreadPoolExecutor(3) as pool:
        statuses = list(pool.map(turn, range(3)))
    figure("three turns at once after one that was left", str(statuses))
    assert set(statuses) <= {200, 409, 429}, f"the statuses: {statuses}"
    close(lane, session)


def planted(lane: Lane, figure: Figures) -> None:
    """Writes into a sealed page. The audit must name it. The engine is of no use afterwards."""
    session = new_id("planted")
    open_session(lane, session_id=session, retention="pinned")
    # Only the KV behind the prompt lies outside the radix tree.
    ask(lane.router_url, letters(40), 50, session_params={"id": session})
    lane.pool_at_rest()
    [known] = audit(lane)["sessions"]
    lane.plant("written", known["incarnation"])
    kinds = [fault["kind"] for fault in faults(audit(lane)["pages"])]
    figure("found after a write into a sealed page", ", ".join(kinds))
    assert kinds == ["changed"], f"what is found: {kinds}"


def steps(lane: Lane, figure: Figures) -> None:
    """Measures how long the shim works on the scheduler's thread, with pinned sessions that run."""
    path = lane.folder / "steps"
    seen = len(path.read_text().splitlines()) if path.exists() else 0
    sessions = [new_id("steps") for _ in range(4)]
    for session in sessions:
        open_session(lane, session_id=session, retention="pinned")

    def turn(session: str) -> None:
        ask(lane.router_url, letters(lane.machine.long_tokens // 50), lane.machine.decode_tokens,
            session_params={"id": session})

    begin = time.monotonic()
    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(turn, sessions))
    figure("four answers at once with their prompts, ms a token",
           round(1000 * (time.monotonic() - begin) / lane.machine.decode_tokens, 2))
    for session in sessions:
        close(lane, session)
    # The rest of a block of the plugin is not written yet.
    times = sorted(int(line) / 1000 for line in path.read_text().splitlines()[seen:])
    assert times, "no step was timed"
    at = lambda share: round(times[min(int(share * len(times)), len(times) - 1)], 1)  # noqa: E731
    figure("the shim's work after a step, us: steps, p50, p99, most",
           f"{len(times)}, {at(0.5)}, {at(0.99)}, {at(1)}")


def first_token_ms(url: str, text: str) -> float:
    begin = time.monotonic()
    request = {"text": text, "sampling_params": sampling(2), "stream": True}
    stream = wire.stream(f"{url}/generate", request, seconds=REQUEST_SECONDS_MAX)
    event = next(stream.events(), "")
    waited = 1000 * (time.monotonic() - begin)
    assert stream.status == 200 and "output_ids" in event, f"no token: {event[:300]}"
    stream.rest()
    stream.close()
    return waited


def waits(lane: Lane, figure: Figures) -> None:
    """Measures how long short prompts wait beside long ones, with staged prefill and without."""
    for stage_ms in (0, 600):
        lane.restart_agent(settings=f"{lane.settings}engine.prefill_stage_ms = {stage_ms}\n")
        lane.wait_shim()
        long = lane.machine.long_tokens
        for _ in range(2):
            # The agent learns the engine's rate.
            first_token_ms(lane.router_url, letters(long // 2))
        with ThreadPoolExecutor(1 + SHORT_CLIENTS) as pool:
            slow = pool.submit(first_token_ms, lane.router_url, letters(long))
            waited = []
            while not slow.done():
                sent = [pool.submit(first_token_ms, lane.router_url, letters(SHORT_TOKENS))
                        for _ in range(SHORT_CLIENTS)]
                waited += [each.result() for each in sent]
        figure(f"stages of {stage_ms} ms: long prompt; short ones, median and most, ms",
               f"{slow.result():.0f}; {statistics.median(waited):.0f}, {max(waited):.0f}")


def tiers(lane: Lane, figure: Figures) -> None:
    """Times the first token of a long prompt with its KV on the device, on the host and nowhere."""
    long = lane.machine.long_tokens

    def first_ms(seed: object) -> tuple[float, int]:
        begin = time.monotonic()
        said = ask(lane.engine_url, letters(long, seed), 1)
        return 1000 * (time.monotonic() - begin), said.cached_tokens

    nothing_ms, _ = first_ms("tiers")
    device_ms = min(first_ms("tiers")[0] for _ in range(3))
    # As much as the pool holds, so that the host alone has the first prompt.
    for number in range(lane.shape.pool_tokens // long + 1):
        first_ms(f"filler {number}")
    host_ms, cached_tokens = first_ms("tiers")
    figure(f"first token of {long} tokens, ms: from nothing, the host, the device",
           f"{nothing_ms:.0f}, {host_ms:.0f}, {device_ms:.0f}")
    figure("tokens that the host had", cached_tokens)
    assert cached_tokens >= long * 9 // 10, "the host has lost the prompt"
    if lane.machine.has_gpu:
        pool_bytes = lane.worker_shown()["load"]["devices"][0]["kv_pool_bytes"]["value"]
        gigabytes = long * pool_bytes / lane.shape.pool_tokens / 1e9
        figure("load back, GB/s", round(gigabytes / max((host_ms - device_ms) / 1000, 1e-3), 1))


def pressure(lane: Lane, figure: Figures) -> None:
    """Plays a main agent beside subagents that need more than the pool, by Berth's default."""
    out = lane.folder / "pressure.json"
    command = [
        str(lane.bin_dir / "berth-pressure"), "--only=trees", "--seeds=1",
        "--arms", "auto-host-2" if lane.shape.has_host_tier else "auto",
        "--ratios", str(lane.machine.pressure_ratio), "--at", lane.engine_url, lane.router_url,
        "--pool-tokens", str(lane.shape.pool_tokens), "--page-tokens", str(lane.page_size),
        "--out", str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    [outcome] = json.loads(out.read_text())
    turns = outcome["turns"]
    figure("turns, lost turns, the end", f"{len(turns)}, {outcome['turns_lost']}, {outcome['ending']}")
    known = sum(turn["known_tokens"] for turn in turns)
    again = sum(max(turn["known_tokens"] - turn["cached_tokens"], 0) for turn in turns)
    figure("tokens computed again, of those computed before", f"{again} of {known}")
    main = [round(turn["ttft_ms"]) for turn in turns if not turn["is_subagent"]]
    figure("the main agent's first tokens, ms", main)
    usage = outcome["physical"]
    assert usage is not None, "nobody saw the pool's use"
    figure("kv_physical_usage, peak and end", f"{usage['peak']:.2f}, {usage['floor']:.2f}")
    rate = ((lane.worker_shown()["load"] or {}).get("host") or {}).get("load_tokens_per_s")
    if rate is not None:
        figure("loads from the host, tokens/s, source", f"{rate['value']}, {rate['source']}")
    assert outcome["ending"] == "complete" and not outcome["turns_lost"], outcome["failures"]


class Overdue(Exception):
    """A part took too long. No `TimeoutError`, which is an `OSError` that clients expect."""


@contextmanager
def limit(seconds: int):
    """Ends what takes longer with an error."""
    def overdue(_number: int, _frame: object) -> None:
        raise Overdue(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, overdue)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def card() -> str:
    """Returns what `nvidia-smi` says of the card and its driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return "no GPU"
