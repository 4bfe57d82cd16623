"""Tagged sessions: a client sends its full history, and the engine computes what isn't resident.

A client needs only a header, which coding agents send by themselves.
"""

from integration import wire
from integration.fleet import MODEL, Fleet
from integration.plain import openai_client
from integration.seams import written
from integration.turns import chat_body, chat_tokens, delete_session, get_session, new_id

TOKENS = 20
SYSTEM = {"role": "system", "content": "You are the harbour master, and you answer briefly."}
# The credential that the OpenAI client sends: a session belongs to the credential that opened it.
CREDENTIAL = {"authorization": "Bearer integration"}

NATIVE_HEADERS = (
    "x-berth-session-id",
    "x-claude-code-session-id",
    "thread-id",
    "x-session-id",
    "x-dynamo-session-id",
    "x-session-affinity",
)

# What SGLang answers with 200, and a session can't take.
BEYOND_A_SESSION = (
    ("/v1/chat/completions", chat_body("hello", 4, n=2)),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2}),
)


def test_turns_of_a_growing_chat(fleet: Fleet) -> None:
    _grow(fleet, stream=False)


def test_streamed_turns_of_a_growing_chat(fleet: Fleet) -> None:
    _grow(fleet, stream=True)


def _grow(fleet: Fleet, stream: bool) -> None:
    id = new_id("tagged")
    messages = [SYSTEM, {"role": "user", "content": f"{id}: which ships are in?"}]
    resident = 0
    for place in range(4):
        text, prompt, cached = _chat(fleet, id, messages, stream)
        assert prompt == chat_tokens(messages), f"turn {place}: prompt tokens"
        assert len(text) == TOKENS, f"turn {place}: the answer's length"
        if place:
            # Cached are the whole pages of what the engine computed in the previous turn.
            pages = written(resident) // fleet.page_size * fleet.page_size
            assert cached == pages, f"turn {place}: cached tokens of {resident} resident"
        resident = prompt + TOKENS
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"And berth number {place}?"},
        ]
    shown = get_session(fleet, id, CREDENTIAL)
    assert shown.status == 200, f"the status of {shown}"
    assert shown.json()["retention"] == "tagged", "the retention"
    assert delete_session(fleet, id, CREDENTIAL).status == 204, "the status of the close"


def _chat(fleet: Fleet, id: str, messages: list[dict], stream: bool) -> tuple[str, int, int]:
    """Sends a chat. Returns the answer, the prompt tokens, and how many of them were cached."""
    call = dict(
        model=MODEL,
        messages=messages,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
        extra_headers={"x-berth-session-id": id},
    )
    completions = openai_client(fleet).chat.completions
    if not stream:
        answer = completions.create(**call)
        text, usage = answer.choices[0].message.content, answer.usage
    else:
        chunks = list(completions.create(**call, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
        usage = chunks[-1].usage
    # Before SGLang 0.5.22 there are none if nothing was cached.
    details = usage.prompt_tokens_details
    return text, usage.prompt_tokens, details.cached_tokens if details else 0


def test_every_way_to_name_a_session(fleet: Fleet) -> None:
    for header in NATIVE_HEADERS:
        id = new_id("named")
        _named(fleet, id, chat_body("hello", 4), {header: id}, header)
    id = new_id("named")
    _named(fleet, id, chat_body("hello", 4, session_id=id), {}, "session_id in the body")
    id = new_id("named")
    control = {"session_control": {"session_id": id}}
    _named(fleet, id, chat_body("hello", 4, nvext=control), {}, "nvext.session_control")


def _named(fleet: Fleet, id: str, request: dict, headers: dict, how: str) -> None:
    answer = wire.post(f"{fleet.router_url}/v1/chat/completions", request, headers)
    assert answer.status == 200, f"{how}: the status of {answer}"
    shown = get_session(fleet, id)
    assert shown.status == 200, f"{how}: the status of the session ({shown})"
    assert delete_session(fleet, id).status == 204, f"{how}: the status of the close"


def test_a_name_that_a_client_sends_on_its_own_refuses_nothing(fleet: Fleet) -> None:
    for path, request in BEYOND_A_SESSION:
        bare = wire.post(f"{fleet.engine_url}{path}", request, {})
        assert bare.status == 200, f"the bare engine's status of {path}: {bare}"
        for headers in ({"thread-id": new_id("hint")}, {"thread-id": ""}, {"thread-id": "i" * 300}):
            answer = wire.post(f"{fleet.router_url}{path}", request, headers)
            assert answer.status == 200, f"{path} with {headers}: the status of {answer}"
            assert len(answer.json()["choices"]) == 2, f"{path}: the answers"
        named = wire.post(f"{fleet.router_url}{path}", request, {"x-berth-session-id": new_id("n")})
        assert named.status == 400, f"{path} in a session named on purpose: {named}"


def test_a_correlation_id_begins_a_session_when_it_comes_again(fleet: Fleet) -> None:
    id = new_id("correlated")
    for status in (404, 200):
        headers = {"x-correlation-id": id}
        answer = wire.post(f"{fleet.router_url}/v1/chat/completions", chat_body("hello", 4), headers)
        assert answer.status == 200, f"the status of {answer}"
        assert get_session(fleet, id).status == status, "whether there is a session"
    assert delete_session(fleet, id).status == 204, "the status of the close"


def test_the_first_way_that_applies_wins(fleet: Fleet) -> None:
    first, second, third = new_id("first"), new_id("second"), new_id("third")
    control = {"session_control": {"session_id": first}}
    request = chat_body("hello", 4, nvext=control, session_id=third)
    headers = {"x-berth-session-id": second}
    answer = wire.post(f"{fleet.router_url}/v1/chat/completions", request, headers)
    assert answer.status == 200, f"the status of {answer}"
    found = [get_session(fleet, id).status for id in (first, second, third)]
    assert found == [200, 404, 404], "the sessions there are"
    delete_session(fleet, first)
