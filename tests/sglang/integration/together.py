"""Sessions give the same answers side by side as alone."""

from integration import wire
from integration.fleet import Fleet
from integration.turns import Pinned, chat_body, delete_session, new_id, run_together, slow_engine

TALKS = (
    ("Rain on the quay.", " Wind from the west.", " Fog at night."),
    ("Two tugs are out.", " One is back.", " Both are moored now."),
)


def test_two_pinned_sessions_in_turns(fleet: Fleet) -> None:
    first, second = Pinned(fleet), Pinned(fleet)
    for one, other in zip(*TALKS):
        first.turn(one, 20)
        second.turn(other, 20, stream=True)
    first.close()
    second.close()


def test_two_pinned_sessions_at_once(fleet: Fleet) -> None:
    # `Pinned.turn` compares with the engine's own answer; here all these requests overlap.
    def talk(texts: tuple[str, ...], stream: bool) -> None:
        session = Pinned(fleet)
        for text in texts:
            session.turn(text, 60, stream=stream)
        session.close()

    run_together(lambda: talk(TALKS[0], True), lambda: talk(TALKS[1], False))


def test_six_sessions_at_once(fleet: Fleet) -> None:
    def talk(number: int) -> None:
        session = Pinned(fleet)
        for place in range(3):
            session.turn(f"Ship {number}, message {place}. ", 20, stream=bool(number % 2))
        session.close()

    run_together(*[lambda number=number: talk(number) for number in range(6)])


def test_a_tagged_session_runs_turns_side_by_side(fleet: Fleet) -> None:
    id = new_id("tagged")
    url = f"{fleet.router_url}/v1/chat/completions"

    def ask(question: str) -> wire.Answer:
        return wire.post(url, chat_body(question, 40), {"x-berth-session-id": id})

    alone = [ask(question) for question in ("Who is in?", "Who is out?")]
    with slow_engine(fleet, 0.02):
        both = run_together(lambda: ask("Who is in?"), lambda: ask("Who is out?"))
    assert [answer.status for answer in both] == [200, 200], "the statuses"
    assert [_said(answer) for answer in both] == [_said(answer) for answer in alone], "the answers"
    delete_session(fleet, id)


def _said(answer: wire.Answer) -> str:
    return answer.json()["choices"][0]["message"]["content"]
