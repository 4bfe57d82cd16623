"""Tests the hooks around the engine's tokenizer.

A request that the hooks aren't meant for, or can't help, runs unchanged. No answer is computed
from another context than the client's."""

from types import SimpleNamespace
from typing import Any

import pytest
from berth_shim.trimmer import ContextMismatch, NotContinued, OtherKV, Trimmer

from .engine import Manager, Request, Tokenizer
from .model import ToyTokenizer, raw

ANSWER = ToyTokenizer().encode("ab")


class Harness:
    """The trimmer in an engine, connected as SGLang's hook registry does."""

    def __init__(self) -> None:
        self.manager, self.trimmer = Manager(), Trimmer(bytes(16), "0")
        self.trimmer.enable(Tokenizer(), SimpleNamespace)

    async def open(self, id: str = "s") -> None:
        request = SimpleNamespace(session_id=id, streaming=True)
        await self.trimmer._hook_open(Manager.open_session, self.manager, request)

    async def close(self, id: str = "s") -> None:
        request = SimpleNamespace(session_id=id)
        await self.trimmer._hook_close(Manager.close_session, self.manager, request)

    async def tokenize(self, request: Request) -> Any:
        """Runs a request as `generate_request` does, until it would go to the scheduler."""

        async def entered(manager: Manager, request: Request, _http: Any) -> Any:
            manager.arrive(request)
            return await self.trimmer._hook_tokenize(Manager.tokenize, manager, request)

        return await self.trimmer._hook_generate(entered, self.manager, request, request.http)

    async def begin(self, request: Request) -> Any:
        self.manager.send(await self.tokenize(request))
        return self.trimmer._hook_wait(Manager.wait, self.manager, request, None)

    async def run_turn(self, text: str, session: str | None = "s", **more: Any) -> str:
        """Runs a whole turn. Returns the text that the engine ran on."""
        request = Request(text, session, **more)
        answer = await self.begin(request)
        prompt = list(self.manager.prompt)
        self.manager.generate(request.rid, ANSWER, "length")
        await anext(answer)
        return raw(prompt).decode()

    @property
    def sent(self) -> str:
        return raw(self.manager.sent.input_ids).decode()


@pytest.fixture
def harness() -> Harness:
    return Harness()


async def test_a_full_history_sends_only_new_tokens(harness: Harness) -> None:
    await harness.open()
    assert await harness.run_turn("<s>a<e>") == "<s>a<e>"
    assert await harness.run_turn("<s>a<e>ab<s>b") == "<s>a<e>ab<s>b"
    assert harness.sent == "<s>b"
    assert harness.manager.sent.session_id is None


@pytest.mark.parametrize("must_continue", [False, True])
async def test_the_second_turn_of_one_request_runs_outside_the_session(
    harness: Harness, must_continue: bool
) -> None:
    plans = []
    harness.trimmer._send_plan = plans.append
    await harness.open()
    request = Request("<s>a<e>", "s", must_continue=must_continue)
    answer = await harness.begin(request)
    harness.manager.generate("r", ANSWER, "length")
    await anext(answer)
    # The engine has called a tool, and asks again for the same HTTP request.
    http, request = request.http, Request("<s>a<e>ab<s>b", rid="r2")
    request.http = http
    if must_continue:
        with pytest.raises(NotContinued):
            await harness.tokenize(request)
    else:
        tokenized = await harness.tokenize(request)
        assert raw(tokenized.input_ids) == b"<s>a<e>ab<s>b" and tokenized.session_params is None
    assert [plan.plan for plan in plans] == ["trimmed", "refused"]
    assert await harness.run_turn("<s>a<e>ab<s>b", rid="r3") == "<s>a<e>ab<s>b"


async def test_a_client_that_wants_the_prompts_ids_gets_all(harness: Harness) -> None:
    await harness.open()
    await harness.run_turn("<s>a<e>")
    request = Request("<s>a<e>ab<s>b", "s")
    request.return_prompt_token_ids = True
    await harness.begin(request)
    prompt_ids = harness.manager.rid_to_state["r"].prompt_token_ids
    assert raw(prompt_ids).decode() == "<s>a<e>ab<s>b"


async def test_a_turn_whose_session_was_closed_meanwhile_runs_without_its_tag(
    harness: Harness,
) -> None:
    await harness.open()
    await harness.run_turn("<s>a<e>")
    await harness.run_turn("<s>b<e>", session_id="s")
    assert harness.manager.sent.session_id == "s", "the tag of a turn beside its session"
    await harness.close()
    await harness.run_turn("<s>b<e>", session_id="s")
    assert harness.sent == "<s>b<e>"
    assert harness.manager.sent.session_id is None


async def test_a_turn_has_the_tag_that_its_header_names(harness: Harness) -> None:
    for own, header, tag in ((None, None, None), (None, "t", "t"), ("own", "t", "own")):
        request = Request("<s>a<e>", session_id=own, tag=header)
        await harness.tokenize(request)
        assert request.session_id == tag
    harness.trimmer._fail("test", RuntimeError("planted"))
    request = Request("<s>a<e>", tag="t")
    await harness.tokenize(request)
    assert request.session_id is None, "nothing is changed by a trimmer that has failed"


async def test_an_unmarked_request_runs_unchanged(harness: Harness) -> None:
    await harness.open()
    await harness.run_turn("<s>a<e>")
    await harness.run_turn("<s>a<e>ab<s>b", session=None)
    assert harness.sent == "<s>a<e>ab<s>b"
    assert harness.manager.sent.session_params is None


async def test_another_history_runs_unchanged(harness: Harness) -> None:
    await harness.open()
    await harness.run_turn("<s>a<e>")
    for text in ("<s>b<e>ab<s>b", "<s>a<e>", "<s>a<e>ab"):
        await harness.run_turn(text)
        assert harness.sent == text
        assert harness.manager.sent.session_params is None
    assert await harness.run_turn("<s>a<e>ab<s>") == "<s>a<e>ab<s>"
    assert harness.sent == "<s>"


async def test_an_unsupported_request_runs_unchanged(harness: Harness) -> None:
    await harness.open()
    for field in ({"mm_inputs": "an image"}, {"return_logprob": True, "logprob_start_len": 0}):
        await harness.run_turn("<s>a", **field)
        assert harness.manager.sent.session_params is None, field


async def test_an_overlapping_turn_runs_unchanged(harness: Harness) -> None:
    await harness.open()
    await harness.begin(Request("<s>a", "s", "one"))
    await harness.begin(Request("<s>a", "s", "two"))
    assert harness.manager.sent.session_params is None


async def test_a_turn_whose_client_left_is_committed(harness: Harness) -> None:
    await harness.open()
    request = Request("<s>a<e>", "s")
    await (await harness.begin(request)).aclose()
    harness.manager.generate(request.rid, ANSWER, "stop")
    assert await harness.run_turn("<s>a<e>ab<s>b") == "<s>a<e>ab<s>b"
    assert harness.sent == "<s>b"


async def test_a_turn_that_was_never_sent_changes_nothing(harness: Harness) -> None:
    await harness.open()
    await harness.run_turn("<s>a<e>")
    request = Request("<s>a<e>ab<s>b", "s")
    await harness.tokenize(request)
    del harness.manager.rid_to_state[request.rid]
    await harness.run_turn("<s>a<e>ab<s>")
    assert harness.sent == "<s>"


async def test_an_abort_changes_nothing_unless_it_was_retracted(harness: Harness) -> None:
    await harness.open()
    await harness.run_turn("<s>a<e>")
    for rid, meta_info, trimmed in (
        ("one", {}, True), ("two", {"num_retractions": 1}, False),
    ):
        request = Request("<s>a<e>ab<s>b", "s", rid)
        answer = await harness.begin(request)
        harness.manager.generate(rid, ANSWER, "abort", **meta_info)
        await anext(answer)
        request = Request("<s>a<e>ab<s>", "s", "after")
        tokenized = await harness.tokenize(request)
        del harness.manager.rid_to_state["after"]
        assert (tokenized.session_params is not None) == trimmed


async def test_an_answer_on_another_context_is_broken_off(harness: Harness) -> None:
    await harness.open()
    await harness.run_turn("<s>a<e>")
    # Change the session without the trimmer's knowledge.
    harness.manager.sessions["s"].context += [4, 4]
    request = Request("<s>a<e>ab<s>b", "s", "wrong")
    answer = await harness.begin(request)
    harness.manager.generate("wrong", ANSWER)
    with pytest.raises(ContextMismatch):
        await anext(answer)
    harness.manager.generate("wrong", ANSWER, "length")
    await harness.run_turn("<s>a<e>ab<s>b")
    assert harness.manager.sent.session_params is None, "the session's context is unknown"


async def test_turns_that_send_only_new_tokens_are_recorded(harness: Harness) -> None:
    await harness.open()
    params = {"session_params": {"id": "s"}}
    await harness.run_turn("<s>a<e>", session=None, **params)
    await harness.run_turn("<b><s>b", session=None, **params)
    assert await harness.run_turn("<s>a<e>ab<s>bab<e>") == "<s>a<e>ab<s>bab<e>"
    assert harness.sent == "<e>"


async def test_new_tokens_of_another_adapter_or_salt_are_refused_and_change_nothing(
    harness: Harness,
) -> None:
    await harness.open()
    own = {"session_params": {"id": "s"}, "lora_id": "sql-1", "cache_salt": "a"}
    await harness.run_turn("<s>a<e>", session=None, **own)
    others = ({"lora_id": "sql-2"}, {"lora_id": None}, {"cache_salt": None}, {"extra_key": "b"})
    for other in others:
        with pytest.raises(OtherKV):
            await harness.begin(Request("<s>b", rid="other", **(own | other)))
    assert await harness.run_turn("<s>b", session=None, **own) == "<s>a<e>ab<s>b"


async def test_a_closed_session_is_forgotten(harness: Harness) -> None:
    await harness.open()
    await harness.run_turn("<s>a<e>")
    await harness.close()
    await harness.run_turn("<s>a<e>ab<s>")
    assert harness.manager.sent.session_params is None
    await harness.open()
    await harness.run_turn("<s>a<e>ab<s>")
    assert harness.sent == "<s>a<e>ab<s>"
    assert harness.manager.sent.session_params.id == "s"


async def test_a_hook_that_fails_leaves_the_request_unchanged(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.open()
    await harness.run_turn("<s>a<e>")

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("gone in this version")

    harness.trimmer._session_params = fail
    await harness.run_turn("<s>a<e>ab<s>b")
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert harness.sent == "<s>a<e>ab<s>b"
    assert harness.manager.sent.session_params is None
    await harness.run_turn("<s>a<e>ab<s>b")
    assert harness.manager.sent.session_params is None
