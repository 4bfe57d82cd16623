"""Starts the shim, Berth's plugin in SGLang, which reports to the agent what only the engine knows.

In a scheduler process, hooks call the `sampler`, which reads the state of the KV pool and of the
sessions, and carries out the agent's commands. In the engine's first process, which tokenizes, the
`trimmer` removes from a prompt the tokens that the turn's session already holds.

The scheduler's hooks never raise an error into the engine. After the first error the shim is
*inert*: it reports why, and does nothing else any more. Only the `guard` goes on, which keeps the
engine from a fault of its own.

The shim works with every SGLang that has the parts that it needs, the *seams*. A function whose
seam is missing is off, and the agent learns why.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from . import wire
from .guard import needs_no_prefetch, second_pool
from .link import Link, socket_paths
from .probe import ImportedEngine, log_off, off_reasons
from .seams import FUNCTIONS

if TYPE_CHECKING:
    from .host import HostTier
    from .sampler import Sampler

__version__ = "0.1.0"

# A class and a method's name together name a hook's target.
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_SESSION = "sglang.srt.session.session_controller.Session."
_CONTROLLER = "sglang.srt.session.session_controller.SessionController."
_STREAMING_SESSIONS = "sglang.srt.session.streaming_session.StreamingSession."
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_RADIX_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache."

_WEIGHT_CHANGES = (
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc",
)
# One more such method, which SGLang 0.5.20 lacks.
_WEIGHT_CHANGE_END = "end_weight_update"
# Parts of the engine's messages when it has changed nothing.
_UNCHANGED = ("Failed to get ", "must run between", "no weight-update session is open")

# Identifies the engine process, even where a pid is reused.
_INSTANCE = os.urandom(16)


def register() -> None:
    """Installs the hooks that this process needs. This is the plugin's entry point for SGLang."""
    # Importing SGLang's scheduler here would cost every other process seconds. A process that
    # becomes a scheduler has already loaded it.
    if "sglang.srt.managers.scheduler" in sys.modules:
        _Shim().install_hooks()
    # The process that tokenizes has no parent process.
    if multiprocessing.parent_process() is None:
        from .trimmer import Trimmer

        version, off = _probe(["trimming"])
        Trimmer(_INSTANCE, __version__).install_hooks(version, off.get("trimming", ""))


def _probe(functions: list[str]) -> tuple[str, dict[str, str]]:
    """Returns SGLang's version, and why some of these functions of the shim are off."""
    import sglang

    version = str(sglang.__version__)
    try:
        off = off_reasons(ImportedEngine(), version, functions)
    except Exception as error:
        # Without an answer nothing is hooked.
        off = dict.fromkeys(functions, _error_reason("probe", error))
    return version, off


class _Shim:
    """The hooks of one scheduler process. Of all schedulers of a DP rank, only one reports."""

    def __init__(self) -> None:
        # None in a scheduler that doesn't report, and after the first error.
        self._sampler: "Sampler | None" = None
        # None until the sampler was created.
        self._host: "HostTier | None" = None
        # None in a scheduler that doesn't report. The hello is each connection's first message.
        self._link: Link | None = None
        self._hello: wire.Hello | None = None
        self._version, self._off = "", dict[str, str]()
        self._is_processing_step = False
        self._is_ending_turn = False
        self._end_load = self._contain_errors(self._record_load)
        self._end_step = self._contain_errors(
            lambda _scheduler, batch, *a, **k: self._call_sampler("end_step", batch)
        )

    def install_hooks(self) -> None:
        """Installs the hooks: all if the scheduler can be reported, else only that of the start."""
        self._version, self._off = _probe([each for each in FUNCTIONS if each != "trimming"])
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def hook_after(target: str, hook: Callable[..., None]) -> None:
            HookRegistry.register(target, self._contain_errors(hook), HookType.AFTER)

        hook_after(_SCHEDULER + "__init__", lambda _, scheduler, *a, **k: self._start(scheduler))
        if "reports" in self._off:
            return

        def hook_around(target: str, hook: Callable[..., Any]) -> None:
            HookRegistry.register(target, hook, HookType.AROUND)

        hook_around(_SCHEDULER + "process_batch_result", self._around_step)
        HookRegistry.register(
            _SCHEDULER + "process_input_requests",
            self._contain_errors(lambda *a, **k: self._before_requests()),
            HookType.BEFORE,
        )
        hook_after(_SCHEDULER + "publish_load_snapshot", lambda *a, **k: self._sample_idle())
        hook_after(_CONTROLLER + "open", lambda result, _, request, *a, **k: self._call_sampler(
            "report_open", request.session_id, result.success) if request.streaming else None)
        # A session with a running turn stays in the controller, and is closed when the turn ends.
        hook_after(_CONTROLLER + "_close", lambda _, controller, id, *a, **k: self._call_sampler(
            "mark_touched" if id in controller.sessions else "report_close", id))
        hook_after(_SESSION + "create_req", lambda _, session, *a, **k: self._call_sampler_for(
            session, "mark_touched"))
        hook_after(
            _SESSION + "finish_req",
            lambda _, session, request, *a, **k: self._call_sampler_for(
                session, "report_commit", request),
        )
        hook_after(_SESSION + "abort_req", lambda _, session, *a, **k: self._call_sampler_for(
            session, "report_abort", self._is_ending_turn))
        hook_around(_STREAMING_SESSIONS + "try_cache_finished_req", self._around_finish)
        if "host" not in self._off:
            hook_around(_RADIX_CACHE + "ready_to_load_host_cache", self._around_load)
        if "guarding" not in self._off:
            hook_around(_SCHEDULER + "_prefetch_kvcache", self._around_prefetch)
        hook_after(_RADIX_CACHE + "reset", lambda *a, **k: self._call_sampler("report_flush"))
        for method in _weight_changes():
            hook_after(_WEIGHTS + method, lambda result, *a, **k: self._call_sampler(
                "report_weights") if _may_change_weights(result) else None)

    def _contain_errors(self, hook: Callable[..., Any]) -> Callable[..., None]:
        """Wraps a hook so that it raises nothing and returns None. SGLang would use any other value
        as the result of the hooked function."""

        def contained_hook(*args: Any, **kwargs: Any) -> None:
            try:
                hook(*args, **kwargs)
            except Exception as error:
                self._fail("hook", error)

        return contained_hook

    def _start(self, scheduler: Any) -> None:
        """Connects to the agent if this scheduler reports, and starts sampling if it can."""
        hello = wire.Hello(
            pid=os.getpid(), dp_rank=0, page_size_tokens=0, pool_tokens=0, rows_total=0,
            instance=_INSTANCE, sglang=self._version, shim=__version__,
            inert_reason=self._off.get("reports"), undemotable_reason=self._off.get("demotion"),
            pin_safety=wire.PinSafety(self._off.get("guarding")),
        )
        try:
            hello, is_reporter = _complete_hello(scheduler, hello)
        except Exception as error:
            # This scheduler may be the one that reports. Two reports are better than none.
            inert_reason = hello.inert_reason or _error_reason("start", error)
            hello, is_reporter = replace(hello, inert_reason=inert_reason), True
        if not is_reporter:
            return
        log_off(self._off)
        try:
            self._hello = hello
            self._link = Link(*socket_paths(scheduler.server_args.port), wire.encode(hello))
            if not hello.inert_reason:
                self._start_sampler(scheduler)
        except Exception as error:
            self._fail("start", error)
        if self._link is not None:
            self._link.start()

    def _start_sampler(self, scheduler: Any) -> None:
        """Creates the sampler, and completes the hello by what its parts can do on this engine."""
        from .audit import Auditor
        from .host import HostTier
        from .prefetch import Prefetcher
        from .republish import Republisher
        from .sampler import Sampler

        auditor = Auditor(scheduler, self._link.wake, self._off.get("audit", ""))
        republisher = Republisher(scheduler, self._link.wake, self._off.get("republishing", ""))
        self._hello = replace(
            self._hello,
            unauditable_reason=auditor.refusal or None,
            unpublishable_reason=republisher.refusal or None,
            device=auditor.device,
            page_bytes=auditor.page_bytes or None,
        )
        self._link.set_hello(wire.encode(self._hello))
        refusal = self._hello.undemotable_reason
        self._host = HostTier(scheduler, self._off.get("host", ""))
        self._sampler = Sampler(
            scheduler, self._link, refusal, auditor, republisher, self._host,
            Prefetcher(scheduler, self._off.get("prefetching", "")),
        )
        # With `--sleep-on-idle`, an idle scheduler polls its sockets for up to a second: a command
        # must wake it.
        if poller := getattr(scheduler.idle_sleeper, "poller", None):
            poller.register(self._link.wake_receiver, 1)  # 1 is zmq's POLLIN.

    def _around_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the engine's function that processes a step's results, then ends the step here."""
        self._is_processing_step = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._is_processing_step = False
        self._end_step(*args, **kwargs)
        return result

    def _around_finish(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # An abort inside this call ends a turn that was running, and frees its session's slot.
        self._is_ending_turn = True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_ending_turn = False

    def _around_load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the engine's function that begins loads from the host, and times them."""
        begin_ns = time.perf_counter_ns()
        producer = original(*args, **kwargs)
        self._end_load(producer, begin_ns)
        return producer

    def _around_prefetch(
        self, original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls the engine's look for a prompt in its storage, but not where that would end the
        engine. This works in each scheduler, also if the shim is inert."""
        try:
            is_left_out = needs_no_prefetch(scheduler.tree_cache, request)
        except Exception as error:
            # Without the storage the engine computes more, but it lives.
            is_left_out = True
            if self._sampler is not None:
                self._fail("guard", error)
        return None if is_left_out else original(scheduler, request, *args, **kwargs)

    def _record_load(self, producer: int, begin_ns: int) -> None:
        # The engine returns -1 if it had no load to begin.
        if self._sampler is not None and producer >= 0:
            self._host.record_load(begin_ns)

    def _sample_idle(self) -> None:
        # Inside a step's processing its results are not complete; `end_step` samples afterwards.
        if not self._is_processing_step:
            self._call_sampler("sample_idle")

    def _before_requests(self) -> None:
        """Runs before the engine handles the new requests of a step."""
        if self._sampler is not None and self._sampler.has_work:
            self._call_sampler("run_commands")
        self._call_sampler("send_heartbeat")

    def _call_sampler_for(self, session: Any, method: str, *args: Any) -> None:
        """Calls the sampler's method, with the session's id, for a streaming session."""
        if self._sampler is not None and session.streaming:
            self._call_sampler(method, session.session_id, *args)

    def _call_sampler(self, method: str, *args: Any) -> None:
        """Calls the sampler's method of this name. An error makes the shim inert."""
        if self._sampler is None:
            return
        try:
            getattr(self._sampler, method)(*args)
        except Exception as error:
            self._fail(method, error)

    def _fail(self, failed_part: str, error: Exception) -> None:
        """Makes the shim inert for good, and reports why."""
        self._sampler = None
        if self._link is not None:
            self._hello = replace(self._hello, inert_reason=_error_reason(failed_part, error))
            self._link.reconnect(wire.encode(self._hello))


def _complete_hello(scheduler: Any, hello: wire.Hello) -> tuple[wire.Hello, bool]:
    """Returns the completed hello, and whether this scheduler reports for its DP rank."""
    from sglang.srt.runtime_context import get_parallel

    from .demotion import demotion_refusal

    parallel = get_parallel()
    is_reporter = (parallel.pp_rank, parallel.attn_tp_rank, parallel.attn_cp_rank) == (0, 0, 0)
    # SGLang 0.5.20 has the DP rank elsewhere.
    ranks = parallel if hasattr(parallel, "dp_rank") else scheduler.ps
    hello = replace(hello, dp_rank=ranks.dp_rank or 0)
    if not hello.pin_safety.unguarded_reason:
        hello = replace(hello, pin_safety=wire.PinSafety(None, second_pool(scheduler)))
    cache_type = type(scheduler.tree_cache).__name__
    if not hello.inert_reason and cache_type != "UnifiedRadixCache":
        reason = f"the tree cache is {cache_type}, not UnifiedRadixCache"
        hello = replace(hello, inert_reason=reason)
    if hello.inert_reason:
        return hello, is_reporter
    return replace(
        hello,
        page_size_tokens=scheduler.page_size,
        pool_tokens=scheduler.max_total_num_tokens,
        rows_total=scheduler.req_to_token_pool.size,
        undemotable_reason=hello.undemotable_reason or demotion_refusal(scheduler) or None,
    ), is_reporter


def _weight_changes() -> list[str]:
    """Returns the methods of this engine that change its weights."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    has_end = hasattr(SchedulerWeightUpdaterManager, _WEIGHT_CHANGE_END)
    return [*_WEIGHT_CHANGES, *([_WEIGHT_CHANGE_END] if has_end else [])]


def _may_change_weights(result: Any) -> bool:
    """Whether the weights may have changed. A failure may come from the flush after a change."""
    return result.success or not any(text in result.message for text in _UNCHANGED)


def _error_reason(failed_part: str, error: Exception) -> str:
    """Returns the error as a reason why the shim is inert."""
    return f"{failed_part}: {type(error).__name__}: {error}"
