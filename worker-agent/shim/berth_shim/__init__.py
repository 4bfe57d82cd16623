"""Berth's shim inside SGLang: reports to the agent what only the engine knows.

SGLang calls `register` in each of its processes. In a scheduler process the shim installs hooks,
and reports over a unix socket; `wire` documents the protocol. In the engine's first process, which
tokenizes, it trims prompts on request (`trimmer`). The shim never raises into the engine: after the
first error it stops for good and reports why. On an unknown version of SGLang it hooks only the
start of the two processes, to report that.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

from . import wire
from .link import Link, socket_path

__version__ = "0.1.0"

# Every hook below was checked and tested with these versions.
SGLANG_VERSIONS = ("0.5.23",)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_SESSION = "sglang.srt.session.session_controller.Session."
_CONTROLLER = "sglang.srt.session.session_controller.SessionController."
_SLOTS = "sglang.srt.session.streaming_session.StreamingSession."
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."

# Identifies the engine process, even where a pid is reused.
_INSTANCE = os.urandom(16)


def register() -> None:
    """SGLang's entry point. A process can become a scheduler only if it has loaded the scheduler
    module; loading the module in other processes would cost them seconds. The process that
    tokenizes is the first one, which has no parent process."""
    if "sglang.srt.managers.scheduler" in sys.modules:
        _Shim().hook()
    if multiprocessing.parent_process() is None:
        import sglang

        from .trimmer import Trimmer

        version = sglang.__version__
        Trimmer(_INSTANCE, __version__).hook(version, version in SGLANG_VERSIONS)


class _Shim:
    """The hooks of one process. `_sampler` exists only in the scheduler that reports for its DP
    rank, and only until the first error."""

    def __init__(self) -> None:
        self._sampler: Any = None
        self._link: Link | None = None
        self._hello: wire.Hello | None = None
        self._in_step = self._in_finish = False
        self._stepped = self._quiet(lambda _, batch, *a, **k: self._say("stepped", batch))

    def hook(self) -> None:
        import sglang
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def after(target: str, hook: Callable[..., None]) -> None:
            HookRegistry.register(target, self._quiet(hook), HookType.AFTER)

        known = sglang.__version__ in SGLANG_VERSIONS
        after(_SCHEDULER + "__init__", lambda _, scheduler, *a, **k: self._start(scheduler, known))
        if not known:
            return
        HookRegistry.register(_SCHEDULER + "process_batch_result", self._step, HookType.AROUND)
        HookRegistry.register(
            _SCHEDULER + "process_input_requests",
            self._quiet(lambda *a, **k: self._commands()),
            HookType.BEFORE,
        )
        after(_SCHEDULER + "publish_load_snapshot", lambda *a, **k: self._idle())
        after(_CONTROLLER + "open", lambda result, _, request, *a, **k: self._say(
            "opened", request.session_id, result.success) if request.streaming else None)
        after(_CONTROLLER + "_close", lambda _, controller, id, *a, **k: self._say(
            "touched" if id in controller.sessions else "closed", id))
        after(_SESSION + "create_req", lambda _, session, *a, **k: self._of(session, "touched"))
        after(_SESSION + "finish_req", lambda _, session, request, *a, **k: self._of(
            session, "committed", request))
        after(_SESSION + "abort_req", lambda _, session, *a, **k: self._of(
            session, "aborted", self._in_finish))
        HookRegistry.register(_SLOTS + "try_cache_finished_req", self._finish, HookType.AROUND)
        after(_TREE + "reset", lambda *a, **k: self._say("flushed"))

    def _quiet(self, hook: Callable[..., Any]) -> Callable[..., None]:
        """Wraps a hook so that it raises nothing and returns None: another value would replace the
        engine's own result."""

        def quiet(*values: Any, **named: Any) -> None:
            try:
                hook(*values, **named)
            except Exception as error:
                self._fail("hook", error)

        return quiet

    def _start(self, scheduler: Any, known: bool) -> None:
        import sglang

        inert = ""
        if not known:
            inert = f"SGLang {sglang.__version__} is not known, only {', '.join(SGLANG_VERSIONS)}"
        hello = wire.Hello(
            os.getpid(), 0, 0, 0, 0, _INSTANCE, str(sglang.__version__), __version__, inert,
            "", "", "", "", 0,
        )
        try:
            hello, reports = _describe(scheduler, hello)
        except Exception as error:
            # If the rank is unknown, so is whether this process reports. Reporting twice is better
            # than never.
            hello, reports = hello._replace(inert=hello.inert or _reason("start", error)), True
        if not reports:
            return
        try:
            self._hello = hello
            self._link = Link(*socket_path(scheduler.server_args.port), wire.hello(hello))
            if not hello.inert:
                self._watch(scheduler)
        except Exception as error:
            self._fail("start", error)
        if self._link is not None:
            self._link.start()

    def _watch(self, scheduler: Any) -> None:
        from .audit import Auditor
        from .republish import Republisher
        from .sampler import Sampler

        auditor = Auditor(scheduler, self._link.wake)
        republisher = Republisher(scheduler, self._link.wake)
        self._hello = self._hello._replace(
            unauditable=auditor.refusal,
            unpublishable=republisher.refusal,
            device=auditor.device,
            page_bytes=auditor.page_bytes,
        )
        self._link.greet(wire.hello(self._hello))
        undemotable = self._hello.undemotable
        self._sampler = Sampler(scheduler, self._link, undemotable, auditor, republisher)
        self._sampler.publish(self._hello.dp_rank)
        # An idle scheduler with `--sleep-on-idle` sleeps on its sockets for up to a second.
        if poller := getattr(scheduler.idle_sleeper, "poller", None):
            poller.register(self._link.wake_read, 1)  # POLLIN, without importing zmq for it.

    def _step(self, original: Callable[..., Any], *values: Any, **named: Any) -> Any:
        self._in_step = True
        try:
            result = original(*values, **named)
        finally:
            self._in_step = False
        self._stepped(*values, **named)
        return result

    def _finish(self, original: Callable[..., Any], *a: Any, **k: Any) -> Any:
        # An abort inside this call concerns a turn that was running, so its slot is gone.
        self._in_finish = True
        try:
            return original(*a, **k)
        finally:
            self._in_finish = False

    def _idle(self) -> None:
        # Within a step this is called before the results are in.
        if not self._in_step:
            self._say("idle")

    def _commands(self) -> None:
        if self._sampler is not None and self._sampler.publishes:
            self._say("step_begins")
        if self._sampler is not None and self._sampler.asked:
            self._say("commands")

    def _of(self, session: Any, what: str, *values: Any) -> None:
        if self._sampler is not None and session.streaming:
            self._say(what, session.session_id, *values)

    def _say(self, what: str, *values: Any) -> None:
        if self._sampler is None:
            return
        try:
            getattr(self._sampler, what)(*values)
        except Exception as error:
            self._fail(what, error)

    def _fail(self, where: str, error: Exception) -> None:
        """Stops reading for good, and reports why."""
        self._sampler = None
        if self._link is not None:
            self._hello = self._hello._replace(inert=_reason(where, error))
            self._link.say(wire.hello(self._hello))


def _describe(scheduler: Any, hello: wire.Hello) -> tuple[wire.Hello, bool]:
    """Completes the hello, and returns whether this process reports for its DP rank."""
    from sglang.srt.runtime_context import get_parallel

    from .demotion import undemotable

    parallel = get_parallel()
    reports = (parallel.pp_rank, parallel.attn_tp_rank, parallel.attn_cp_rank) == (0, 0, 0)
    hello = hello._replace(dp_rank=parallel.dp_rank or 0)
    tree = type(scheduler.tree_cache).__name__
    if not hello.inert and tree != "UnifiedRadixCache":
        hello = hello._replace(inert=f"the tree cache is {tree}, not UnifiedRadixCache")
    if hello.inert:
        return hello, reports
    return hello._replace(
        page_size=scheduler.page_size,
        total=scheduler.max_total_num_tokens,
        rows_total=scheduler.req_to_token_pool.size,
        undemotable=undemotable(scheduler),
    ), reports


def _reason(where: str, error: Exception) -> str:
    return f"{where}: {type(error).__name__}: {error}"
