"""The host tier: what each of SGLang's write policies copies, evicts, loads back and publishes."""

from conformance.engine import Engine, ids
from conformance.groups import POOL_TOKENS, TIERED, in_groups
from conformance.kv_events import CHAIN, Tape, hashes, removed, stored

# Prompts of this length that the device has room for, and that the host's copies have.
ON_DEVICE = POOL_TOKENS // CHAIN
ON_HOST = 2 * POOL_TOKENS // CHAIN
# The whole pages of a prompt before its last token, which is always computed.
FOUND = (CHAIN - 1) // 16 * 16


def ask(engine: Engine, *salts: int) -> None:
    for salt in salts:
        engine.turn(None, ids(CHAIN, salt), 1).good()
        # The engine notices the end of a copy in a step of its own.
        engine.until_idle()


def where(engine: Engine, salt: int) -> dict:
    """Where the engine found the prompt: on the device, on the host. It says nothing of a prompt
    that it found nowhere."""
    found = engine.turn(None, ids(CHAIN, salt), 1).good().meta["cached_tokens_details"]
    engine.until_idle()
    return found or {"device": 0, "host": 0}


def copied(tokens: list[int]) -> dict:
    return stored(tokens, 16, medium="CPU_PINNED")


@in_groups("write_through")
def test_what_is_computed_is_copied_at_once(engine: Engine) -> None:
    tape = Tape(engine)
    ask(engine, *range(1, ON_DEVICE + 2))
    expected = []
    for salt in range(1, ON_DEVICE + 2):
        if salt > ON_DEVICE:
            expected += [removed(hashes(ids(CHAIN, 1), 16))]
        expected += [stored(ids(CHAIN, salt), 16), copied(ids(CHAIN, salt))]
    tape.expect(expected)


@in_groups("write_through_selective")
def test_what_is_used_twice_is_copied(engine: Engine) -> None:
    tape = Tape(engine)
    ask(engine, 1, 2, 2)
    tape.expect([stored(ids(CHAIN, 1), 16), stored(ids(CHAIN, 2), 16), copied(ids(CHAIN, 2))])


@in_groups("write_back")
def test_what_is_evicted_is_copied(engine: Engine) -> None:
    tape = Tape(engine)
    ask(engine, *range(1, ON_DEVICE + 2))
    expected = [stored(ids(CHAIN, salt), 16) for salt in range(1, ON_DEVICE + 1)]
    first = ids(CHAIN, 1)
    expected += [copied(first), removed(hashes(first, 16)), stored(ids(CHAIN, ON_DEVICE + 1), 16)]
    tape.expect(expected)


@in_groups(*TIERED)
def test_what_the_device_has_evicted_is_loaded_back(engine: Engine) -> None:
    before = engine.turn(None, ids(CHAIN, 1), 9).good().output
    ask(engine, 1, *range(2, ON_DEVICE + 2))
    reply = engine.turn(None, ids(CHAIN, 1), 9).good()
    engine.expect(
        "where it was", reply.meta["cached_tokens_details"], {"device": 0, "host": FOUND}
    )
    engine.expect("the answer", reply.output, before)
    # The copy stays, and the device has it again.
    engine.expect("where it is", where(engine, 1), {"device": FOUND, "host": 0})


@in_groups(*TIERED)
def test_the_host_evicts_what_was_used_longest_ago(engine: Engine) -> None:
    # Each twice, so that each policy copies it.
    for salt in range(1, ON_HOST + ON_DEVICE + 3):
        ask(engine, salt, salt)
    engine.expect("the oldest", where(engine, 1), {"device": 0, "host": 0})
    newest = ON_HOST + ON_DEVICE + 2
    engine.expect("the newest", where(engine, newest), {"device": FOUND, "host": 0})
    # What has left the device is still on the host.
    engine.expect(
        "one between", where(engine, newest - ON_DEVICE), {"device": 0, "host": FOUND}
    )


@in_groups(*TIERED)
def test_a_flush_empties_both_tiers(engine: Engine) -> None:
    ask(engine, *(salt for salt in range(1, ON_DEVICE + 3) for _ in "12"))
    engine.flushed()
    for salt in range(1, ON_DEVICE + 3):
        engine.expect(f"prompt {salt}", where(engine, salt), {"device": 0, "host": 0})
        engine.flushed()
