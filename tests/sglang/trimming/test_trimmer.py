"""Tests the hooks around the engine's tokenizer.

A request that the hooks aren't meant for, or can't help, runs unchanged. No answer is computed
from another context than the client's."""

import asyncio
import unittest
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from berth_shim.trimmer import OtherContext, Trimmer

from .engine import Manager, Request, Tokenizer
from .model import ToyText, raw

ANSWER = ToyText().encode("ab")


class House:
    """The trimmer in an engine, connected as SGLang's hook registry does."""

    def __init__(self) -> None:
        self.manager, self.trimmer = Manager(), Trimmer(bytes(16), "0")
        self.trimmer.ready(Tokenizer(), SimpleNamespace)

    async def open(self, id: str = "s") -> None:
        asked = SimpleNamespace(session_id=id, streaming=True)
        await self.trimmer._open(Manager.open_session, self.manager, asked)

    async def close(self, id: str = "s") -> None:
        asked = SimpleNamespace(session_id=id)
        await self.trimmer._close(Manager.close_session, self.manager, asked)

    async def tokenize(self, asked: Request) -> Any:
        """Runs a request as `generate_request` does, until it would go to the scheduler."""

        async def entered(manager: Manager, asked: Request, _http: Any) -> Any:
            manager.arrive(asked)
            return await self.trimmer._tokenize(Manager.tokenize, manager, asked)

        return await self.trimmer._enter(entered, self.manager, asked, asked.http)

    async def begin(self, asked: Request) -> Any:
        self.manager.send(await self.tokenize(asked))
        return self.trimmer._wait(Manager.wait, self.manager, asked, None)

    async def turn(self, text: str, session: str | None = "s", **more: Any) -> str:
        """Runs a whole turn. Returns the text that the engine ran on."""
        asked = Request(text, session, **more)
        answer = await self.begin(asked)
        prompt = list(self.manager.prompt)
        self.manager.generate(asked.rid, ANSWER, "length")
        await anext(answer)
        return raw(prompt).decode()

    @property
    def sent(self) -> str:
        return raw(self.manager.sent.input_ids).decode()


def steps(test: Callable[[Any, House], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    def run(self: Any) -> None:
        asyncio.run(test(self, House()))

    return run


class TestTrimmer(unittest.TestCase):
    @steps
    async def test_a_history_sends_what_is_new(self, house: House) -> None:
        await house.open()
        self.assertEqual(await house.turn("<s>a<e>"), "<s>a<e>")
        self.assertEqual(await house.turn("<s>a<e>ab<s>b"), "<s>a<e>ab<s>b")
        self.assertEqual(house.sent, "<s>b")
        self.assertIsNone(house.manager.sent.session_id)

    @steps
    async def test_who_wants_the_prompts_ids_gets_all(self, house: House) -> None:
        await house.open()
        await house.turn("<s>a<e>")
        asked = Request("<s>a<e>ab<s>b", "s")
        asked.return_prompt_token_ids = True
        await house.begin(asked)
        whole = house.manager.rid_to_state["r"].prompt_token_ids
        self.assertEqual(raw(whole).decode(), "<s>a<e>ab<s>b")

    @steps
    async def test_who_does_not_ask_is_left_alone(self, house: House) -> None:
        await house.open()
        await house.turn("<s>a<e>")
        await house.turn("<s>a<e>ab<s>b", session=None)
        self.assertEqual(house.sent, "<s>a<e>ab<s>b")
        self.assertIsNone(house.manager.sent.session_params)

    @steps
    async def test_another_history_runs_as_it_came(self, house: House) -> None:
        await house.open()
        await house.turn("<s>a<e>")
        for text in ("<s>b<e>ab<s>b", "<s>a<e>", "<s>a<e>ab"):
            await house.turn(text)
            self.assertEqual(house.sent, text)
            self.assertIsNone(house.manager.sent.session_params)
        self.assertEqual(await house.turn("<s>a<e>ab<s>"), "<s>a<e>ab<s>")
        self.assertEqual(house.sent, "<s>")

    @steps
    async def test_what_does_not_fit_runs_as_it_came(self, house: House) -> None:
        await house.open()
        for field in ({"mm_inputs": "an image"}, {"return_logprob": True, "logprob_start_len": 0}):
            await house.turn("<s>a", **field)
            self.assertIsNone(house.manager.sent.session_params, field)

    @steps
    async def test_a_second_turn_at_once_runs_as_it_came(self, house: House) -> None:
        await house.open()
        await house.begin(Request("<s>a", "s", "one"))
        await house.begin(Request("<s>a", "s", "two"))
        self.assertIsNone(house.manager.sent.session_params)

    @steps
    async def test_an_end_that_nobody_waits_for_is_committed(self, house: House) -> None:
        await house.open()
        asked = Request("<s>a<e>", "s")
        await (await house.begin(asked)).aclose()
        house.manager.generate(asked.rid, ANSWER, "stop")
        self.assertEqual(await house.turn("<s>a<e>ab<s>b"), "<s>a<e>ab<s>b")
        self.assertEqual(house.sent, "<s>b")

    @steps
    async def test_a_turn_that_never_left_changes_nothing(self, house: House) -> None:
        await house.open()
        await house.turn("<s>a<e>")
        asked = Request("<s>a<e>ab<s>b", "s")
        await house.tokenize(asked)
        del house.manager.rid_to_state[asked.rid]
        await house.turn("<s>a<e>ab<s>")
        self.assertEqual(house.sent, "<s>")

    @steps
    async def test_an_abort_changes_nothing_unless_it_was_retracted(self, house: House) -> None:
        await house.open()
        await house.turn("<s>a<e>")
        for rid, said, trimmed in (
            ("one", {}, True), ("two", {"num_retractions": 1}, False),
        ):
            asked = Request("<s>a<e>ab<s>b", "s", rid)
            answer = await house.begin(asked)
            house.manager.generate(rid, ANSWER, "abort", **said)
            await anext(answer)
            asked = Request("<s>a<e>ab<s>", "s", "after")
            tokenized = await house.tokenize(asked)
            del house.manager.rid_to_state["after"]
            self.assertEqual(tokenized.session_params is not None, trimmed)

    @steps
    async def test_an_answer_to_another_context_is_cut_off(self, house: House) -> None:
        await house.open()
        await house.turn("<s>a<e>")
        # Change the session without the trimmer's knowledge.
        house.manager.sessions["s"].context += [4, 4]
        asked = Request("<s>a<e>ab<s>b", "s", "wrong")
        answer = await house.begin(asked)
        house.manager.generate("wrong", ANSWER)
        with self.assertRaises(OtherContext):
            await anext(answer)
        house.manager.generate("wrong", ANSWER, "length")
        await house.turn("<s>a<e>ab<s>b")
        self.assertIsNone(house.manager.sent.session_params, "a session that isn't known any more")

    @steps
    async def test_only_new_tokens_are_followed(self, house: House) -> None:
        await house.open()
        params = {"session_params": {"id": "s"}}
        await house.turn("<s>a<e>", session=None, **params)
        await house.turn("<b><s>b", session=None, **params)
        self.assertEqual(await house.turn("<s>a<e>ab<s>bab<e>"), "<s>a<e>ab<s>bab<e>")
        self.assertEqual(house.sent, "<e>")

    @steps
    async def test_a_closed_session_is_forgotten(self, house: House) -> None:
        await house.open()
        await house.turn("<s>a<e>")
        await house.close()
        await house.turn("<s>a<e>ab<s>")
        self.assertIsNone(house.manager.sent.session_params)
        await house.open()
        await house.turn("<s>a<e>ab<s>")
        self.assertEqual(house.sent, "<s>a<e>ab<s>")
        self.assertEqual(house.manager.sent.session_params.id, "s")

    @steps
    async def test_a_hook_that_fails_leaves_the_request_as_it_came(self, house: House) -> None:
        await house.open()
        await house.turn("<s>a<e>")

        def fail(*_: Any, **__: Any) -> None:
            raise KeyError("gone in this version")

        house.trimmer._session_params = fail
        with self.assertLogs("berth_shim.trimmer", "WARNING"):
            await house.turn("<s>a<e>ab<s>b")
        self.assertEqual(house.sent, "<s>a<e>ab<s>b")
        self.assertIsNone(house.manager.sent.session_params)
        await house.turn("<s>a<e>ab<s>b")
        self.assertIsNone(house.manager.sent.session_params)


if __name__ == "__main__":
    unittest.main()
