"""Lists all requests of a scheduler of SGLang that wait or run, for the page audit and demotion."""

from typing import Any


def live_requests(scheduler: Any) -> list[Any]:
    """Returns the requests that wait, run, or have results to come, each at least once."""
    requests = [*scheduler.waiting_queue, *scheduler.collect_inflight_reqs()]
    requests += scheduler.grammar_manager.grammar_queue
    if scheduler.chunked_req is not None:
        requests.append(scheduler.chunked_req)
    for batch, _result in getattr(scheduler, "result_queue", ()):
        requests += batch.reqs
    return requests
