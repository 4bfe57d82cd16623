"""A model of SGLang's `TokenizerManager` as the trimmer's hooks see it.

It uses `model.EngineSession` and follows SGLang's code: what a request carries, when its state is
kept, and what each item of an answer contains. A test steps each turn by hand, so that it can stop
the turn anywhere.
"""

from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from .model import BOS, EngineSession, ToyTokenizer


class Tokenizer(ToyTokenizer):
    """The toy tokenizer with the attributes of a tokenizer of `transformers`."""

    is_fast = True
    bos_token_id = BOS
    added_tokens_decoder = {id: SimpleNamespace(single_word=False) for id in ToyTokenizer.split_ids}

    def decode(self, ids: list[int], **_: Any) -> str:
        return super().decode(ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        return super().encode(text)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.pieces([id]) for id in ids]


class Request:
    """A body of `/generate`, and the HTTP request that brings it. The header's mark names a session
    and the most tokens it has room for; `mark` sets any other mark."""

    def __init__(
        self, text: str, session: str | None = None, rid: str = "r", tokens_max: int = 1 << 20,
        mark: str | None = None, must_continue: bool = False, tag: str | None = None, **more: Any,
    ):
        self.text, self.rid, self.session_params = text, rid, more.get("session_params")
        self.session_id = more.get("session_id")
        self.return_prompt_token_ids = False
        self.fields = more
        headers = [(b"host", b"engine")]
        if mark is None and session:
            mark = f"{tokens_max} {session}"
        if mark is not None:
            headers.append((b"x-override-berth-trim", mark.encode()))
        if must_continue:
            headers.append((b"x-override-berth-must-continue", b"1"))
        if tag is not None:
            headers.append((b"x-override-berth-tag", tag.encode()))
        self.http = SimpleNamespace(scope={"headers": headers})


class Manager:
    """The engine as its tokenizer's process sees it. Its methods are the originals of the hooked
    methods."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.sessions: dict[str, EngineSession] = {}
        self.sent: Any = None

    async def open_session(self, body: Any) -> str | None:
        self.sessions[body.session_id] = EngineSession()
        return body.session_id

    async def close_session(self, body: Any) -> None:
        self.sessions.pop(body.session_id, None)

    async def tokenize(self, request: Request) -> Any:
        params = request.session_params
        defaults = dict(
            rid=request.rid, input_ids=array("q", ToyTokenizer().encode(request.text)),
            mm_inputs=None, session_id=None,
            session_params=SimpleNamespace(**params) if params else None,
            sampling_params=SimpleNamespace(), return_logprob=False, logprob_start_len=-1,
            lora_id=None, extra_key=None, cache_salt=None,
        )
        more = {name: value for name, value in request.fields.items() if name != "session_params"}
        return SimpleNamespace(**(defaults | more))

    async def batch(self, request: Request, _http: Any = None) -> None:
        """Tokenizes and sends each request of a batch. Nothing in a batch is hooked."""

    def arrive(self, request: Request) -> Any:
        state = SimpleNamespace(
            finished=False, dispatched=False, out_list=[], output_ids=[], obj=request,
            prompt_token_ids=None, abort_sent=False,
        )
        self.rid_to_state[request.rid] = state
        return state

    def send(self, tokenized: Any) -> None:
        """Sends a turn to the scheduler."""
        self.sent = tokenized
        self.rid_to_state[tokenized.rid].dispatched = True
        if tokenized.session_params is not None:
            session = self.sessions[tokenized.session_params.id]
            self.prompt = session.accept(tokenized.input_ids, None)
        else:
            self.prompt = list(tokenized.input_ids)

    def generate(self, rid: str, ids: list[int], finish: str | None = None, **more: Any) -> None:
        """Adds tokens that the scheduler has generated. With `finish`, they are the turn's last
        tokens."""
        state = self.rid_to_state[rid]
        state.output_ids += ids
        params = self.sent.session_params
        if params is not None:
            session = self.sessions[params.id]
            session.generate(ids)
            if finish == "abort":
                session.abort()
            elif finish:
                session.finish(len(session.answer))
        meta_info = {
            "prompt_tokens": len(self.prompt), "completion_tokens": len(state.output_ids),
            "num_retractions": 0, "finish_reason": {"type": finish} if finish else None, **more,
        }
        state.out_list.append({"output_ids": list(state.output_ids), "meta_info": meta_info})
        if finish:
            state.finished = True
            del self.rid_to_state[rid]

    def wait(self, request: Request, _http: Any = None) -> AsyncIterator[Any]:
        return self._answer(self.rid_to_state[request.rid])

    async def _answer(self, state: Any) -> AsyncIterator[Any]:
        while True:
            items, state.out_list = state.out_list, []
            for item in items:
                yield item
            if state.finished:
                return
            assert items, "a test waits for tokens that were not generated"
