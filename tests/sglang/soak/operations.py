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
from soak.doors import Door
from soak.talk import Left, Talk
from soak.user import REOPEN, User

# Tokens of an answer that lasts long enough to act while the turn runs.
LONG_ANSWER = (90, 130)
IDLE_SECONDS = 1.0
GONE_SECONDS_MAX = 60
# More than the engine's context holds.
TOO_LONG_TOKENS = 2100


def turn(user: User) -> None:
    """Runs a pinned turn: streamed or not, as ids or text, short or long."""
    if talk := user.ready("turn"):
        user.turn("turn", talk)


def tagged(user: User) -> None:
    """Runs a turn of a tagged session, which sends its full history."""
    if user.tagged and len(user.tagged.history) > 500:
        user.door.close(user.tagged.id)
        user.tagged = None
    talk = user.tagged = user.tagged or user.new_talk()
    delta, _ = user.words(talk)
    body = user.body(talk.history + delta, user.chance.randint(4, 60), False)
    call = user.door.tagged(user.chance, talk.id, body)
    reply = wire.post(call, user.door.turn_seconds)
    talk.open |= reply.finished
    user.finished("tagged", talk, delta, reply)


def plain(user: User) -> None:
    """Runs a turn without a session."""
    talk = Talk(f"{user.name}-plain")
    prompt, as_text = user.words(talk, 300)
    body = user.body(prompt, user.chance.randint(4, 60), as_text)
    reply = wire.post(user.door.plain(user.chance, body), user.door.turn_seconds)
    user.finished("plain", talk, prompt, reply)


def overlap(user: User) -> None:
    """Sends two more turns while one runs: both are refused, and the first one goes on
    undisturbed."""
    if not (talk := user.ready("overlap")):
        return
    delta, _ = user.words(talk)
    if not (begun := user.begin("overlap", talk, delta, user.chance.randint(*LONG_ANSWER))):
        return
    late = []
    for _ in range(2):
        more = tokens.ids(user.chance, 5)
        reply = user.ask(talk, more, 8)
        user.report.count("overlapping turn", reply.outcome)
        if reply.finished:
            late.append((more, reply))
        elif not reply.code:
            user.wrong("overlap", f"{reply.outcome} {reply.message}")
    if not user.finished("overlap", talk, delta, wire.end_of(*begun)):
        return
    for more, reply in late:
        # Right only if this turn came after the end of the first, whose answer is then in its
        # prompt.
        user.finished("overlap", talk, more, reply)


def stop(user: User) -> None:
    """Closes a stream early, as a client does that has read enough."""
    _leave_stream(user, "stop", Stream.close)


def vanish_stream(user: User) -> None:
    """Resets the connection of a stream, as a client does that crashes."""
    _leave_stream(user, "vanish in a stream", Stream.vanish)


def _leave_stream(user: User, name: str, leave: Callable[[Stream], None]) -> None:
    if not (talk := user.ready(name)):
        return
    delta, _ = user.words(talk)
    count = user.chance.randint(*LONG_ANSWER)
    if not (begun := user.begin(name, talk, delta, count)):
        return
    stream, events = begun
    for _ in range(user.chance.randrange(8)):
        next(events, None)
    leave(stream)
    talk.left = Left(delta, count)
    user.report.count(name, "left")


def vanish_whole(user: User) -> None:
    """Vanishes while it waits for a whole answer."""
    name = "vanish from a whole answer"
    if not (talk := user.ready(name)):
        return
    delta, _ = user.words(talk)
    count = user.chance.randint(*LONG_ANSWER)
    call = user.call(talk, delta, count)
    try:
        reply = wire.post(call, user.chance.uniform(0.02, 0.8))
    except TimeoutError:
        talk.left = Left(delta, count)
        user.report.count(name, "left")
        return
    user.finished(name, talk, delta, reply)


def close(user: User) -> None:
    if talk := user.ready("close"):
        _close(user, "close", talk)


def close_running(user: User) -> None:
    """Closes a session while a turn runs. The close waits for the turn's proper end."""
    name = "close while a turn runs"
    if not (talk := user.ready(name)):
        return
    delta, _ = user.words(talk)
    begun = user.begin(name, talk, delta, user.chance.randint(*LONG_ANSWER))
    if not begun:
        return
    _close(user, name, talk)
    if user.finished(name, talk, delta, wire.end_of(*begun)):
        _gone(user, name, talk)


def _close(user: User, name: str, talk: Talk) -> None:
    reply = user.door.close(talk.id)
    user.report.count(name, f"closed {reply.status}")
    # Berth may have closed the session already, to make room.
    if reply.status not in (200, 204) and reply.code not in REOPEN:
        user.wrong(name, f"a close: {reply.outcome} {reply.message}")
    talk.open = False
    user.pinned = None


def expire(user: User) -> None:
    """Leaves a session idle until Berth closes it. A turn after that has nothing to be appended
    to."""
    if user.pinned:
        user.give_up(user.pinned)
    talk = user.new_talk(IDLE_SECONDS)
    if not user.turn("expire", talk):
        return
    _gone(user, "expire", talk)
    reply = user.ask(talk, tokens.ids(user.chance, 5), 8)
    user.report.count("turn after the expiry", reply.outcome)
    if reply.code not in REOPEN:
        user.wrong("expire", f"a turn after it: {reply.outcome} {reply.message}")
    user.give_up(talk)


def _gone(user: User, name: str, talk: Talk) -> None:
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while user.door.is_there(talk.id):
        if time.monotonic() > deadline:
            return user.wrong(name, f"the session is still there after {GONE_SECONDS_MAX} s")
        time.sleep(0.1)


def stall(user: User) -> None:
    """Stops reading a stream for a while. The stream backs up, and the answer stays complete."""
    if not (talk := user.ready("stall")):
        return
    delta, _ = user.words(talk)
    count = user.chance.randint(*LONG_ANSWER)
    if not (begun := user.begin("stall", talk, delta, count, small_buffer=True)):
        return
    # This sleep doesn't wait for anything: it is what the client does.
    time.sleep(user.chance.uniform(0.3, 2.0))
    user.finished("stall", talk, delta, wire.end_of(*begun))


def too_long(user: User) -> None:
    """Sends more than the context holds: it is refused, and the session goes on as before."""
    if talk := user.ready("too long"):
        _refused_turn(user, "too long", talk, tokens.ids(user.chance, TOO_LONG_TOKENS))


def foreign(user: User) -> None:
    """Sends a token id outside the vocabulary, which ends an engine that it reaches."""
    if talk := user.ready("foreign id"):
        ids = [*tokens.ids(user.chance, 5), user.chance.choice(tokens.FOREIGN_IDS)]
        _refused_turn(user, "foreign id", talk, ids)


def _refused_turn(user: User, name: str, talk: Talk, ids: list[int]) -> None:
    reply = user.ask(talk, ids, 4)
    user.report.count(name, reply.outcome)
    if reply.finished:
        user.wrong(name, "it was taken")
        user.give_up(talk)
    elif reply.status not in (400, 413):
        user.refused(name, talk, reply)


MIX: dict[Callable[[User], None], int] = {
    turn: 30,
    tagged: 10,
    plain: 9,
    overlap: 9,
    stop: 7,
    vanish_stream: 7,
    vanish_whole: 7,
    close: 5,
    close_running: 5,
    expire: 3,
    stall: 3,
    too_long: 3,
    foreign: 2,
}

NAMES = {operation.__name__: operation for operation in MIX}


def mix(door: Door) -> dict[Callable[[User], None], int]:
    """Returns the operations with their weights. The bare engine gets no foreign id, which would
    end it at once and hide all that sessions do."""
    return {op: weight for op, weight in MIX.items() if door.guarded or op is not foreign}


def perform(user: User, operation: Callable[[User], None]) -> None:
    """Performs one operation. A broken connection counts as no answer."""
    try:
        operation(user)
    except (OSError, http.client.HTTPException) as error:
        user.wrong(operation.__name__, f"no answer: {type(error).__name__} {error}")
        for talk in (user.pinned, user.tagged):
            if talk:
                with suppress(OSError, http.client.HTTPException):
                    user.door.close(talk.id)
        user.pinned = user.tagged = None
