"""What happens when turns of a session overlap: a refusal, and then silent corruption."""

from conformance.engine import Engine, ids
from conformance.groups import in_groups
from conformance.refusals import in_session

FIRST = ids(40, 1)
SECOND = ids(40, 2)
TOKENS = 200


@in_groups("page16", "page1")
def test_a_refused_overlap_unlocks_the_session_and_the_third_turn_corrupts(engine: Engine) -> None:
    calm = engine.open()
    engine.turn(calm, FIRST, 20).good()
    undisturbed = engine.turn(calm, SECOND, TOKENS).good()
    engine.close(calm)
    engine.until("flushed", lambda: engine.flush().status == 200)

    session = engine.open()
    engine.turn(session, FIRST, 20).good()
    with engine.slow():
        flow = engine.flow(session, SECOND, TOKENS)
        flow.first()
        refused = engine.generate(in_session(session))
        message = "Streaming session already has an active request."
        assert (refused.status, refused.error) == (400, message), "the second turn"
        # The refusal has cleared the session's in-flight flag although the first turn still runs.
        third = engine.pending(session, ids(13, 3), 2)
        disturbed = flow.end()
        after = third.end()
    engine.expect("the third turn's status", after.status, 200)
    # Both turns count the one buffer that they share: the history and the third turn's delta.
    engine.expect("prompt tokens of the third turn", after.prompt, 60 + 13)
    engine.expect("prompt tokens of the disturbed turn", disturbed.prompt, 60 + 13)
    assert len(disturbed.output) == TOKENS, "tokens of the disturbed turn"
    engine.expect(
        "the disturbed turn answers what the undisturbed one did",
        disturbed.output == undisturbed.output, False,
    )


@in_groups("page16")
def test_turns_of_different_sessions_do_not_disturb_each_other(engine: Engine) -> None:
    """Compares turns run alone with the same turns side by side: the control for the test above."""
    alone = []
    for place in range(3):
        session = engine.open()
        alone.append(engine.turn(session, ids(40, 10 + place), 60).good().output)
        engine.close(session)
    flows = [engine.flow(engine.open(), ids(40, 10 + place), 60) for place in range(3)]
    assert [flow.end().output for flow in flows] == alone, "the answers"
