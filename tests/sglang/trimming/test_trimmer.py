"""Tests the hooks around the engine's tokenizer.

A request that the hooks aren't meant for, or can't help, runs unchanged. No answer is computed
from another context than the client's."""

import asyncio
import unittest
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from berth_shim.trimmer import ContextMismatch, Trimmer

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


Test = Callable[[Any, Harness], Coroutine[Any, Any, None]]


def with_harness(test: Test) -> Callable[[Any], None]:
    def run(self: Any) -> None:
        asyncio.run(test(self, Harness()))

    return run


class TestTrimmer(unittest.TestCase):
    @with_harness
    async def test_a_full_history_sends_only_new_tokens(self, harness: Harness) -> None:
        await harness.open()
        self.assertEqual(await harness.run_turn("<s>a<e>"), "<s>a<e>")
        self.assertEqual(await harness.run_turn("<s>a<e>ab<s>b"), "<s>a<e>ab<s>b")
        self.assertEqual(harness.sent, "<s>b")
        self.assertIsNone(harness.manager.sent.session_id)

    @with_harness
    async def test_a_client_that_wants_the_prompts_ids_gets_all(self, harness: Harness) -> None:
        await harness.open()
        await harness.run_turn("<s>a<e>")
        request = Request("<s>a<e>ab<s>b", "s")
        request.return_prompt_token_ids = True
        await harness.begin(request)
        prompt_ids = harness.manager.rid_to_state["r"].prompt_token_ids
        self.assertEqual(raw(prompt_ids).decode(), "<s>a<e>ab<s>b")

    @with_harness
    async def test_an_unmarked_request_runs_unchanged(self, harness: Harness) -> None:
        await harness.open()
        await harness.run_turn("<s>a<e>")
        await harness.run_turn("<s>a<e>ab<s>b", session=None)
        self.assertEqual(harness.sent, "<s>a<e>ab<s>b")
        self.assertIsNone(harness.manager.sent.session_params)

    @with_harness
    async def test_another_history_runs_unchanged(self, harness: Harness) -> None:
        await harness.open()
        await harness.run_turn("<s>a<e>")
        for text in ("<s>b<e>ab<s>b", "<s>a<e>", "<s>a<e>ab"):
            await harness.run_turn(text)
            self.assertEqual(harness.sent, text)
            self.assertIsNone(harness.manager.sent.session_params)
        self.assertEqual(await harness.run_turn("<s>a<e>ab<s>"), "<s>a<e>ab<s>")
        self.assertEqual(harness.sent, "<s>")

    @with_harness
    async def test_an_unsupported_request_runs_unchanged(self, harness: Harness) -> None:
        await harness.open()
        for field in ({"mm_inputs": "an image"}, {"return_logprob": True, "logprob_start_len": 0}):
            await harness.run_turn("<s>a", **field)
            self.assertIsNone(harness.manager.sent.session_params, field)

    @with_harness
    async def test_an_overlapping_turn_runs_unchanged(self, harness: Harness) -> None:
        await harness.open()
        await harness.begin(Request("<s>a", "s", "one"))
        await harness.begin(Request("<s>a", "s", "two"))
        self.assertIsNone(harness.manager.sent.session_params)

    @with_harness
    async def test_a_turn_whose_client_left_is_committed(self, harness: Harness) -> None:
        await harness.open()
        request = Request("<s>a<e>", "s")
        await (await harness.begin(request)).aclose()
        harness.manager.generate(request.rid, ANSWER, "stop")
        self.assertEqual(await harness.run_turn("<s>a<e>ab<s>b"), "<s>a<e>ab<s>b")
        self.assertEqual(harness.sent, "<s>b")

    @with_harness
    async def test_a_turn_that_was_never_sent_changes_nothing(self, harness: Harness) -> None:
        await harness.open()
        await harness.run_turn("<s>a<e>")
        request = Request("<s>a<e>ab<s>b", "s")
        await harness.tokenize(request)
        del harness.manager.rid_to_state[request.rid]
        await harness.run_turn("<s>a<e>ab<s>")
        self.assertEqual(harness.sent, "<s>")

    @with_harness
    async def test_an_abort_changes_nothing_unless_it_was_retracted(self, harness: Harness) -> None:
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
            self.assertEqual(tokenized.session_params is not None, trimmed)

    @with_harness
    async def test_an_answer_on_another_context_is_broken_off(self, harness: Harness) -> None:
        await harness.open()
        await harness.run_turn("<s>a<e>")
        # Change the session without the trimmer's knowledge.
        harness.manager.sessions["s"].context += [4, 4]
        request = Request("<s>a<e>ab<s>b", "s", "wrong")
        answer = await harness.begin(request)
        harness.manager.generate("wrong", ANSWER)
        with self.assertRaises(ContextMismatch):
            await anext(answer)
        harness.manager.generate("wrong", ANSWER, "length")
        await harness.run_turn("<s>a<e>ab<s>b")
        self.assertIsNone(harness.manager.sent.session_params, "the session's context is unknown")

    @with_harness
    async def test_turns_that_send_only_new_tokens_are_recorded(self, harness: Harness) -> None:
        await harness.open()
        params = {"session_params": {"id": "s"}}
        await harness.run_turn("<s>a<e>", session=None, **params)
        await harness.run_turn("<b><s>b", session=None, **params)
        self.assertEqual(await harness.run_turn("<s>a<e>ab<s>bab<e>"), "<s>a<e>ab<s>bab<e>")
        self.assertEqual(harness.sent, "<e>")

    @with_harness
    async def test_a_closed_session_is_forgotten(self, harness: Harness) -> None:
        await harness.open()
        await harness.run_turn("<s>a<e>")
        await harness.close()
        await harness.run_turn("<s>a<e>ab<s>")
        self.assertIsNone(harness.manager.sent.session_params)
        await harness.open()
        await harness.run_turn("<s>a<e>ab<s>")
        self.assertEqual(harness.sent, "<s>a<e>ab<s>")
        self.assertEqual(harness.manager.sent.session_params.id, "s")

    @with_harness
    async def test_a_hook_that_fails_leaves_the_request_unchanged(self, harness: Harness) -> None:
        await harness.open()
        await harness.run_turn("<s>a<e>")

        def fail(*_: Any, **__: Any) -> None:
            raise KeyError("gone in this version")

        harness.trimmer._session_params = fail
        with self.assertLogs("berth_shim.trimmer", "WARNING"):
            await harness.run_turn("<s>a<e>ab<s>b")
        self.assertEqual(harness.sent, "<s>a<e>ab<s>b")
        self.assertIsNone(harness.manager.sent.session_params)
        await harness.run_turn("<s>a<e>ab<s>b")
        self.assertIsNone(harness.manager.sent.session_params)


if __name__ == "__main__":
    unittest.main()
