"""What the soak's clients do, and how often.

Each operation does one thing to a client's session, and checks what Berth promises about it.
Without Berth nothing is promised, and the operations only count the outcomes.
"""

import http.client
import time
from collections.abc import Callable
from contextlib import suppress

from integration.wire import Stream
from soak import tokens, wire
from soak.targets import Target
from soak.session import AbandonedTurn, ClientSession
from soak.user import REOPEN, User

# Tokens of an answer that lasts long enough to act while the turn runs.
LONG_ANSWER = (90, 130)
IDLE_SECONDS = 1.0
GONE_SECONDS_MAX = 60
# More than the engine's context holds.
TOO_LONG_TOKENS = 2100


def turn(user: User) -> None:
    """Runs a pinned turn: streamed or not, as ids or text, short or long."""
    if session := user.ready_session("turn"):
        user.run_turn("turn", session)


def tagged(user: User) -> None:
    """Runs a turn of a tagged session, which sends its full history."""
    if user.tagged and len(user.tagged.history) > 500:
        user.target.close(user.tagged.id)
        user.tagged = None
    session = user.tagged = user.tagged or user.new_session()
    delta, _ = user.new_tokens(session)
    body = user.body(session.history + delta, user.chance.randint(4, 60), False)
    call = user.target.tagged(user.chance, session.id, body)
    reply = wire.post(call, user.target.turn_seconds)
    session.open |= reply.finished
    user.finish_turn("tagged", session, delta, reply)


def plain(user: User) -> None:
    """Runs a turn without a session."""
    session = ClientSession(f"{user.name}-plain")
    prompt, as_text = user.new_tokens(session, 300)
    body = user.body(prompt, user.chance.randint(4, 60), as_text)
    reply = wire.post(user.target.plain(user.chance, body), user.target.turn_seconds)
    user.finish_turn("plain", session, prompt, reply)


def overlap(user: User) -> None:
    """Sends two more turns while one runs: both are refused, and the first one goes on
    undisturbed."""
    if not (session := user.ready_session("overlap")):
        return
    delta, _ = user.new_tokens(session)
    count = user.chance.randint(*LONG_ANSWER)
    if not (begun := user.start_stream("overlap", session, delta, count)):
        return
    late = []
    for _ in range(2):
        more = tokens.ids(user.chance, 5)
        reply = user.send_turn(session, more, 8)
        user.report.count("overlapping turn", reply.outcome)
        if reply.finished:
            late.append((more, reply))
        elif not reply.code:
            user.report_broken("overlap", f"{reply.outcome} {reply.message}")
    if not user.finish_turn("overlap", session, delta, wire.read_to_end(*begun)):
        return
    for more, reply in late:
        # Right only if this turn came after the end of the first, whose answer is then in its
        # prompt.
        user.finish_turn("overlap", session, more, reply)


def stop(user: User) -> None:
    """Closes a stream early, as a client does that has read enough."""
    _leave_stream(user, "stop", Stream.close)


def vanish_stream(user: User) -> None:
    """Resets the connection of a stream, as a client does that crashes."""
    _leave_stream(user, "vanish in a stream", Stream.vanish)


def _leave_stream(user: User, name: str, leave: Callable[[Stream], None]) -> None:
    if not (session := user.ready_session(name)):
        return
    delta, _ = user.new_tokens(session)
    count = user.chance.randint(*LONG_ANSWER)
    if not (begun := user.start_stream(name, session, delta, count)):
        return
    stream, events = begun
    for _ in range(user.chance.randrange(8)):
        next(events, None)
    leave(stream)
    session.abandoned = AbandonedTurn(delta, count)
    user.report.count(name, "left")


def vanish_unstreamed(user: User) -> None:
    """Vanishes while it waits for an unstreamed answer."""
    name = "vanish from an unstreamed answer"
    if not (session := user.ready_session(name)):
        return
    delta, _ = user.new_tokens(session)
    count = user.chance.randint(*LONG_ANSWER)
    call = user.build_call(session, delta, count)
    try:
        reply = wire.post(call, user.chance.uniform(0.02, 0.8))
    except TimeoutError:
        session.abandoned = AbandonedTurn(delta, count)
        user.report.count(name, "left")
        return
    user.finish_turn(name, session, delta, reply)


def close(user: User) -> None:
    if session := user.ready_session("close"):
        _close(user, "close", session)


def close_running(user: User) -> None:
    """Closes a session while a turn runs. The close waits for the turn's proper end."""
    name = "close while a turn runs"
    if not (session := user.ready_session(name)):
        return
    delta, _ = user.new_tokens(session)
    begun = user.start_stream(name, session, delta, user.chance.randint(*LONG_ANSWER))
    if not begun:
        return
    _close(user, name, session)
    if user.finish_turn(name, session, delta, wire.read_to_end(*begun)):
        _gone(user, name, session)


def _close(user: User, name: str, session: ClientSession) -> None:
    reply = user.target.close(session.id)
    user.report.count(name, f"closed {reply.status}")
    # Berth may have closed the session already, to make room.
    if reply.status not in (200, 204) and reply.code not in REOPEN:
        user.report_broken(name, f"a close: {reply.outcome} {reply.message}")
    session.open = False
    user.pinned = None


def expire(user: User) -> None:
    """Leaves a session idle until Berth closes it. A turn after that has nothing to be appended
    to."""
    if user.pinned:
        user.give_up(user.pinned)
    session = user.new_session(IDLE_SECONDS)
    if not user.run_turn("expire", session):
        return
    _gone(user, "expire", session)
    reply = user.send_turn(session, tokens.ids(user.chance, 5), 8)
    user.report.count("turn after the expiry", reply.outcome)
    if reply.code not in REOPEN:
        user.report_broken("expire", f"a turn after it: {reply.outcome} {reply.message}")
    user.give_up(session)


def _gone(user: User, name: str, session: ClientSession) -> None:
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while user.target.is_there(session.id):
        if time.monotonic() > deadline:
            problem = f"the session is still there after {GONE_SECONDS_MAX} s"
            return user.report_broken(name, problem)
        time.sleep(0.1)


def stall(user: User) -> None:
    """Stops reading a stream for a while. The stream backs up, and the answer stays complete."""
    if not (session := user.ready_session("stall")):
        return
    delta, _ = user.new_tokens(session)
    count = user.chance.randint(*LONG_ANSWER)
    if not (begun := user.start_stream("stall", session, delta, count, small_buffer=True)):
        return
    # This sleep doesn't wait for anything: it is what the client does.
    time.sleep(user.chance.uniform(0.3, 2.0))
    user.finish_turn("stall", session, delta, wire.read_to_end(*begun))


def too_long(user: User) -> None:
    """Sends more than the context holds: it is refused, and the session goes on as before."""
    if session := user.ready_session("too long"):
        _refused_turn(user, "too long", session, tokens.ids(user.chance, TOO_LONG_TOKENS))


def foreign(user: User) -> None:
    """Sends a token id outside the vocabulary, which ends an engine that it reaches."""
    if session := user.ready_session("foreign id"):
        ids = [*tokens.ids(user.chance, 5), user.chance.choice(tokens.FOREIGN_IDS)]
        _refused_turn(user, "foreign id", session, ids)


def demote(user: User) -> None:
    """Has a session's KV given up to the cache, from where it may fall to the host. Its next turn
    goes on as if nothing had happened."""
    if session := user.ready_session("demote"):
        _moved(user, "demote", session)


def prefetch(user: User) -> None:
    """Has a session's KV loaded from the host, whatever is there of it."""
    if session := user.chance.choice((user.pinned, user.tagged)):
        _moved(user, "prefetch", session)


def _moved(user: User, name: str, session: ClientSession) -> None:
    reply = user.target.move(session.id, name)
    user.report.count(name, reply.outcome)
    # Berth may have closed the session already, and what can't be done now has a code.
    is_refused = reply.code and reply.status in (404, 409, 410, 429)
    if reply.status not in (200, 204) and not is_refused:
        user.report_broken(name, f"{reply.outcome} {reply.message}")


def _refused_turn(user: User, name: str, session: ClientSession, ids: list[int]) -> None:
    reply = user.send_turn(session, ids, 4)
    user.report.count(name, reply.outcome)
    if reply.finished:
        user.report_broken(name, "it was taken")
        user.give_up(session)
    elif reply.status not in (400, 413):
        user.handle_refusal(name, session, reply)


MIX: dict[Callable[[User], None], int] = {
    turn: 30,
    tagged: 10,
    plain: 9,
    overlap: 9,
    stop: 7,
    vanish_stream: 7,
    vanish_unstreamed: 7,
    close: 5,
    close_running: 5,
    expire: 3,
    stall: 3,
    too_long: 3,
    foreign: 2,
}

# What clients do beside these where the engine has a host tier.
TIER_MIX: dict[Callable[[User], None], int] = {demote: 8, prefetch: 8}

NAMES = {operation.__name__: operation for operation in MIX | TIER_MIX}


def mix(target: Target) -> dict[Callable[[User], None], int]:
    """Returns the operations with their weights. The bare engine gets no foreign id, which would
    end it at once and hide all that sessions do."""
    if target.guarded:
        return MIX | (TIER_MIX if target.has_host_tier else {})
    return {op: weight for op, weight in MIX.items() if op is not foreign}


def perform(user: User, operation: Callable[[User], None]) -> None:
    """Performs one operation. A broken connection counts as no answer."""
    try:
        operation(user)
    except (OSError, http.client.HTTPException) as error:
        user.report_broken(operation.__name__, f"no answer: {type(error).__name__} {error}")
        for session in (user.pinned, user.tagged):
            if session:
                with suppress(OSError, http.client.HTTPException):
                    user.target.close(session.id)
        user.pinned = user.tagged = None
