"""Trims full histories where the engine tokenizes them, so that they run as turns of a streaming
session. This happens after the engine's own template and tokenizer, and before its scheduler.

A request asks for trimming by its mark, the header
`x-override-berth-trim: <tokens_max> <session> [<rid>]`. `<session>` names an open streaming
session. There the prompt may have at most `<tokens_max>` tokens, for which the agent has reserved
room. `<rid>` is the agent's id of the turn. The mark is a header, because headers are the only
thing that all of the engine's routes pass on. Clients can't forge it: router and agent remove all
client headers that begin with `x-override-`.

A request without a mark runs unchanged, and so does one that can't be trimmed. The exception is a
request with the header `x-override-berth-must-continue`: if its prompt doesn't continue the
session, it is refused, because other clients append to that session and rely on its history.

`trim` makes the plans and `transcripts` keeps the contexts. This module connects them to the
engine, and reports each plan to the agent before the engine gets the turn. If another session or
more room could help, it asks the agent first.

The trimmer raises errors into the engine in two cases only: to refuse such a request, and to break
off an answer that was computed on another context than the client's. On its first internal error
it stops trimming for good and reports why.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import wire
from .eligibility import cache_namespace, engine_refusal, fast_tokenizer, request_refusal
from .link import Link, socket_path
from .transcripts import Transcripts
from .trim import (
    Diverged, Finished, Lost, Outcome, Plan, Refused, Retokenized, RolledBack, Tokenizer, TooLong,
    Trimmed, Turn, guard_bos, is_improvable,
)

HEADER = b"x-override-berth-trim"
MUST_CONTINUE = b"x-override-berth-must-continue"
# The attributes of the engine's request object that hold its mark, and later its running turn.
_MARK_ATTRIBUTE, _TURN_ATTRIBUTE = "berth_trim", "berth_turn"
# The time limit for the agent's answer, during which the turn waits. The agent opens an incarnation
# in milliseconds, so a longer wait means that it is in trouble.
ANSWER_SECONDS_MAX = 2.0
# The maximum number of plans waiting for the agent to read them. A plan has a few hundred bytes.
PLANS_MAX = 256
# The interval of checks whether an agent that stopped reading has resumed.
FLUSH_SECONDS = 0.1

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_ROUTER = "sglang.srt.managers.multi_tokenizer_mixin.MultiTokenizerRouter."
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."

Original = Callable[..., Any]
_log = logging.getLogger(__name__)


class Mark(NamedTuple):
    """Where a turn may run. An empty session name means that the mark could not be read, or that
    the turn is to run unchanged."""

    tokens_max: int
    session: str
    # The agent's id of the turn. Not every route uses it as the id of the request.
    rid: str = ""
    # Whether to refuse the request if its prompt doesn't continue the session.
    must_continue: bool = False


class NotContinued(ValueError):
    """The prompt doesn't continue a session that takes delta turns. The engine answers the request
    with 400 and this text; the agent gives its client a more detailed answer."""


class ContextMismatch(RuntimeError):
    """The engine ran a turn on another context than the client's."""


@dataclass
class _RunningTurn:
    """A turn that was handed to the engine, with the engine's own state of it."""

    session: str
    turn: Turn
    state: Any


class Trimmer:
    """The hooks in the engine process that tokenizes."""

    def __init__(self, instance: bytes, shim: str) -> None:
        self._instance, self._shim = instance, shim
        # Why nothing is trimmed; empty while the trimmer works. This first reason holds until the
        # engine's tokenizer is available.
        self._inert = "it hasn't started"
        self._sglang = ""
        self._session_params: Any = None
        self._tokenizer: Tokenizer | None = None
        self._bos: int | None = None
        self._transcripts = Transcripts()
        # The latest turn of each session, until its end is committed.
        self._running: dict[str, _RunningTurn] = {}
        self._link: Link | None = None
        self._connection_number = 0
        self._plans: deque[bytes] = deque(maxlen=PLANS_MAX)
        self._flush_scheduled = False
        self._questions: dict[int, asyncio.Future[Mark]] = {}
        # The number of the last question. It starts at a random value, so that an answer to a
        # question of another engine process matches none of this one.
        self._last_question = int.from_bytes(instance[:4], "little") << 32

    def install_hooks(self, version: str, known: bool) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def started(_: None, manager: Any, *values: Any, **named: Any) -> None:
            self._start(manager, version, known)

        HookRegistry.register(_MANAGER + "__init__", started, HookType.AFTER)
        # With several tokenizer workers, this class replaces the manager. The hook on it reports
        # that nothing is trimmed.
        HookRegistry.register(_ROUTER + "__init__", started, HookType.AFTER)
        if not known:
            return
        for target, hook in {
            _MANAGER + "generate_request": self._hook_generate,
            _MANAGER + "_handle_batch_request": self._hook_batch,
            _MANAGER + "_tokenize_one_request": self._hook_tokenize,
            _MANAGER + "_wait_one_response": self._hook_wait,
            _CONTROL + "open_session": self._hook_open,
            _CONTROL + "close_session": self._hook_close,
        }.items():
            HookRegistry.register(target, hook, HookType.AROUND)

    def _start(self, manager: Any, version: str, known: bool) -> None:
        self._sglang = version
        try:
            if self._link is not None:
                raise RuntimeError("two engines in one process")
            self._inert = engine_refusal() if known else f"SGLang {version} is not known"
            if not self._inert:
                from sglang.srt.managers.io_struct import SessionParams

                self.enable(manager.tokenizer, SessionParams)
            self.connect(*socket_path(manager.server_args.port))
        except Exception as error:
            self._fail("start", error)

    def enable(self, tokenizer: Any, session_params: Any) -> None:
        """Enables trimming. `session_params` is the engine's type for a request's session."""
        self._session_params = session_params
        self._tokenizer = fast_tokenizer(tokenizer)
        self._bos = getattr(tokenizer, "bos_token_id", None)
        self._inert = ""

    def connect(self, path: str, path_is_set: bool) -> None:
        """Starts connecting to the agent. `path_is_set`: the operator set the path."""
        self._link = Link(path + ".trim", path_is_set, self._hello())
        self._link.start()

    def _hello(self) -> bytes:
        return wire.encode_trimmer(
            os.getpid(), self._instance, self._sglang, self._shim, self._inert
        )

    def _fail(self, where: str, error: Exception) -> None:
        """Stops all trimming and reports why. Turns that already run are answered unchanged."""
        self._inert = f"{where}: {type(error).__name__}: {error}"
        self._transcripts = Transcripts()
        self._running.clear()
        _log.warning("nothing is trimmed from now on: %s", self._inert)
        if self._link is not None:
            self._link.reconnect(self._hello())

    # Opening and closing sessions.

    async def _hook_open(
        self, original: Original, manager: Any, body: Any, *a: Any, **k: Any
    ) -> Any:
        id = await original(manager, body, *a, **k)
        if id is not None and body.streaming and not self._inert:
            self._running.pop(id, None)
            self._transcripts.open(id)
        return id

    async def _hook_close(
        self, original: Original, manager: Any, body: Any, *a: Any, **k: Any
    ) -> Any:
        self._running.pop(body.session_id, None)
        self._transcripts.close(body.session_id)
        return await original(manager, body, *a, **k)

    # The hooks of a request, in order: it enters, is tokenized, and is answered. `body` is the
    # engine's object for the request, a `GenerateReqInput` for example.

    def _hook_generate(
        self, original: Original, manager: Any, body: Any, request: Any = None, *a: Any, **k: Any
    ) -> Any:
        # SGLang passes the HTTP request by the name `request` in places.
        if request is not None and not self._inert and hasattr(body, "session_params"):
            headers = dict(getattr(request, "scope", {}).get("headers", ()))
            if HEADER in headers:
                mark = _parse_mark(headers[HEADER])
                mark = mark._replace(must_continue=MUST_CONTINUE in headers)
                setattr(body, _MARK_ATTRIBUTE, mark)
        return original(manager, body, request, *a, **k)

    def _hook_batch(self, original: Original, manager: Any, body: Any, *a: Any, **k: Any) -> Any:
        if (mark := body.__dict__.get(_MARK_ATTRIBUTE)) and not self._inert:
            try:
                plan = Refused("it is a batch, or has n > 1")
                self._send_plan(_plan_message(plan, mark, str(body.rid)))
            except Exception as error:
                self._fail("batch", error)
        return original(manager, body, *a, **k)

    def _hook_tokenize(self, original: Original, manager: Any, body: Any) -> Any:
        if self._inert:
            return original(manager, body)
        if mark := body.__dict__.get(_MARK_ATTRIBUTE):
            return self._tokenize_marked(original, manager, body, mark)
        params = getattr(body, "session_params", None)
        if params and params.get("id") in self._transcripts:
            return self._tokenize_appended(original, manager, body, params["id"])
        return original(manager, body)

    async def _tokenize_marked(
        self, original: Original, manager: Any, body: Any, mark: Mark
    ) -> Any:
        """Tokenizes a marked request, and turns it into a turn of the session that its mark or the
        agent names, if its prompt allows that."""
        tokenized = await original(manager, body)
        runs_inside = False
        try:
            plan, why = self._make_plan(manager, tokenized, mark), ""
            prompt = len(tokenized.input_ids or ())
            # A prompt that must continue this session can't use another one, but can use more room.
            if isinstance(plan, TooLong) or (is_improvable(plan) and not mark.must_continue):
                question = _plan_message(plan, mark, body.rid, prompt)
                other, why = await self._ask_agent(question)
                _allow_another_abort(manager, body.rid)
                if other is not None:
                    mark = other._replace(rid=mark.rid, must_continue=mark.must_continue)
                    plan = self._make_plan(manager, tokenized, mark)
            self._send_plan(_plan_message(plan, mark, body.rid, prompt, why))
            if isinstance(plan, Trimmed | Retokenized):
                self._begin_turn(manager, body, tokenized, mark.session, plan)
                runs_inside = True
        except Exception as error:
            self._fail("plan", error)
        if mark.must_continue and not runs_inside:
            raise NotContinued("the prompt doesn't continue its session; nothing of it was run")
        return tokenized

    async def _tokenize_appended(
        self, original: Original, manager: Any, body: Any, session: str
    ) -> Any:
        """Tokenizes a request with only new tokens, which runs unchanged, and records its turn."""
        tokenized = await original(manager, body)
        try:
            self._settle_last_turn(manager, session)
            ids, namespace = tokenized.input_ids, cache_namespace(tokenized)
            fits = ids is not None and not tokenized.mm_inputs
            turn = self._transcripts.change(
                session,
                lambda it: it.append(ids, self._bos, namespace) if fits else it.discard_context(),
            )
            if turn is not None:
                self._record_turn(manager, body, session, turn)
        except Exception as error:
            self._fail("append", error)
        return tokenized

    def _make_plan(self, manager: Any, tokenized: Any, mark: Mark) -> Plan:
        if not mark.session:
            return Refused("its mark can't be read")
        if why := request_refusal(tokenized):
            return Refused(why)
        self._settle_last_turn(manager, mark.session)
        if (transcript := self._transcripts.get(mark.session)) is None:
            return Refused("no such session is open", can_run_elsewhere=True)
        namespace = cache_namespace(tokenized)
        return transcript.plan(tokenized.input_ids, self._tokenizer, namespace, mark.tokens_max)

    def _begin_turn(
        self, manager: Any, body: Any, tokenized: Any, session: str, plan: Trimmed | Retokenized
    ) -> None:
        prompt, namespace = tokenized.input_ids, cache_namespace(tokenized)
        sent = guard_bos(plan.rest, plan.committed, self._bos)
        params = self._session_params(id=session)
        turn = self._transcripts.change(session, lambda it: it.begin(prompt, plan.rest, namespace))
        self._record_turn(manager, body, session, turn)
        # The request is changed completely or not at all: nothing after this line can fail.
        tokenized.input_ids, tokenized.session_params, tokenized.session_id = sent, params, None

    def _record_turn(self, manager: Any, body: Any, session: str, turn: Turn) -> None:
        running = _RunningTurn(session, turn, manager.rid_to_state[body.rid])
        self._running[session] = running
        setattr(body, _TURN_ATTRIBUTE, running)

    def _hook_wait(self, original: Original, manager: Any, body: Any, *a: Any, **k: Any) -> Any:
        running = body.__dict__.get(_TURN_ATTRIBUTE)
        if running is None:
            return original(manager, body, *a, **k)
        if body.return_prompt_token_ids:
            running.state.prompt_token_ids = list(running.turn.prompt)
        return self._watch_answer(original(manager, body, *a, **k), running)

    async def _watch_answer(
        self, answer: AsyncIterator[Any], running: _RunningTurn
    ) -> AsyncIterator[Any]:
        """Commits the turn before yielding the last item: the engine requests no further item of an
        answer that isn't streamed."""
        try:
            async for item in answer:
                self._check_answer(running, item["meta_info"])
                yield item
        finally:
            await answer.aclose()

    def _check_answer(self, running: _RunningTurn, meta_info: dict[str, Any]) -> None:
        """Commits the turn at its end. Raises if the engine ran it on another context."""
        try:
            finish = meta_info["finish_reason"]
            is_right = meta_info.get("prompt_tokens") == running.turn.prompt_tokens
            # The engine runs a request that it refuses as a prompt of one token.
            if is_right or (finish and finish["type"] == "abort"):
                if finish:
                    self._commit(running, _read_outcome(running, meta_info))
                return
            self._commit(running, Lost())
        except Exception as error:
            self._fail("answer", error)
            return
        raise ContextMismatch(
            f"the engine counted {meta_info.get('prompt_tokens')} prompt tokens, but the session "
            f"and this turn have {running.turn.prompt_tokens}: open the session again and send the "
            f"full history"
        )

    def _settle_last_turn(self, manager: Any, session: str) -> None:
        """Commits the session's last turn if its client disconnected before the end was seen."""
        running = self._running.get(session)
        if running is None:
            return
        state = running.state
        if state.finished:
            meta_info = state.out_list[-1]["meta_info"] if state.out_list else None
            self._commit(running, _read_outcome(running, meta_info) if meta_info else Lost())
        elif not state.dispatched and manager.rid_to_state.get(state.obj.rid) is not state:
            self._commit(running, RolledBack())

    def _commit(self, running: _RunningTurn, outcome: Outcome) -> None:
        if self._running.get(running.session) is running:
            del self._running[running.session]
        self._transcripts.change(running.session, lambda it: it.commit(running.turn, outcome))

    # Messages to and from the agent.

    def _send_plan(self, planned: wire.Planned) -> None:
        if self._link is None or not self._link.is_connected:
            return
        if self._connection_number != self._link.connection_number:
            # The plans for an earlier connection have no reader any more.
            self._connection_number = self._link.connection_number
            self._plans.clear()
        self._plans.append(wire.encode_planned(planned))
        self._send_waiting_plans()

    def _send_waiting_plans(self) -> None:
        """Sends waiting plans until the socket is full. Schedules another try if it is."""
        while self._link.flush() and self._plans:
            self._link.send(self._plans.popleft(), self._connection_number)
        if not self._flush_scheduled and self._link.is_connected and not self._link.flush():
            self._flush_scheduled = True
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._retry_sending)

    def _retry_sending(self) -> None:
        self._flush_scheduled = False
        try:
            self._send_waiting_plans()
        except Exception as error:
            self._fail("flush", error)

    async def _ask_agent(self, planned: wire.Planned) -> tuple[Mark | None, str]:
        """Asks the agent where to run the turn. Returns None and the reason if nowhere else."""
        if self._link is None or not self._link.is_connected:
            return None, "no agent is connected"
        loop = asyncio.get_running_loop()
        # Adding a reader that is already there replaces it.
        loop.add_reader(self._link.wake_receiver, self._read_answers)
        self._last_question += 1
        number, answer = self._last_question, loop.create_future()
        self._questions[number] = answer
        try:
            self._send_plan(planned._replace(number=number))
            mark = await asyncio.wait_for(answer, ANSWER_SECONDS_MAX)
        except asyncio.TimeoutError:
            return None, "the agent didn't answer in time"
        finally:
            del self._questions[number]
        return (mark, "") if mark.session else (None, "the agent lets it run as it came")

    def _read_answers(self) -> None:
        for kind, run in self._link.take_commands():
            if kind == wire.RUN:
                answer = self._questions.get(run.number)
                if answer is not None and not answer.done():
                    answer.set_result(Mark(run.tokens_max, run.session))


def _allow_another_abort(manager: Any, rid: str) -> None:
    """Lets the engine pass on another abort of this request. An abort during a question went to the
    scheduler before the turn did, and the engine passes on only the first. The agent repeats its
    aborts until the turn ends."""
    state = manager.rid_to_state.get(rid)
    if getattr(state, "abort_sent", False):
        state.abort_sent = False


def _read_outcome(running: _RunningTurn, meta_info: dict[str, Any]) -> Outcome:
    """Returns how a turn ended, from the last item of the engine's answer."""
    if meta_info["finish_reason"]["type"] == "abort":
        # Without `num_retractions` the turn was aborted in the queue, and may have run before.
        return RolledBack() if meta_info.get("num_retractions") == 0 else Lost()
    answer = running.state.output_ids
    return Finished(answer) if len(answer) == meta_info["completion_tokens"] else Lost()


def _parse_mark(header: bytes) -> Mark:
    tokens, session, rid = (*header.decode("latin-1").split(" ", 2), "", "")[:3]
    readable = tokens.isascii() and tokens.isdigit() and len(tokens) <= 10
    mark = Mark(int(tokens), session) if readable else Mark(0, "")
    return mark._replace(rid=rid) if readable else mark


def _plan_message(plan: Plan, mark: Mark, rid: str, prompt: int = 0, why: str = "") -> wire.Planned:
    """Returns the message to the agent about a plan. For a prompt that is too long, `prompt` is at
    least what the engine would count."""
    kinds = {Trimmed: wire.TRIMMED, Retokenized: wire.RETOKENIZED, Diverged: wire.DIVERGED}
    kind = kinds.get(type(plan), wire.REFUSED)
    at, committed = getattr(plan, "shared_tokens", 0), getattr(plan, "committed", 0)
    reasons = [getattr(plan, "why", ""), why]
    if isinstance(plan, TooLong):
        prompt = max(prompt, plan.tokens)
        reasons.insert(0, f"it has {plan.tokens} tokens, and {mark.tokens_max} have room")
    sent = len(getattr(plan, "rest", ()))
    reason = "; ".join(filter(None, reasons))
    rid = mark.rid or rid
    return wire.Planned(0, at, committed, sent, prompt, kind, mark.session, rid, reason)
