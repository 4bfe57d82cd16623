"""Trims prompts with a full history, so that the engine runs them as turns of streaming sessions.

*Trimming* removes the part of a full prompt that the turn's session already has, in the engine
process that tokenizes: after the engine's own template and tokenizer, before its scheduler.

A request is trimmed only if it is *marked* with the header `x-override-berth-trim: <tokens_max>
<session> [<rid>]`. `<session>` names an open streaming session. There the prompt may have at most
`<tokens_max>` tokens, for which the agent has reserved room. `<rid>` is the agent's id of the turn.
The mark is a header, because all of the engine's routes pass on nothing else. Clients can't forge
it: router and agent remove all client headers that begin with `x-override-`.

The body of `/v1/messages` has no place for a session's tag, so the agent sends the tag of such a
turn in the header `x-override-berth-tag`.

For one HTTP request the engine may run several turns: `/v1/responses` calls its built-in tools
itself. The mark is for the first, for which the agent has reserved room. The others run outside the
session, and the agent learns of them by their plans.

A request that can't be trimmed runs unchanged. But with the header `x-override-berth-must-continue`
it is refused unless its prompt continues the session, because other clients append to this session
and rely on its history.

If another session or more room could help a turn, the trimmer first asks the agent a *question*:
where may this turn run?

The trimmer raises an error into the engine in three cases only: a request that must continue its
session doesn't; new tokens are for a session whose KV has another adapter, extra key or salt; the
engine computed an answer on another context than the client's. On its first internal error it stops
trimming for good and reports why.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from . import wire
from .eligibility import cache_namespace, engine_refusal, fast_tokenizer, request_refusal
from .link import Link, socket_paths
from .probe import log_off
from .transcripts import Transcripts
from .trim import (
    Diverged, Finished, Lost, Outcome, Plan, Refused, Retokenized, RolledBack, Tokenizer, TooLong,
    Transcript, Trimmed, Turn, guard_bos, is_improvable,
)

MARK_HEADER = b"x-override-berth-trim"
MUST_CONTINUE_HEADER = b"x-override-berth-must-continue"
TAG_HEADER = b"x-override-berth-tag"
# On the engine's request object: a request's mark, and later its running turn.
_MARK_ATTRIBUTE, _TURN_ATTRIBUTE = "berth_trim", "berth_turn"
# In the scope of an HTTP request: a turn of it has taken its mark.
_TAKEN_KEY = "berth_mark_taken"
# The agent opens a streaming session within milliseconds: one that takes longer is in trouble.
ANSWER_SECONDS_MAX = 2.0
# They wait until the agent reads them. A plan has a few hundred bytes.
PLANS_MAX = 256
# How often to try to send waiting plans, while the agent doesn't read.
FLUSH_SECONDS = 0.1

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_ROUTER = "sglang.srt.managers.multi_tokenizer_mixin.MultiTokenizerRouter."
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."

Method = Callable[..., Any]  # a method of the engine that a hook wraps
_log = logging.getLogger(__name__)


class Mark(NamedTuple):
    """Where a turn may run: a request's mark, or the agent's answer to a question."""

    tokens_max: int
    # Empty if the header could not be read, or if the agent lets the turn run unchanged.
    session: str
    # The agent's id of the turn. Not every route uses it as the id of the request.
    rid: str = ""
    # Refuse the request if its prompt doesn't continue the session.
    must_continue: bool = False
    # An earlier turn of the same HTTP request has taken the mark.
    is_taken: bool = False


class NotContinued(ValueError):
    """The prompt doesn't continue a session to which other clients append. The engine answers with
    400 and this text; the agent gives its client a more detailed answer."""


class OtherKV(ValueError):
    """A request appends to a session whose KV has another adapter, extra key or salt. The agent
    refuses such a request itself, unless others have loaded the adapter anew."""


class ContextMismatch(RuntimeError):
    """The engine ran a turn on another context than the client's."""


@dataclass
class _RunningTurn:
    """A turn that the engine runs, or whose end isn't committed to its session's transcript yet."""

    session: str
    turn: Turn
    request_state: Any


class Trimmer:
    """The hooks in the engine process that tokenizes, and what they know of the sessions."""

    def __init__(self, instance: bytes, shim_version: str) -> None:
        self._instance, self._shim_version = instance, shim_version
        # Empty while the trimmer works. Replaced when the engine's tokenizer is available.
        self._inert_reason = "it hasn't started"
        self._sglang_version = ""
        self._session_params: Any = None
        self._tokenizer: Tokenizer | None = None
        self._bos_id: int | None = None
        self._transcripts = Transcripts()
        # By session: its latest turn, until that turn's end is committed.
        self._running_turns: dict[str, _RunningTurn] = {}
        self._link: Link | None = None
        self._connection_number = 0
        # Encoded, until there is room in the socket.
        self._waiting_plans: deque[bytes] = deque(maxlen=PLANS_MAX)
        self._is_flush_scheduled = False
        self._answers: dict[int, asyncio.Future[Mark]] = {}
        # Starts at random, so that no answer to another engine process's question matches.
        self._last_question = int.from_bytes(instance[:4], "little") << 32

    def install_hooks(self, sglang_version: str, off_reason: str) -> None:
        """Installs the hooks: with `off_reason` only those that report why nothing is trimmed."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def after_init(_: None, manager: Any, *values: Any, **named: Any) -> None:
            self._start(manager, sglang_version, off_reason)

        HookRegistry.register(_MANAGER + "__init__", after_init, HookType.AFTER)
        # With several tokenizer workers, the engine has this router instead of the manager. Then
        # the hook only reports why nothing is trimmed.
        HookRegistry.register(_ROUTER + "__init__", after_init, HookType.AFTER)
        if off_reason:
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

    def _start(self, manager: Any, sglang_version: str, off_reason: str) -> None:
        """Enables trimming if the engine allows it, and connects to the agent."""
        self._sglang_version = sglang_version
        try:
            if self._link is not None:
                raise RuntimeError("two engines in one process")
            if off_reason:
                log_off({"trimming": off_reason})
            self._inert_reason = off_reason or engine_refusal()
            if not self._inert_reason:
                from sglang.srt.managers.io_struct import SessionParams

                self.enable(manager.tokenizer, SessionParams)
            self.connect(*socket_paths(manager.server_args.port))
        except Exception as error:
            self._fail("start", error)

    def enable(self, tokenizer: Any, session_params: Any) -> None:
        """Enables trimming. `session_params` is the engine's class for a request's session."""
        self._session_params = session_params
        self._tokenizer = fast_tokenizer(tokenizer)
        self._bos_id = getattr(tokenizer, "bos_token_id", None)
        self._inert_reason = ""

    def connect(self, paths: list[str], is_path_configured: bool) -> None:
        """Starts to connect to the agent. The shim's socket may be at each of `paths`."""
        paths = [path + ".trim" for path in paths]
        self._link = Link(paths, is_path_configured, self._hello())
        self._link.start()

    def _hello(self) -> bytes:
        return wire.encode(wire.Trimmer(
            os.getpid(), self._instance, self._sglang_version, self._shim_version,
            self._inert_reason or None,
        ))

    def _fail(self, failed_part: str, error: Exception) -> None:
        """Stops all trimming and reports why. Turns that already run continue."""
        self._inert_reason = f"{failed_part}: {type(error).__name__}: {error}"
        self._transcripts = Transcripts()
        self._running_turns.clear()
        _log.warning("nothing is trimmed from now on: %s", self._inert_reason)
        if self._link is not None:
            self._link.reconnect(self._hello())

    # Opening and closing sessions.

    async def _hook_open(self, original: Method, manager: Any, body: Any, *a: Any, **k: Any) -> Any:
        id = await original(manager, body, *a, **k)
        if id is not None and body.streaming and not self._inert_reason:
            self._running_turns.pop(id, None)
            self._transcripts.open(id)
        return id

    async def _hook_close(
        self, original: Method, manager: Any, body: Any, *a: Any, **k: Any
    ) -> Any:
        self._running_turns.pop(body.session_id, None)
        self._transcripts.close(body.session_id)
        return await original(manager, body, *a, **k)

    # The hooks of a request, in the order in which the engine calls them. `body` is the engine's
    # object for the request, for example a `GenerateReqInput`.

    def _hook_generate(
        self, original: Method, manager: Any, body: Any, request: Any = None, *a: Any, **k: Any
    ) -> Any:
        # Must be named `request`: some callers in SGLang pass it by name.
        if request is not None and not self._inert_reason and hasattr(body, "session_params"):
            scope = getattr(request, "scope", {})
            headers = dict(scope.get("headers", ()))
            if MARK_HEADER in headers:
                mark = _parse_mark(headers[MARK_HEADER])._replace(
                    must_continue=MUST_CONTINUE_HEADER in headers,
                    is_taken=scope.get(_TAKEN_KEY, False),
                )
                scope[_TAKEN_KEY] = True
                setattr(body, _MARK_ATTRIBUTE, mark)
            if TAG_HEADER in headers and not getattr(body, "session_id", None):
                body.session_id = headers[TAG_HEADER].decode("latin-1")
        return original(manager, body, request, *a, **k)

    def _hook_batch(self, original: Method, manager: Any, body: Any, *a: Any, **k: Any) -> Any:
        if (mark := body.__dict__.get(_MARK_ATTRIBUTE)) and not self._inert_reason:
            try:
                plan = Refused("it is a batch, or has n > 1")
                self._send_plan(_plan_message(plan, mark, str(body.rid)))
            except Exception as error:
                self._fail("batch", error)
        return original(manager, body, *a, **k)

    def _hook_tokenize(self, original: Method, manager: Any, body: Any) -> Any:
        if self._inert_reason:
            return original(manager, body)
        if mark := body.__dict__.get(_MARK_ATTRIBUTE):
            return self._tokenize_marked(original, manager, body, mark)
        params = getattr(body, "session_params", None)
        if params and params.get("id") in self._transcripts:
            return self._tokenize_appended(original, manager, body, params["id"])
        return original(manager, body)

    async def _tokenize_marked(self, original: Method, manager: Any, body: Any, mark: Mark) -> Any:
        """Tokenizes a marked request. If its plan allows that, makes it a turn of the session that
        its mark, or the agent's answer, names."""
        tokenized = await original(manager, body)
        runs_in_session = False
        try:
            plan, why = self._make_plan(manager, tokenized, mark), ""
            prompt_tokens = len(tokenized.input_ids or ())
            # Another session doesn't help a prompt that must continue this session. More room does.
            if isinstance(plan, TooLong) or (is_improvable(plan) and not mark.must_continue):
                question = _plan_message(plan, mark, body.rid, prompt_tokens)
                agent_mark, why = await self._ask_agent(question)
                _allow_another_abort(manager, body.rid)
                if agent_mark is not None:
                    mark = agent_mark._replace(rid=mark.rid, must_continue=mark.must_continue)
                    plan = self._make_plan(manager, tokenized, mark)
            self._send_plan(_plan_message(plan, mark, body.rid, prompt_tokens, why))
            if isinstance(plan, Trimmed | Retokenized):
                self._begin_turn(manager, body, tokenized, mark.session, plan)
                runs_in_session = True
            elif tokenized.session_id not in self._transcripts:
                # The session was closed meanwhile. With its id as a tag, this turn would begin the
                # tag anew, and nothing would end it.
                tokenized.session_id = None
        except Exception as error:
            self._fail("plan", error)
        if mark.must_continue and not runs_in_session:
            raise NotContinued("the prompt doesn't continue its session; nothing of it was run")
        return tokenized

    async def _tokenize_appended(
        self, original: Method, manager: Any, body: Any, session: str
    ) -> Any:
        """Tokenizes a turn whose client sends only the new tokens, unless the session has other KV.
        The turn runs unchanged, and is recorded in the session's transcript."""
        tokenized = await original(manager, body)
        namespace, has_other_kv = cache_namespace(tokenized), False
        try:
            self._settle_last_turn(manager, session)
            transcript, ids = self._transcripts.get(session), tokenized.input_ids
            has_other_kv = transcript is not None and transcript.has_other_kv(namespace)
            # A transcript holds only token ids, so a turn with media makes the context unknown.
            has_only_ids = ids is not None and not tokenized.mm_inputs

            def record(transcript: Transcript) -> Turn | None:
                if has_only_ids:
                    return transcript.append(ids, self._bos_id, namespace)
                transcript.discard_context()
                return None

            turn = None if has_other_kv else self._transcripts.change(session, record)
            if turn is not None:
                self._record_turn(manager, body, session, turn)
        except Exception as error:
            self._fail("append", error)
        if has_other_kv:
            raise OtherKV(
                "the session's KV has another adapter, cache_salt or extra_key, or the adapter was "
                "loaded anew: open the session again and send the full history"
            )
        return tokenized

    def _make_plan(self, manager: Any, tokenized: Any, mark: Mark) -> Plan:
        """Compares a tokenized request with the session that the mark names."""
        if not mark.session:
            return Refused("its mark can't be read")
        if mark.is_taken:
            return Refused("it is another turn of a request whose mark was taken")
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
        """Makes a tokenized request a turn of the session, as planned."""
        prompt, namespace = tokenized.input_ids, cache_namespace(tokenized)
        sent_ids = guard_bos(plan.new_ids, plan.committed_tokens, self._bos_id)
        params = self._session_params(id=session)
        turn = self._transcripts.change(
            session, lambda transcript: transcript.begin(prompt, plan.new_ids, namespace)
        )
        self._record_turn(manager, body, session, turn)
        # These come last and can't fail, so a request is changed completely or not at all.
        tokenized.input_ids = sent_ids
        tokenized.session_params, tokenized.session_id = params, None

    def _record_turn(self, manager: Any, body: Any, session: str, turn: Turn) -> None:
        running_turn = _RunningTurn(session, turn, manager.rid_to_state[body.rid])
        self._running_turns[session] = running_turn
        setattr(body, _TURN_ATTRIBUTE, running_turn)

    def _hook_wait(self, original: Method, manager: Any, body: Any, *a: Any, **k: Any) -> Any:
        running_turn = body.__dict__.get(_TURN_ATTRIBUTE)
        if running_turn is None:
            return original(manager, body, *a, **k)
        # The client must not see that the engine got only a part of its prompt.
        if body.return_prompt_token_ids:
            running_turn.request_state.prompt_token_ids = list(running_turn.turn.prompt)
        return self._watch_answer(original(manager, body, *a, **k), running_turn)

    async def _watch_answer(
        self, answer: AsyncIterator[Any], running_turn: _RunningTurn
    ) -> AsyncIterator[Any]:
        """Passes on a turn's answer. Checks each item before it yields the item: if the answer
        isn't streamed, the engine asks for no item after the last one."""
        try:
            async for item in answer:
                self._check_answer(running_turn, item["meta_info"])
                yield item
        finally:
            await answer.aclose()

    def _check_answer(self, running_turn: _RunningTurn, meta_info: dict[str, Any]) -> None:
        """Commits the turn at its last item. Raises if it ran on another context."""
        try:
            finish = meta_info["finish_reason"]
            is_right_count = meta_info.get("prompt_tokens") == running_turn.turn.prompt_tokens
            # The count of an aborted turn says nothing: the engine runs a request that it refuses
            # as a prompt of one token.
            if is_right_count or (finish and finish["type"] == "abort"):
                if finish:
                    self._commit(running_turn, _read_outcome(running_turn, meta_info))
                return
            self._commit(running_turn, Lost())
        except Exception as error:
            self._fail("answer", error)
            return
        raise ContextMismatch(
            f"the engine counted {meta_info.get('prompt_tokens')} prompt tokens, but the session "
            f"and this turn have {running_turn.turn.prompt_tokens}: open the session again and "
            f"send the full history"
        )

    def _settle_last_turn(self, manager: Any, session: str) -> None:
        """Commits the latest turn's end if its client left before the hooks saw it."""
        running_turn = self._running_turns.get(session)
        if running_turn is None:
            return
        state = running_turn.request_state
        if state.finished:
            meta_info = state.out_list[-1]["meta_info"] if state.out_list else None
            outcome = _read_outcome(running_turn, meta_info) if meta_info else Lost()
            self._commit(running_turn, outcome)
        # A turn that the engine has forgotten before sending it to the scheduler changed nothing.
        elif not state.dispatched and manager.rid_to_state.get(state.obj.rid) is not state:
            self._commit(running_turn, RolledBack())

    def _commit(self, running_turn: _RunningTurn, outcome: Outcome) -> None:
        """Applies the end of a turn to its session's transcript."""
        if self._running_turns.get(running_turn.session) is running_turn:
            del self._running_turns[running_turn.session]
        self._transcripts.change(
            running_turn.session, lambda transcript: transcript.commit(running_turn.turn, outcome)
        )

    # Messages to and from the agent.

    def _send_plan(self, planned: wire.Planned) -> None:
        if self._link is None or not self._link.is_connected:
            return
        if self._connection_number != self._link.connection_number:
            self._connection_number = self._link.connection_number
            self._waiting_plans.clear()
        self._waiting_plans.append(wire.encode(planned))
        self._send_waiting_plans()

    def _send_waiting_plans(self) -> None:
        """Sends waiting plans until the socket is full. Then schedules another try."""
        while self._link.flush() and self._waiting_plans:
            self._link.send(self._waiting_plans.popleft(), self._connection_number)
        if not self._is_flush_scheduled and self._link.is_connected and not self._link.flush():
            self._is_flush_scheduled = True
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._retry_sending)

    def _retry_sending(self) -> None:
        self._is_flush_scheduled = False
        try:
            self._send_waiting_plans()
        except Exception as error:
            self._fail("flush", error)

    async def _ask_agent(self, planned: wire.Planned) -> tuple[Mark | None, str]:
        """Asks the agent where to run this plan's turn. Returns its answer, or None and why."""
        if self._link is None or not self._link.is_connected:
            return None, "no agent is connected"
        loop = asyncio.get_running_loop()
        # A repeated call replaces the reader that an earlier question has added.
        loop.add_reader(self._link.wake_receiver, self._read_answers)
        self._last_question += 1
        question_number, answer = self._last_question, loop.create_future()
        self._answers[question_number] = answer
        try:
            self._send_plan(replace(planned, question=question_number))
            mark = await asyncio.wait_for(answer, ANSWER_SECONDS_MAX)
        except asyncio.TimeoutError:
            return None, "the agent didn't answer in time"
        finally:
            del self._answers[question_number]
        return (mark, "") if mark.session else (None, "the agent lets it run as it came")

    def _read_answers(self) -> None:
        for command in self._link.take_commands():
            if isinstance(command, wire.Run):
                answer = self._answers.get(command.question)
                if answer is not None and not answer.done():
                    answer.set_result(Mark(command.tokens_max, command.session or ""))


def _allow_another_abort(manager: Any, rid: str) -> None:
    """Lets the engine send another abort of this request to its scheduler.

    The engine sends only one. An abort while the trimmer waited for the agent reached the scheduler
    before the turn did, so it had no effect. The agent repeats its aborts until the turn ends."""
    state = manager.rid_to_state.get(rid)
    if getattr(state, "abort_sent", False):
        state.abort_sent = False


def _read_outcome(running_turn: _RunningTurn, meta_info: dict[str, Any]) -> Outcome:
    """Returns how a turn ended, from the last item of the engine's answer."""
    if meta_info["finish_reason"]["type"] == "abort":
        # A turn that was aborted in the queue has no `num_retractions`: it may have been retracted.
        return RolledBack() if meta_info.get("num_retractions") == 0 else Lost()
    answer = running_turn.request_state.output_ids
    return Finished(answer) if len(answer) == meta_info["completion_tokens"] else Lost()


def _parse_mark(header: bytes) -> Mark:
    """Reads the header of a mark. Returns a mark without a session if the header is malformed."""
    tokens, session, rid = (*header.decode("latin-1").split(" ", 2), "", "")[:3]
    is_readable = tokens.isascii() and tokens.isdigit() and len(tokens) <= 10
    mark = Mark(int(tokens), session) if is_readable else Mark(0, "")
    return mark._replace(rid=rid) if is_readable else mark


def _plan_message(
    plan: Plan, mark: Mark, rid: str, prompt_tokens: int = 0, why: str = ""
) -> wire.Planned:
    """Returns the message to the agent about a plan. `prompt_tokens` is the length of the whole
    prompt (or a larger count of `TooLong`), and `why` the reason why a question didn't help."""
    kinds = {Trimmed: "trimmed", Retokenized: "retokenized", Diverged: "diverged"}
    reasons = [getattr(plan, "why", ""), why]
    if isinstance(plan, TooLong):
        prompt_tokens = max(prompt_tokens, plan.prompt_tokens)
        reasons.insert(0, f"it has {plan.prompt_tokens} tokens, and {mark.tokens_max} have room")
    return wire.Planned(
        question=None,
        plan=kinds.get(type(plan), "refused"),
        shared_tokens=getattr(plan, "shared_tokens", 0),
        committed_tokens=getattr(plan, "committed_tokens", 0),
        appended_tokens=len(getattr(plan, "new_ids", ())),
        prompt_tokens=prompt_tokens,
        session=mark.session,
        rid=mark.rid or rid,
        why="; ".join(filter(None, reasons)),
    )
