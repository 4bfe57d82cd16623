"""Tagged sessions: requests name a `session_id`, and their KV is evicted after untagged KV."""

from conformance.engine import Engine, Reply, ids
from conformance.groups import in_groups
from integration.turns import new_id, run_together

# Tokens of a prompt of which four fill the pool; a fifth evicts one of them.
CHAIN = 480
PROBE = 33


def tagged(engine: Engine, id: str, prompt: list[int], tokens: int = 1) -> Reply:
    return engine.turn(None, prompt, tokens, session_id=id).good()


def fill(engine: Engine, salt: int, id: str | None = None) -> None:
    """Leaves a chain in the tree that shares no prefix with others, tagged if an id is given."""
    if id is None:
        engine.turn(None, ids(CHAIN, salt), 1).good()
    else:
        tagged(engine, id, ids(CHAIN, salt))


def is_cached(engine: Engine, salt: int) -> bool:
    """Whether the chain of `salt` is cached. The probe is its beginning, which takes little
    room."""
    reply = engine.turn(None, ids(PROBE, salt), 1).good()
    assert reply.cached in (0, PROBE // 16 * 16), f"cached: {reply.cached}"
    return reply.cached > 0


@in_groups("tagged", "both")
def test_a_growing_prompt_hits_whole_pages(engine: Engine) -> None:
    id, prompt, cached = new_id("t"), ids(100, 1), 0
    for place in range(3):
        reply = tagged(engine, id, prompt, 20)
        engine.expect(f"turn {place}: cached", reply.cached, cached)
        assert reply.prompt == len(prompt), f"turn {place}: prompt tokens"
        cached = (len(prompt) + 19) // 16 * 16
        prompt = prompt + reply.output + ids(4, 2 + place)
    engine.until_used(0, "used by an idle tagged session")


@in_groups("tagged", "both")
def test_turns_of_one_id_run_side_by_side(engine: Engine) -> None:
    id = new_id("t")
    with engine.slow():
        flows = [
            engine.flow(None, ids(40, 1 + n), 300, session_id=id) for n in range(3)
        ]
        engine.until("all three run", lambda: engine.load()["num_running_reqs"] == 3)
        engine.sleep_in_forward(0)
        ends = [flow.end().good() for flow in flows]
    assert [reply.completion for reply in ends] == [300, 300, 300], "tokens"
    alone = run_together(*[lambda n=n: engine.turn(None, ids(40, 1 + n), 300) for n in range(3)])
    assert [r.output for r in ends] == [r.output for r in alone], "the answers"


@in_groups("tagged", "both")
def test_untagged_kv_goes_before_tagged(engine: Engine) -> None:
    id = new_id("t")
    fill(engine, 1, id)
    for salt in (2, 3, 4):
        fill(engine, salt)
    # The tagged chain is the oldest one, and it still stays.
    fill(engine, 5)
    fill(engine, 6)
    engine.expect("the tagged chain stays", is_cached(engine, 1), True)
    engine.expect("the oldest untagged one is gone", is_cached(engine, 2), False)
    engine.close(id)


@in_groups("tagged")
def test_without_a_tag_the_oldest_goes(engine: Engine) -> None:
    for salt in range(1, 6):
        fill(engine, salt)
    assert [is_cached(engine, salt) for salt in (5, 4, 1)] == [True, True, False], "what is cached"


@in_groups("tagged", "both")
def test_a_closed_tag_protects_no_longer(engine: Engine) -> None:
    kept, closed = new_id("t"), new_id("t")
    fill(engine, 1, kept)
    fill(engine, 2, closed)
    fill(engine, 3)
    fill(engine, 4)
    engine.close(closed)
    # Only age counts now: the chain of the closed tag is older than the untagged ones.
    fill(engine, 5)
    engine.expect("the open tag's chain stays", is_cached(engine, 1), True)
    engine.expect("the youngest untagged one stays", is_cached(engine, 4), True)
    engine.expect("the closed tag's chain is gone", is_cached(engine, 2), False)
    engine.close(kept)


@in_groups("tagged", "both")
def test_a_close_frees_nothing(engine: Engine) -> None:
    id = new_id("t")
    first = tagged(engine, id, ids(160, 1), 20)
    engine.close(id)
    whole = ids(160, 1) + first.output
    reply = engine.turn(None, whole, 1).good()
    engine.expect("cached of a plain request", reply.cached, 176)


@in_groups("tagged", "both")
def test_a_new_request_under_a_closed_id_tags_again(engine: Engine) -> None:
    id = new_id("t")
    tagged(engine, id, ids(40, 9))
    engine.close(id)
    fill(engine, 1, id)
    for salt in (2, 3, 4):
        fill(engine, salt)
    fill(engine, 5)
    engine.expect("the chain stays", is_cached(engine, 1), True)
    engine.close(id)


@in_groups("tagged", "both")
def test_a_turn_that_outlives_the_close_does_not_tag(engine: Engine) -> None:
    id = new_id("t")
    with engine.slow(0.2):
        flow = engine.flow(None, ids(CHAIN, 1), 10, session_id=id)
        flow.first()
        engine.close(id)
        assert flow.end().good().completion == 10, "tokens: the close stops nothing"
    for salt in (2, 3, 4):
        fill(engine, salt)
    fill(engine, 5)
    engine.expect("the youngest untagged one stays", is_cached(engine, 4), True)
    engine.expect("the chain is gone", is_cached(engine, 1), False)


@in_groups("tagged", "both")
def test_an_aborted_turn_does_not_tag(engine: Engine) -> None:
    id = new_id("t")
    with engine.slow(0.1):
        flow = engine.flow(None, ids(CHAIN, 1), 60, session_id=id, rid="tagged-one")
        flow.first()
        engine.abort("tagged-one")
        assert flow.end().finish["type"] == "abort", "how it ended"
    for salt in (2, 3, 4):
        fill(engine, salt)
    fill(engine, 5)
    engine.expect("the chain is gone", is_cached(engine, 1), False)
    engine.close(id)


@in_groups("tagged", "both")
def test_what_more_tags_hold_goes_later(engine: Engine) -> None:
    one, other = new_id("t"), new_id("t")
    fill(engine, 1, one)
    fill(engine, 1, other)
    for salt in (2, 3, 4):
        fill(engine, salt, one)
    fill(engine, 5)
    engine.expect("the chain of two tags stays", is_cached(engine, 1), True)
    engine.expect("the oldest chain of one tag is gone", is_cached(engine, 2), False)
    engine.close(one)
    engine.close(other)


@in_groups("tagged")
def test_tags_hold_nothing_back(engine: Engine) -> None:
    """Checks that tagged KV is evicted too when all that is cached is tagged."""
    id = new_id("t")
    for salt in range(1, 9):
        fill(engine, salt, id)
    reply = engine.turn(None, ids(900, 20), 100).good()
    assert reply.completion == 100, "tokens of a large plain request"
    engine.close(id)


@in_groups("tagged")
def test_a_chat_is_tagged_by_its_session_id(engine: Engine) -> None:
    id = new_id("t")
    request = {
        "model": "tiny", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "session_id": id,
        "messages": [{"role": "user", "content": "x" * 100}],
    }
    usage = []
    for _ in range(2):
        answer = engine.post("/v1/chat/completions", request)
        assert answer.status == 200, "the status of a chat"
        usage.append(answer.json()["usage"])
    prompt = usage[1]["prompt_tokens"]
    cached = usage[1]["prompt_tokens_details"]["cached_tokens"]
    engine.expect("cached of the same chat", cached, (prompt - 1) // 16 * 16)
    engine.close(id)


@in_groups("page16")
def test_without_the_flag_a_session_id_is_nothing(engine: Engine) -> None:
    id = new_id("t")
    fill(engine, 1, id)
    for salt in (2, 3, 4):
        fill(engine, salt)
    fill(engine, 5)
    engine.expect("the chain is gone", is_cached(engine, 1), False)
    engine.close(id)


@in_groups("both")
def test_pinned_and_tagged_sessions_beside_each_other(engine: Engine) -> None:
    id = new_id("t")
    first = tagged(engine, id, ids(100, 1), 20)
    pinned = engine.open()
    one = engine.turn(pinned, ids(60, 1), 10).good()
    engine.expect("cached of the pinned session's first turn", one.cached, 48)
    second = tagged(engine, id, ids(100, 1) + first.output + ids(4, 2), 20)
    engine.expect("cached of the tagged session's second turn", second.cached, 112)
    two = engine.turn(pinned, ids(5, 3), 10).good()
    engine.expect("cached of the pinned session's second turn", two.cached, 69)
    # All KV of the pinned session is held, and none of the tagged session.
    engine.until_used(96)
    engine.close(id)
    engine.close(pinned)
    engine.until_used(0)
