"""Which KV the engine evicts first, by its policies other than the least recently used first."""

from conformance.engine import Engine, ids
from conformance.groups import POOL_TOKENS, TLRU, in_groups
from conformance.kv_events import CHAIN, Tape, hashes, removed, stored

# Prompts of this length that the device has room for.
ON_DEVICE = POOL_TOKENS // CHAIN


def ask(engine: Engine, salt: int, priority: int | None = None) -> dict:
    """Has the engine compute a prompt, and returns what it publishes of it."""
    more = {} if priority is None else {"priority": priority}
    engine.turn(None, ids(CHAIN, salt), 1, **more).good()
    engine.until_idle()
    return stored(ids(CHAIN, salt), 16)


@in_groups("priority")
def test_the_lowest_priority_is_evicted_first(engine: Engine) -> None:
    tape = Tape(engine)
    # A request without a priority has the lowest.
    priorities = [0, -1, None, 1][:ON_DEVICE]
    expected = [ask(engine, salt, priority) for salt, priority in enumerate(priorities, 1)]
    later = [ask(engine, salt, 7) for salt in (11, 12, 13)]
    for salt, event in zip((3, 2, 1), later):
        expected += [removed(hashes(ids(CHAIN, salt), 16)), event]
    tape.expect(expected)


@in_groups("tlru")
def test_ends_that_are_short_to_compute_are_evicted_first(engine: Engine) -> None:
    tape = Tape(engine)
    expected = [ask(engine, salt) for salt in range(1, ON_DEVICE)]
    # A conversation's next turn, whose end is a node of its own. It is used last.
    spare = TLRU["threshold"] - TLRU["next_prompt_estimate"]
    longer = ids(CHAIN, 1) + ids(spare, 99)
    expected += [ask(engine, ON_DEVICE)]
    engine.turn(None, longer, 1).good()
    engine.until_idle()
    later = ask(engine, ON_DEVICE + 1)
    expected += [stored(longer, 16, CHAIN), removed(hashes(longer, 16)[CHAIN // 16:])]
    # The beginning of that conversation was used too.
    expected += [removed(hashes(ids(CHAIN, 2), 16)), later]
    tape.expect(expected)
