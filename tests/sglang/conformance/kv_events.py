"""KV events: what the radix cache publishes over ZMQ, and when."""

import hashlib
from typing import Any

from conformance.engine import Engine, ids
from conformance.groups import EVENTS_KEPT, TOPIC, in_groups
from conformance.kv_wire import Batch, Socket, replay
from integration.turns import new_id

# Tokens of a prompt of which four fill the pool; a fifth evicts one of them.
CHAIN = 480


def hashes(tokens: list[int], page: int, salt: str | None = None) -> list[int]:
    """Returns the hashes of a prompt's full pages, computed by the engine's rule."""
    previous, names = b"", []
    if salt is not None:
        previous = hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()
    for begin in range(0, len(tokens) // page * page, page):
        page_bytes = b"".join(token.to_bytes(4, "little") for token in tokens[begin : begin + page])
        previous = hashlib.sha256(previous + page_bytes).digest()
        names.append(int.from_bytes(previous[:8], "big", signed=True))
    return names


def stored(tokens: list[int], page: int, begin: int = 0, end: int | None = None, **more: Any) -> dict:
    """Returns the event that stores a prompt's full pages from token `begin` to token `end`."""
    names = hashes(tokens, page, more.get("cache_salt"))
    first, last = begin // page, (len(tokens) if end is None else end) // page
    return {
        "type": "BlockStored",
        "block_hashes": names[first:last],
        "parent_block_hash": names[first - 1] if first else None,
        "token_ids": tokens[first * page : last * page],
        "block_size": page,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def removed(names: list[int]) -> dict:
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


def joined(events: list[dict]) -> list[dict]:
    """Joins stores that continue each other, and removals in a row. The engine joins those that it
    publishes in one step, so on a busy machine it may join those of two turns."""
    whole: list[dict] = []
    for event in events:
        if whole and _continues(event, last := whole[-1]):
            lists = [name for name in ("block_hashes", "token_ids") if name in last]
            whole[-1] = {**last, **{name: last[name] + event[name] for name in lists}}
        else:
            whole.append(event)
    return whole


def _continues(event: dict, last: dict) -> bool:
    def rest(of: dict) -> dict:
        names = ("block_hashes", "token_ids", "parent_block_hash")
        return {name: value for name, value in of.items() if name not in names}

    is_linked = event["type"] == "BlockRemoved" or (
        event["type"] == "BlockStored" and last.get("block_hashes", [])[-1:] == [
            event["parent_block_hash"]])
    return is_linked and rest(event) == rest(last)


class Tape:
    """Collects the events from its creation, which empties the cache, to a call of `end`."""

    def __init__(self, engine: Engine):
        self._engine = engine
        begin = self._mark()
        engine.until("flushed", lambda: engine.flush().status == 200)
        self._first = engine.until("the flush is published", lambda: self._cleared_since(begin))

    def batches(self) -> list[Batch]:
        return replay(self._engine.replay_port, self._first)

    def end(self) -> list[dict]:
        """Returns all events so far, in order. The borders of batches are dropped: the engine
        chooses them, and it is one step ahead of what it publishes."""
        mark = self._mark()
        events = [event for batch in self.batches() for event in batch.events]
        last = next(place for place, event in enumerate(events) if _is_mark(event, mark))
        return events[:last]

    def expect(self, expected: list[dict]) -> None:
        """Checks all events so far, whichever of them the engine has joined."""
        self._engine.expect("the events", joined(self.end()), joined(expected))

    def _mark(self) -> str:
        """Stores a page that no other request stores, and waits until its event is published.
        Returns the salt that identifies the event."""
        engine, mark = self._engine, new_id("mark")
        engine.until_idle()
        engine.turn(None, [7] * engine.group.page_size, 1, cache_salt=mark).good()
        engine.until("the mark is published", lambda: self._number_of(mark) is not None)
        return mark

    def _number_of(self, mark: str) -> int | None:
        for batch in reversed(replay(self._engine.replay_port, 0)):
            if any(_is_mark(event, mark) for event in batch.events):
                return batch.sequence
        return None

    def _cleared_since(self, mark: str) -> int | None:
        """Returns the number after that of the first flush behind the mark, or None if there is
        none yet."""
        number = self._number_of(mark)
        assert number is not None, "more batches than are kept"
        for batch in replay(self._engine.replay_port, number + 1):
            if CLEARED in batch.events:
                assert batch.events == [CLEARED], "the batch of a flush"
                return batch.sequence + 1
        return None


def _is_mark(event: dict, mark: str) -> bool:
    return event.get("cache_salt") == mark


@in_groups("page16", "page1")
def test_a_prompt_is_stored_first_and_then_its_output(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    reply = engine.turn(None, ids(40, 1), 20).good()
    # The last token has no KV, because no token was computed after it.
    whole = ids(40, 1) + reply.output[:-1]
    tape.expect([stored(whole, page, 0, 40), stored(whole, page, 40)])


@in_groups("page16", "page1")
def test_a_growing_conversation_stores_what_is_new(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    prompt, known, expected = ids(40, 1), 0, []
    for salt in (2, 3, 4):
        reply = engine.turn(None, prompt, 20).good()
        whole = prompt + reply.output[:-1]
        expected += [stored(whole, page, known, len(prompt)), stored(whole, page, len(prompt))]
        known, prompt = len(whole), whole + reply.output[-1:] + ids(30, salt)
    tape.expect(expected)


@in_groups("page16", "page1")
def test_a_prompt_that_is_known_stores_nothing(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    engine.turn(None, ids(64, 1), 1).good()
    engine.turn(None, ids(64, 1), 1).good()
    engine.turn(None, ids(32, 1), 1).good()
    tape.expect([stored(ids(64, 1), page)])


@in_groups("page16", "page1")
def test_a_long_prompt_is_stored_in_its_chunks(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    engine.turn(None, ids(800, 1), 1).good()
    chunk = engine.group.chunk_tokens
    expected = [stored(ids(800, 1), page, 0, chunk), stored(ids(800, 1), page, chunk)]
    tape.expect(expected)


@in_groups("page16", "page1")
def test_a_branch_is_stored_after_what_it_shares(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    other = ids(32, 1) + ids(32, 2)
    engine.turn(None, ids(64, 1), 1).good()
    engine.turn(None, other, 1).good()
    expected = [stored(ids(64, 1), page), stored(other, page, 32)]
    tape.expect(expected)


@in_groups("page16", "page1")
def test_the_oldest_chain_is_removed_for_a_new_one(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    for salt in range(1, 6):
        engine.turn(None, ids(CHAIN, salt), 1).good()
    expected = [stored(ids(CHAIN, salt), page) for salt in range(1, 5)]
    expected += [removed(hashes(ids(CHAIN, 1), page)), stored(ids(CHAIN, 5), page)]
    tape.expect(expected)


@in_groups("page16", "page1")
def test_an_output_is_removed_before_its_prompt(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    reply = engine.turn(None, ids(320, 1), 161).good()
    whole = ids(320, 1) + reply.output[:-1]
    for salt in (2, 3, 4):
        engine.turn(None, ids(CHAIN, salt), 1).good()
    engine.turn(None, ids(200, 5), 1).good()
    expected = [stored(whole, page, 0, 320), stored(whole, page, 320)]
    expected += [stored(ids(CHAIN, salt), page) for salt in (2, 3, 4)]
    expected += [removed(hashes(whole, page)[320 // page :]), stored(ids(200, 5), page)]
    tape.expect(expected)


@in_groups("page16", "page1")
def test_decode_makes_room_too(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    for salt in (1, 2, 3, 4):
        engine.turn(None, ids(CHAIN, salt), 1).good()
    # The prompt fits beside the others; its output doesn't.
    reply = engine.turn(None, ids(32, 5), 200).good()
    whole = ids(32, 5) + reply.output[:-1]
    expected = [stored(ids(CHAIN, salt), page) for salt in (1, 2, 3, 4)]
    expected += [stored(whole, page, 0, 32), removed(hashes(ids(CHAIN, 1), page))]
    expected.append(stored(whole, page, 32))
    tape.expect(expected)


@in_groups("page16", "page1")
def test_a_flush_clears_all_at_once(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    engine.turn(None, ids(64, 1), 1).good()
    # The second flush finds nothing to clear, and is published all the same.
    for _ in range(2):
        engine.until("flushed", lambda: engine.flush().status == 200)
    engine.turn(None, ids(64, 1), 1).good()
    chain = stored(ids(64, 1), page)
    tape.expect([chain, CLEARED, CLEARED, chain])


@in_groups("page16", "page1")
def test_a_streaming_session_shows_its_first_prompt_alone(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    session = engine.open()
    for salt in (1, 2, 3):
        engine.turn(session, ids(40, salt), 20).good()
    engine.close(session)
    engine.until_gone(session)
    tape.expect([stored(ids(40, 1), page)])


@in_groups("page16", "page1")
def test_an_aborted_session_turn_shows_the_whole_chain(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    session = engine.open()
    one = engine.turn(session, ids(40, 1), 20).good()
    with engine.slow(0.2):
        flow = engine.flow(session, ids(40, 2), 100, rid="aborted-kv")
        flow.first()
        engine.abort("aborted-kv")
        two = flow.end()
    assert two.finish["type"] == "abort", "how it ended"
    first, second = tape.end()
    engine.expect("the first event", first, stored(ids(40, 1), page))
    # How much of the aborted output is stored depends on when the abort came.
    history = ids(40, 1) + one.output + ids(40, 2)
    whole = history + second["token_ids"][len(history) - 40 // page * page :]
    engine.expect("the second event", second, stored(whole, page, 40))
    engine.close(session)


@in_groups("page16", "page1")
def test_a_session_that_lost_its_kv_shows_its_history(engine: Engine) -> None:
    page, tape = engine.group.page_size, Tape(engine)
    session = engine.open()
    reply = engine.turn(session, ids(40, 1), 20).good()
    engine.until("flushed", lambda: engine.flush().status == 200)
    engine.turn(session, ids(40, 2), 5).good()
    history = ids(40, 1) + reply.output + ids(40, 2)
    expected = [stored(ids(40, 1), page), CLEARED, stored(history, page)]
    tape.expect(expected)
    engine.close(session)


@in_groups("page16", "page1")
def test_a_refused_request_stores_nothing_of_its_prompt(engine: Engine) -> None:
    tape = Tape(engine)
    assert engine.turn("nobody", ids(64, 1), 4).status == 400, "the status"
    tokens = [token for event in tape.end() for token in event["token_ids"]]
    # Instead of the refused request the engine runs one token of padding, which is a whole page
    # only at page size 1. The real engine may have computed one more token by then.
    padding = [0] if engine.group.page_size == 1 else []
    engine.expect("the tokens stored", tokens[:1], padding)


@in_groups("page16", "both")
def test_events_name_the_session_of_a_request(engine: Engine) -> None:
    page, tape, id = engine.group.page_size, Tape(engine), new_id("t")
    reply = engine.turn(None, ids(40, 1), 20, session_id=id).good()
    whole = ids(40, 1) + reply.output[:-1]
    grown = whole + reply.output[-1:] + ids(4, 2)
    engine.turn(None, grown, 1).good()
    expected = [
        stored(whole, page, 0, 40, session_id=id),
        stored(whole, page, 40, session_id=id),
        stored(grown, page, len(whole)),
    ]
    engine.close(id)
    tape.expect(expected)


@in_groups("page16", "page1")
def test_a_salt_changes_the_hashes_and_an_extra_key_does_not(engine: Engine) -> None:
    page, tape, prompt = engine.group.page_size, Tape(engine), ids(48, 1)
    more = [{}, {"cache_salt": "one"}, {"cache_salt": "other"}, {"extra_key": "one"}]
    replies = [engine.turn(None, prompt, 1, **some).good() for some in more]
    engine.expect("cached", [reply.cached for reply in replies], [0, 0, 0, 0])
    again = [engine.turn(None, prompt, 1, **some).good() for some in more]
    engine.expect("cached again", {reply.cached for reply in again}, {47 // page * page})
    expected = [
        stored(prompt, page),
        stored(prompt, page, cache_salt="one"),
        stored(prompt, page, cache_salt="other"),
        stored(prompt, page),
    ]
    tape.expect(expected)


@in_groups("page16", "page1")
def test_a_session_s_salt_is_its_turn_s(engine: Engine) -> None:
    page, tape, session = engine.group.page_size, Tape(engine), engine.open()
    engine.turn(session, ids(40, 1), 4, cache_salt="one").good()
    tape.expect([stored(ids(40, 1), page, cache_salt="one")])
    engine.close(session)


@in_groups("page16", "page1")
def test_live_and_replayed_batches_are_the_same(engine: Engine) -> None:
    tape = Tape(engine)
    live, deaf = (Socket(engine.events_port, b"SUB", 30) for _ in range(2))
    try:
        live.send([b"\x01" + TOPIC[:2].encode()])
        deaf.send([b"\x01another"])
        # A subscription takes effect when it arrives; the first batch received shows that it did.
        heard: list[Batch] = []
        prompts = iter(range(10_000))

        def hears() -> bool:
            engine.turn(None, ids(64, next(prompts)), 1).good()
            try:
                heard.append(Batch.from_frames(live.receive(0.5)))
            except TimeoutError:
                return False
            return True

        engine.until("a batch comes", hears)
        for salt in (1, 2, 3):
            engine.turn(None, [salt] * 100, 20).good()
        tape.end()
        kept = replay(engine.replay_port, heard[0].sequence)
        while heard[-1].sequence < kept[-1].sequence:
            heard.append(Batch.from_frames(live.receive(30)))
        assert heard == kept[: len(heard)], "what came, beside what is kept"
        assert {(batch.topic, batch.rank) for batch in heard} == {(TOPIC.encode(), 0)}, (
            "whose it is"
        )
        try:
            raise AssertionError(f"another topic's subscriber hears {deaf.receive(0.1)}")
        except TimeoutError:
            pass
    finally:
        live.close()
        deaf.close()


@in_groups("page16", "page1")
def test_replays_begin_where_asked_and_reach_back_as_far_as_configured(engine: Engine) -> None:
    while replay(engine.replay_port, 0)[-1].sequence <= EVENTS_KEPT:
        engine.until("flushed", lambda: engine.flush().status == 200)
    Tape(engine).end()
    everything = [batch.sequence for batch in replay(engine.replay_port, 0)]
    assert len(everything) == EVENTS_KEPT, "batches kept"
    assert everything == list(range(everything[0], everything[0] + EVENTS_KEPT)), "their numbers"
    some = [batch.sequence for batch in replay(engine.replay_port, everything[-3])]
    assert some == everything[-3:], "a replay of the last three"
    assert replay(engine.replay_port, everything[-1] + 1) == [], "a replay of what is to come"


@in_groups("page16", "page1")
def test_server_info_says_where_events_are(engine: Engine) -> None:
    found = engine.get("/server_info").json()["kv_events"]
    expected = {
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": engine.events_port,
        "topic": TOPIC, "block_size": engine.group.page_size, "dp_size": 1,
        "replay_endpoint_port_base": engine.replay_port,
    }
    engine.expect("where events are", found, expected)


@in_groups("tagged")
def test_without_the_flag_there_are_no_events(engine: Engine) -> None:
    engine.expect("where events are", engine.get("/server_info").json()["kv_events"], None)
