"""What happens when a decode runs out of KV: retractions, a lost turn, sessions never closed."""

from conformance.engine import Engine, Flow, body, ids
from conformance.groups import in_groups
from conformance.refusals import in_session
from integration import wire
from integration.turns import run_together

# Tokens of an answer. Four such turns don't fit in the pool together; each one alone does.
TOKENS = 850
# Tokens that the real engine has generated but not sent when it ends a turn. Most often none, more
# while other processes keep the cores busy.
UNSENT_MAX = 16
OUT_OF_MEMORY = (
    "Out of memory even after retracting all other requests in the decode batch. "
    "Aborting the last request."
)


def hopeful(engine: Engine, session: str | None, prompt: list[int], tokens: int, rid: str) -> Flow:
    """Starts a streamed turn that may end early, so that admission reserves little for it."""
    request = body(prompt, tokens, session, stream=True, rid=rid)
    del request["sampling_params"]["ignore_eos"]
    flow = Flow(wire.stream(f"{engine.url}/generate", request))
    flow.first()
    return flow


def run_out(engine: Engine) -> tuple[list[str], list[Flow]]:
    """Starts four sessions whose decodes fill the pool: one turn gets a 500, the others wait."""
    sessions = [engine.open() for _ in range(4)]
    for salt, session in enumerate(sessions):
        engine.turn(session, ids(100, 1 + salt), 4).good()
    # All four have begun before the pool is full.
    with engine.slow():
        flows = [
            hopeful(engine, session, ids(20, 10 + n), TOKENS, f"{session}-turn")
            for n, session in enumerate(sessions)
        ]
    return sessions, flows


@in_groups("page1")
def test_sessions_that_run_out_of_kv_stay_half_closed(engine: Engine) -> None:
    sessions, flows = run_out(engine)
    ended = flows[0].end()
    finish = {
        "type": "abort", "message": OUT_OF_MEMORY, "status_code": 500, "err_type": None,
    }
    engine.expect("how the first one ended", ended.finish, finish)
    engine.until_queued(3)
    load = engine.load()
    assert load["num_running_reqs"] == 0, "running requests"
    engine.expect("the whole pool is held", load["num_used_tokens"] > 2040, True)
    assert engine.get("/health").status == 200, "the status of /health"
    aborted = []
    for session, flow in zip(sessions[1:], flows[1:]):
        engine.abort(f"{session}-turn")
        aborted.append(flow.end())
    messages = [reply.finish["message"] for reply in aborted]
    assert messages == ["Abort in waiting queue"] * 3, "how the others ended"
    for session in sessions[1:]:
        engine.close(session)
    engine.until_idle()
    engine.until_reaped()
    engine.expect("their KV stays", engine.used() > 1000, True)
    engine.flushed()
    engine.until_used(0, "used after the flush")
    # The partial answer of the lost turn is part of the history now.
    after = engine.turn(sessions[0], ids(3, 30), 4).good()
    made = after.prompt - (104 + 20 + 3)
    told = len(ended.output)
    assert told > 300, "tokens of the lost answer"
    assert told <= made <= told + UNSENT_MAX, "tokens of the history"
    # The flush frees the KV of these sessions, but not their ids.
    closing = [f"Invalid request: close was requested for session {s}" for s in sessions[1:]]
    again = [engine.generate(in_session(session)).error for session in sessions[1:]]
    engine.expect("the retracted sessions never close", again, closing)


@in_groups("page1")
def test_a_retracted_turn_has_committed_its_partial_answer(engine: Engine) -> None:
    sessions, flows = run_out(engine)
    flows[0].end()
    engine.until_queued(3)
    engine.abort(f"{sessions[1]}-turn")
    ended = flows[1].end()
    engine.abort(all=True)
    for flow in flows[2:]:
        flow.end()
    engine.flushed()
    after = engine.turn(sessions[1], ids(3, 30), 4).good()
    made = after.prompt - (104 + 20 + 3)
    told = len(ended.output)
    assert told > 300, "tokens of the aborted answer"
    assert told <= made <= told + UNSENT_MAX, "tokens of the history"


@in_groups("page1")
def test_retracted_plain_requests_end_well(engine: Engine) -> None:
    flows = [hopeful(engine, None, ids(100, n), 700, f"plain-{n}") for n in range(4)]
    ends = [flow.end().good() for flow in flows]
    assert [reply.completion for reply in ends] == [700] * 4, "tokens"
    retractions = sum(reply.meta["num_retractions"] for reply in ends)
    engine.expect("there were retractions", retractions > 0, True)
    engine.until_used(0)


@in_groups("page16")
def test_answers_of_a_fixed_length_are_reserved_in_full(engine: Engine) -> None:
    sessions = [engine.open() for _ in range(4)]
    for salt, session in enumerate(sessions):
        engine.turn(session, ids(100, 1 + salt), 4).good()
    first = engine.flow(sessions[0], ids(20, 10), TOKENS)
    first.first()
    others = [engine.pending(s, ids(20, 11 + n), TOKENS) for n, s in enumerate(sessions[1:])]
    assert first.end().good().completion == TOKENS, "tokens of the first"
    engine.abort(all=True)
    for turn in others:
        assert turn.end().status == 200, "the status of one that had to wait"
    for session in sessions:
        engine.close(session)
    engine.until_used(0)


@in_groups("retract")
def test_forced_retractions_change_no_answer(engine: Engine) -> None:
    """The engine's test setting retracts a request in every third pass when more than one runs."""
    alone = []
    for n in range(2):
        session = engine.open()
        alone.append([
            engine.turn(session, ids(60, 2 * n), 30).good().output,
            engine.turn(session, ids(20, 2 * n + 1), 30).good().output,
        ])
        engine.close(session)
    engine.until("flushed", lambda: engine.flush().status == 200)
    sessions = [engine.open() for _ in range(2)]
    # The two run at the same time, also on a machine that is slow to send the second.
    with engine.slow(0.01):
        first = run_together(
            *[lambda n=n: engine.turn(sessions[n], ids(60, 2 * n), 30) for n in range(2)]
        )
        second = run_together(
            *[lambda n=n: engine.turn(sessions[n], ids(20, 2 * n + 1), 30) for n in range(2)]
        )
    retractions = sum(reply.good().meta["num_retractions"] for reply in first + second)
    engine.expect("there were retractions", retractions > 0, True)
    assert [reply.prompt for reply in second] == [110, 110], "prompt tokens of the second turns"
    assert [[a.output, b.output] for a, b in zip(first, second)] == alone, "the answers"
    for session in sessions:
        engine.close(session)
    engine.until_used(0)
