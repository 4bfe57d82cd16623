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
from .eligibility import tie, unfit, untrimmable, words
from .link import Link, socket_path
from .transcripts import Transcripts
from .trim import (
    Diverged, Finished, Healed, Lost, Nothing, Outcome, Plan, RolledBack, Text, TooLong, Trimmed,
    Turn, askable, guarded,
)

HEADER = b"x-override-berth-trim"
MUST_CONTINUE = b"x-override-berth-must-continue"
# The attributes of an engine request that hold its mark, and later its running turn.
_ASKED, _RUNS = "berth_trim", "berth_turn"
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


class OtherContext(RuntimeError):
    """The engine ran a turn on another context than the client's."""


@dataclass
class _Running:
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
        self._text: Text | None = None
        self._bos: int | None = None
        self._transcripts = Transcripts()
        # The latest turn of each session, until its end is committed.
        self._running: dict[str, _Running] = {}
        self._link: Link | None = None
        self._connection = 0
        self._plans: deque[bytes] = deque(maxlen=PLANS_MAX)
        self._flushing = False
        self._questions: dict[int, asyncio.Future[Mark]] = {}
        # The number of the last question. It starts at a random value, so that an answer to a
        # question of another engine process matches none of this one.
        self._number = int.from_bytes(instance[:4], "little") << 32

    def hook(self, version: str, known: bool) -> None:
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
            _MANAGER + "generate_request": self._enter,
            _MANAGER + "_handle_batch_request": self._batch,
            _MANAGER + "_tokenize_one_request": self._tokenize,
            _MANAGER + "_wait_one_response": self._wait,
            _CONTROL + "open_session": self._open,
            _CONTROL + "close_session": self._close,
        }.items():
            HookRegistry.register(target, hook, HookType.AROUND)

    def _start(self, manager: Any, version: str, known: bool) -> None:
        self._sglang = version
        try:
            if self._link is not None:
                raise RuntimeError("two engines in one process")
            self._inert = untrimmable() if known else f"SGLang {version} is not known"
            if not self._inert:
                from sglang.srt.managers.io_struct import SessionParams

                self.ready(manager.tokenizer, SessionParams)
            self.meet(*socket_path(manager.server_args.port))
        except Exception as error:
            self._fail("start", error)

    def ready(self, tokenizer: Any, session_params: Any) -> None:
        """Enables trimming. `session_params` is the engine's type for a request's session."""
        self._session_params = session_params
        self._text = words(tokenizer)
        self._bos = getattr(tokenizer, "bos_token_id", None)
        self._inert = ""

    def meet(self, path: str, named: bool) -> None:
        """Starts connecting to the agent. `named`: the operator set the path."""
        self._link = Link(path + ".trim", named, self._hello())
        self._link.start()

    def _hello(self) -> bytes:
        return wire.trimmer(os.getpid(), self._instance, self._sglang, self._shim, self._inert)

    def _fail(self, where: str, error: Exception) -> None:
        """Stops all trimming and reports why. Turns that already run are answered unchanged."""
        self._inert = f"{where}: {type(error).__name__}: {error}"
        self._transcripts = Transcripts()
        self._running.clear()
        _log.warning("nothing is trimmed any more: %s", self._inert)
        if self._link is not None:
            self._link.say(self._hello())

    # Opening and closing sessions.

    async def _open(self, original: Original, manager: Any, asked: Any, *a: Any, **k: Any) -> Any:
        id = await original(manager, asked, *a, **k)
        if id is not None and asked.streaming and not self._inert:
            self._running.pop(id, None)
            self._transcripts.open(id)
        return id

    async def _close(self, original: Original, manager: Any, asked: Any, *a: Any, **k: Any) -> Any:
        self._running.pop(asked.session_id, None)
        self._transcripts.close(asked.session_id)
        return await original(manager, asked, *a, **k)

    # The hooks of a request, in order: it enters, is tokenized, and is answered.

    def _enter(
        self, original: Original, manager: Any, asked: Any, request: Any = None, *a: Any, **k: Any
    ) -> Any:
        if request is not None and not self._inert and hasattr(asked, "session_params"):
            headers = dict(getattr(request, "scope", {}).get("headers", ()))
            if HEADER in headers:
                mark = _mark(headers[HEADER])
                setattr(asked, _ASKED, mark._replace(must_continue=MUST_CONTINUE in headers))
        return original(manager, asked, request, *a, **k)

    def _batch(self, original: Original, manager: Any, asked: Any, *a: Any, **k: Any) -> Any:
        if (mark := asked.__dict__.get(_ASKED)) and not self._inert:
            try:
                plan = Nothing("it is a batch, or has n > 1")
                self._tell(_message(plan, mark, str(asked.rid)))
            except Exception as error:
                self._fail("batch", error)
        return original(manager, asked, *a, **k)

    def _tokenize(self, original: Original, manager: Any, asked: Any) -> Any:
        if self._inert:
            return original(manager, asked)
        if mark := asked.__dict__.get(_ASKED):
            return self._planned(original, manager, asked, mark)
        params = getattr(asked, "session_params", None)
        if params and params.get("id") in self._transcripts:
            return self._appended(original, manager, asked, params["id"])
        return original(manager, asked)

    async def _planned(self, original: Original, manager: Any, asked: Any, mark: Mark) -> Any:
        """Tokenizes a marked request, and turns it into a turn of the session that its mark or the
        agent names, if its prompt allows that."""
        tokenized = await original(manager, asked)
        runs_inside = False
        try:
            plan, why = self._plan(manager, tokenized, mark), ""
            prompt = len(tokenized.input_ids or ())
            # A prompt that must continue this session can't use another one, but can use more room.
            if isinstance(plan, TooLong) or (askable(plan) and not mark.must_continue):
                other, why = await self._ask(_message(plan, mark, asked.rid, prompt))
                _hear_aborts_again(manager, asked.rid)
                if other is not None:
                    mark = other._replace(rid=mark.rid, must_continue=mark.must_continue)
                    plan = self._plan(manager, tokenized, mark)
            self._tell(_message(plan, mark, asked.rid, prompt, why))
            if isinstance(plan, Trimmed | Healed):
                self._begin(manager, asked, tokenized, mark.session, plan)
                runs_inside = True
        except Exception as error:
            self._fail("plan", error)
        if mark.must_continue and not runs_inside:
            raise NotContinued("the prompt doesn't continue its session; nothing of it was run")
        return tokenized

    async def _appended(self, original: Original, manager: Any, asked: Any, session: str) -> Any:
        """Tokenizes a request with only new tokens, which runs unchanged, and records its turn."""
        tokenized = await original(manager, asked)
        try:
            self._settle_the_last(manager, session)
            ids, bound = tokenized.input_ids, tie(tokenized)
            fits = ids is not None and not tokenized.mm_inputs
            turn = self._transcripts.change(
                session, lambda it: it.append(ids, self._bos, bound) if fits else it.lose()
            )
            if turn is not None:
                self._runs(manager, asked, session, turn)
        except Exception as error:
            self._fail("append", error)
        return tokenized

    def _plan(self, manager: Any, tokenized: Any, mark: Mark) -> Plan:
        if not mark.session:
            return Nothing("its mark can't be read")
        if why := unfit(tokenized):
            return Nothing(why)
        self._settle_the_last(manager, mark.session)
        if (transcript := self._transcripts.get(mark.session)) is None:
            return Nothing("no such session is open", elsewhere=True)
        return transcript.plan(tokenized.input_ids, self._text, tie(tokenized), mark.tokens_max)

    def _begin(
        self, manager: Any, asked: Any, tokenized: Any, session: str, plan: Trimmed | Healed
    ) -> None:
        prompt, bound = tokenized.input_ids, tie(tokenized)
        sent = guarded(plan.rest, plan.committed, self._bos)
        params = self._session_params(id=session)
        turn = self._transcripts.change(session, lambda it: it.begin(prompt, plan.rest, bound))
        self._runs(manager, asked, session, turn)
        # The request is changed completely or not at all: nothing after this line can fail.
        tokenized.input_ids, tokenized.session_params, tokenized.session_id = sent, params, None

    def _runs(self, manager: Any, asked: Any, session: str, turn: Turn) -> None:
        running = _Running(session, turn, manager.rid_to_state[asked.rid])
        self._running[session] = running
        setattr(asked, _RUNS, running)

    def _wait(self, original: Original, manager: Any, asked: Any, *a: Any, **k: Any) -> Any:
        running = asked.__dict__.get(_RUNS)
        if running is None:
            return original(manager, asked, *a, **k)
        if asked.return_prompt_token_ids:
            running.state.prompt_token_ids = list(running.turn.prompt)
        return self._watched(original(manager, asked, *a, **k), running)

    async def _watched(self, answer: AsyncIterator[Any], running: _Running) -> AsyncIterator[Any]:
        """Commits the turn before yielding the last item: the engine requests no further item of an
        answer that isn't streamed."""
        try:
            async for piece in answer:
                self._see(running, piece["meta_info"])
                yield piece
        finally:
            await answer.aclose()

    def _see(self, running: _Running, said: dict[str, Any]) -> None:
        try:
            finish = said["finish_reason"]
            right = said.get("prompt_tokens") == running.turn.prompt_tokens
            # The engine runs a request that it refuses as a prompt of one token.
            if right or (finish and finish["type"] == "abort"):
                if finish:
                    self._commit(running, _outcome(running, said))
                return
            self._commit(running, Lost())
        except Exception as error:
            self._fail("answer", error)
            return
        raise OtherContext(
            f"the engine counts {said.get('prompt_tokens')} prompt tokens where the session and "
            f"this turn have {running.turn.prompt_tokens}: open the session again, send everything"
        )

    def _settle_the_last(self, manager: Any, session: str) -> None:
        """Commits the session's last turn if its client disconnected before the end was seen."""
        running = self._running.get(session)
        if running is None:
            return
        state = running.state
        if state.finished:
            said = state.out_list[-1]["meta_info"] if state.out_list else None
            self._commit(running, _outcome(running, said) if said else Lost())
        elif not state.dispatched and manager.rid_to_state.get(state.obj.rid) is not state:
            self._commit(running, RolledBack())

    def _commit(self, running: _Running, outcome: Outcome) -> None:
        if self._running.get(running.session) is running:
            del self._running[running.session]
        self._transcripts.change(running.session, lambda it: it.commit(running.turn, outcome))

    # Messages to and from the agent.

    def _tell(self, planned: wire.Planned) -> None:
        if self._link is None or not self._link.connected:
            return
        if self._connection != self._link.connections:
            # The plans for an earlier connection have no reader any more.
            self._connection = self._link.connections
            self._plans.clear()
        self._plans.append(wire.planned(planned))
        self._flush()

    def _flush(self) -> None:
        """Sends waiting plans until the socket is full. Schedules another try if it is."""
        while self._link.ready() and self._plans:
            self._link.send(self._plans.popleft(), self._connection)
        if not self._flushing and self._link.connected and not self._link.ready():
            self._flushing = True
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush_again)

    def _flush_again(self) -> None:
        self._flushing = False
        try:
            self._flush()
        except Exception as error:
            self._fail("flush", error)

    async def _ask(self, planned: wire.Planned) -> tuple[Mark | None, str]:
        """Asks the agent where to run the turn. Returns None and the reason if nowhere else."""
        if self._link is None or not self._link.connected:
            return None, "no agent is there"
        loop = asyncio.get_running_loop()
        # Adding a reader that is already there replaces it.
        loop.add_reader(self._link.wake_read, self._hear)
        self._number += 1
        number, answer = self._number, loop.create_future()
        self._questions[number] = answer
        try:
            self._tell(planned._replace(number=number))
            mark = await asyncio.wait_for(answer, ANSWER_SECONDS_MAX)
        except asyncio.TimeoutError:
            return None, "the agent didn't answer in time"
        finally:
            del self._questions[number]
        return (mark, "") if mark.session else (None, "the agent lets it run as it came")

    def _hear(self) -> None:
        for kind, what in self._link.take_commands():
            if kind == wire.RUN:
                answer = self._questions.get(what.number)
                if answer is not None and not answer.done():
                    answer.set_result(Mark(what.tokens_max, what.session))


def _hear_aborts_again(manager: Any, rid: str) -> None:
    """Lets the engine pass on another abort of this request. An abort during a question went to the
    scheduler before the turn did, and the engine passes on only the first. The agent repeats its
    aborts until the turn ends."""
    state = manager.rid_to_state.get(rid)
    if getattr(state, "abort_sent", False):
        state.abort_sent = False


def _outcome(running: _Running, said: dict[str, Any]) -> Outcome:
    """Returns how a turn ended, from the last item of the engine's answer."""
    if said["finish_reason"]["type"] == "abort":
        # Without `num_retractions` the turn was aborted in the queue, and may have run before.
        return RolledBack() if said.get("num_retractions") == 0 else Lost()
    answer = running.state.output_ids
    return Finished(answer) if len(answer) == said["completion_tokens"] else Lost()


def _mark(header: bytes) -> Mark:
    tokens, session, rid = (*header.decode("latin-1").split(" ", 2), "", "")[:3]
    readable = tokens.isascii() and tokens.isdigit() and len(tokens) <= 10
    mark = Mark(int(tokens), session) if readable else Mark(0, "")
    return mark._replace(rid=rid) if readable else mark


def _message(plan: Plan, mark: Mark, rid: str, prompt: int = 0, why: str = "") -> wire.Planned:
    """Returns the message to the agent about a plan. For a prompt that is too long, `prompt` is at
    least what the engine would count."""
    kinds = {Trimmed: wire.TRIMMED, Healed: wire.HEALED, Diverged: wire.DIVERGED}
    kind = kinds.get(type(plan), wire.REFUSED)
    at, committed = getattr(plan, "at", 0), getattr(plan, "committed", 0)
    reasons = [getattr(plan, "why", ""), why]
    if isinstance(plan, TooLong):
        prompt = max(prompt, plan.tokens)
        reasons.insert(0, f"it has {plan.tokens} tokens, and {mark.tokens_max} have room")
    sent = len(getattr(plan, "rest", ()))
    reason = "; ".join(filter(None, reasons))
    rid = mark.rid or rid
    return wire.Planned(0, at, committed, sent, prompt, kind, mark.session, rid, reason)
