"""Lists the seams: every part of SGLang that the shim hooks, calls or reads. Pure data.

SGLang promises nothing about its inner parts, so a version may lack a seam or have changed it. Then
the *functions* of the shim that need the seam are off, and the others work:

- `reports`: the state of the pool, the sessions and the weights. The scheduler's other functions
  need it too.
- `demotion`: moves an idle session's KV into the radix tree.
- `audit`: checks who holds each page.
- `republishing`: publishes the radix tree again as KV events.
- `host`: counts KV that the engine has copied to the host's memory, and times its loads.
- `prefetching`: loads a session's KV from there before its next turn.
- `guarding`: keeps turns of pinned sessions from the engine's storage, which would end the engine,
  and says whether the model has a second pool.
- `trimming`: removes from a prompt what its session holds, in another process than the others.

A test compares this list with the shim's imports of SGLang, and with the hooks that it registers.
Parts whose absence the shim's code itself expects (`getattr` with a default) are not listed.
"""

from enum import Enum
from typing import NamedTuple

FUNCTIONS = (
    "reports", "demotion", "audit", "republishing", "host", "prefetching", "guarding", "trimming",
)


class Kind(Enum):
    """How the shim uses a seam, and so the meaning of `Seam.needs`."""

    # A function that the shim wraps. `needs` are the first parameters in order.
    HOOK = "hook"
    # A function that the shim calls. `needs` are its first parameters in order, then those passed
    # by name, with `=` (`a=|b=`: either). All its other parameters must have defaults.
    CALL = "call"
    # A class whose instances the shim reads, or an enumeration. `needs` are the names of fields,
    # properties and methods (`a|b`: either).
    FIELDS = "fields"


class Seam(NamedTuple):
    """A part of SGLang that the shim needs."""

    kind: Kind
    # A module, a colon, and the name in it. `FIELDS` may have several, separated by spaces, if the
    # engine builds the object from several classes.
    path: str
    needs: tuple[str, ...]
    # They are off without the seam.
    functions: tuple[str, ...]

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The modules and the names in them."""
        return [(module, name) for module, _, name in
                (path.partition(":") for path in self.path.split())]


_S = "sglang.srt."
_PLUGINS = _S + "plugins.hook_registry:"
_CONTEXT = _S + "runtime_context:"
_ARGUMENTS = _S + "arg_groups.fields."
_SCHEDULER = _S + "managers.scheduler:Scheduler"
_BATCHES = _S + "managers.schedule_batch:"
_PARTS = _S + "managers.scheduler_components."
_SESSIONS = _S + "session.session_controller:"
_STREAMING = _S + "session.streaming_session:"
_CACHE = _S + "mem_cache."
_TREE = _CACHE + "unified_radix_cache:UnifiedRadixCache"
_CORE = _CACHE + "unified_cache.unified_tree_core:"
_MESSAGES = _S + "managers.io_struct:"
_COPIES = _S + "managers.cache_controller:"
_MANAGER = _S + "managers.tokenizer_manager:TokenizerManager"
_CONTROL = _S + "managers.tokenizer_control_mixin:TokenizerControlMixin"
_WEIGHTS = _PARTS + "weight_updater:SchedulerWeightUpdaterManager"
_PARALLEL = f"{_CONTEXT}ParallelContext {_ARGUMENTS}parallel:Parallel"

# A session's or a request's lock on the radix tree: `lock`, or in older versions three fields.
_LOCK = ("lock|last_node", "lock|lock_receipt", "lock|swa_prefix_lock_released")

_ALL = ("reports", "trimming")
_REPORTS = ("reports",)
_DEMOTION = ("demotion",)
_AUDIT = ("audit",)
_LISTS_REQUESTS = ("demotion", "audit")
_REPUBLISHING = ("republishing",)
_HOST = ("host",)
_PREFETCHING = ("prefetching",)
_LOADS = ("host", "prefetching")
_GUARDING = ("guarding",)
_TRIMMING = ("trimming",)


def _hook(functions: tuple[str, ...], path: str, *needs: str) -> Seam:
    return Seam(Kind.HOOK, path, ("self", *needs), functions)


def _call(functions: tuple[str, ...], path: str, *needs: str) -> Seam:
    return Seam(Kind.CALL, path, needs, functions)


def _fields(functions: tuple[str, ...], path: str, *needs: str) -> Seam:
    return Seam(Kind.FIELDS, path, needs, functions)


SEAMS = (
    # How a plugin hooks a function.
    _call(_ALL, _PLUGINS + "HookRegistry.register", "target", "hook", "hook_type"),
    _fields(_ALL, _PLUGINS + "HookType", "AFTER", "AROUND", "BEFORE"),
    # The scheduler's steps.
    _hook(_REPORTS, _SCHEDULER + ".__init__"),
    _hook(_REPORTS, _SCHEDULER + ".process_batch_result", "batch"),
    _hook(_REPORTS, _SCHEDULER + ".process_input_requests"),
    _hook(_REPORTS, _SCHEDULER + ".publish_load_snapshot"),
    _call(_REPORTS, _SCHEDULER + ".is_fully_idle", "self"),
    _fields(
        _REPORTS, _SCHEDULER, "server_args", "tree_cache", "page_size", "max_total_num_tokens",
        "req_to_token_pool", "token_to_kv_pool_allocator", "pool_stats_observer", "running_batch",
        "waiting_queue", "session_controller", "idle_sleeper", "kv_events_publisher",
    ),
    _fields(_REPORTS, _BATCHES + "ScheduleBatch", "reqs", "forward_mode"),
    _call(_REPORTS, _S + "model_executor.forward_batch_info:ForwardMode.is_extend", "self"),
    # The ranks.
    _call(_ALL, _CONTEXT + "get_parallel"),
    _fields(_REPORTS, _PARALLEL, "pp_rank", "attn_tp_rank", "attn_cp_rank"),
    # SGLang 0.5.20 has the DP rank in `Scheduler.ps`.
    _fields(_REPORTS, f"{_PARALLEL} {_SCHEDULER}", "dp_rank|ps"),
    # Sessions and their turns.
    _hook(_REPORTS, _SESSIONS + "SessionController.open", "recv_req"),
    _hook(_REPORTS, _SESSIONS + "SessionController._close", "session_id"),
    _hook(_REPORTS, _SESSIONS + "Session.create_req", "req"),
    _hook(_REPORTS, _SESSIONS + "Session.finish_req", "req"),
    _hook(_REPORTS, _SESSIONS + "Session.abort_req"),
    _hook(_REPORTS, _STREAMING + "StreamingSession.try_cache_finished_req", "req"),
    _fields(_REPORTS, _SESSIONS + "SessionController", "sessions"),
    _fields(
        _REPORTS, _SESSIONS + "Session", "session_id", "streaming", "req_nodes",
        "committed_origin_len", "close_on_finish", "_inflight",
    ),
    _fields(_REPORTS, _SESSIONS + "SessionReqNode", "req"),
    _fields(_REPORTS, _STREAMING + "StreamingSession", "slots"),
    _fields(_REPORTS, _STREAMING + "SessionSlot", "kv"),
    _fields(
        _REPORTS, _BATCHES + "ReqKvInfo", "holds_kv", "kv_allocated_len", "kv_committed_len",
        "cache_protected_len",
    ),
    _fields(
        _REPORTS, _BATCHES + "Req", "rid", "session", "origin_input_ids", "output_ids",
        "sampling_params",
    ),
    _call(_REPORTS, _BATCHES + "Req.finished", "self"),
    _fields(_REPORTS, _S + "sampling.sampling_params:SamplingParams", "max_new_tokens"),
    _fields(_ALL, _MESSAGES + "OpenSessionReqInput", "session_id", "streaming"),
    _fields(_REPORTS, _MESSAGES + "OpenSessionReqOutput", "success"),
    # The pool.
    _hook(_REPORTS, _TREE + ".reset"),
    _fields(_REPORTS, _TREE, "page_size", "session", "protected_size", "full_protected_size"),
    _call(
        _REPORTS, _PARTS + "pool_stats_observer:SchedulerPoolStatsObserver.get_pool_stats", "self"
    ),
    _fields(
        _REPORTS, _PARTS + "pool_stats_observer:PoolStats", "full_available_size",
        "full_evictable_size", "is_hybrid_swa", "is_hybrid_ssm",
    ),
    _call(_REPORTS, _CACHE + "memory_pool:ReqToTokenPool.available_size", "self"),
    _fields(_REPORTS, _CACHE + "memory_pool:ReqToTokenPool", "size", "req_to_token"),
    # Changes of the weights. A report that doesn't see them would call old KV good.
    _hook(_REPORTS, _WEIGHTS + ".update_weights_from_disk"),
    _hook(_REPORTS, _WEIGHTS + ".update_weights_from_distributed"),
    _hook(_REPORTS, _WEIGHTS + ".update_weights_from_tensor"),
    _hook(_REPORTS, _WEIGHTS + ".update_weights_from_ipc"),
    _fields(_REPORTS, _MESSAGES + "UpdateWeightFromDiskReqOutput", "success", "message"),
    # The requests that wait or run.
    _call(_LISTS_REQUESTS, _SCHEDULER + ".collect_inflight_reqs", "self"),
    _fields(_LISTS_REQUESTS, _SCHEDULER, "grammar_manager"),
    _fields((*_LISTS_REQUESTS, *_PREFETCHING), _SCHEDULER, "chunked_req"),
    _fields(
        _LISTS_REQUESTS, _S + "constrained.grammar_manager:GrammarManager", "grammar_queue"
    ),
    _fields(_LISTS_REQUESTS, _BATCHES + "Req", "kv"),
    # They say which engines can't demote, audit or prefetch.
    _fields(
        (*_LISTS_REQUESTS, *_PREFETCHING, *_GUARDING), _SCHEDULER, "is_hybrid_swa",
        "is_hybrid_ssm",
    ),
    _fields((*_LISTS_REQUESTS, *_PREFETCHING), _SCHEDULER, "disaggregation_mode"),
    _fields(_LISTS_REQUESTS, _SCHEDULER, "enable_hisparse"),
    # Demotion: the engine's own way of moving a request's KV into the tree.
    _call(
        _DEMOTION, _CACHE + "common:release_kv_cache", "req", "tree_cache",
        "checkpoint=|is_insert=",
    ),
    _fields(_DEMOTION, _STREAMING + "SessionSlot", *_LOCK),
    _fields(_DEMOTION, _BATCHES + "Req", *_LOCK, "multimodal_inputs", "skip_radix_cache_insert"),
    _fields(_DEMOTION, _TREE, "disable", "write_through_threshold"),
    _fields((*_DEMOTION, *_PREFETCHING), _PARALLEL, "attn_tp_size", "attn_cp_size", "pp_size"),
    _fields(_DEMOTION, _ARGUMENTS + "serving:Serving", "strip_thinking_cache"),
    _call(_DEMOTION, _CONTEXT + "get_spec"),
    _fields(_DEMOTION, _ARGUMENTS + "spec:Spec", "speculative_algorithm"),
    # The page audit.
    _fields(_AUDIT, _SCHEDULER, "enable_pdmux", "dllm_config", "draft_worker"),
    _fields(_AUDIT, _BATCHES + "ReqKvInfo", "req_pool_idx"),
    _fields(_AUDIT, _BATCHES + "Req", "beam_group"),
    _fields(_AUDIT, _CACHE + "memory_pool:ReqToTokenPool", "req_generation"),
    _call(_AUDIT, _TREE + ".all_values_flatten", "self"),
    _call(_AUDIT, _CACHE + "allocator.base:BaseTokenToKVPoolAllocator.get_kvcache", "self"),
    _call(_AUDIT, _CACHE + "allocator.base:BaseTokenToKVPoolAllocator.get_all_free_pages", "self"),
    _fields(_AUDIT, _CACHE + "allocator.base:BaseTokenToKVPoolAllocator", "page_size", "size"),
    # Publishing the tree again.
    _call(
        _REPUBLISHING,
        _PARTS + "kv_events_publisher:SchedulerKvEventsPublisher.publish_kv_events", "self",
    ),
    _fields(
        _REPUBLISHING, _PARTS + "kv_events_publisher:SchedulerKvEventsPublisher",
        "enable_kv_cache_events",
    ),
    _fields((*_REPUBLISHING, *_PREFETCHING), _TREE, "tree_core"),
    _fields(_REPUBLISHING, _CORE + "UnifiedTreeCore", "kv_events", "root_node", "page_size"),
    _fields(
        (*_REPUBLISHING, *_PREFETCHING), _CORE + "UnifiedTreeNode", "id", "parent", "key",
        "evicted",
    ),
    _fields(
        _REPUBLISHING, _CORE + "UnifiedTreeNode", "children", "hash_value", "event_hash_value",
        "backuped",
    ),
    _call(_REPUBLISHING, _CACHE + "radix_cache:RadixKey.child_key", "self", "page_size"),
    _call(_REPUBLISHING, _CACHE + "events:KVCacheEventRecorder.record_all_cleared", "self"),
    _call(
        _REPUBLISHING, _CACHE + "events:KVCacheEventRecorder.record_store", "self", "node",
        "medium=",
    ),
    _fields(_REPUBLISHING, _S + "disaggregation.kv_events:StorageMedium", "GPU", "CPU"),
    # The host tier.
    _hook(_LOADS, _TREE + ".ready_to_load_host_cache"),
    _fields(_LOADS, _TREE, "cache_controller", "host_memory_mode", "device"),
    _fields(_HOST, _TREE, "is_write_back", "evictable_size"),
    _fields(_LOADS, _COPIES + "HiCacheController", "load_queue", "ack_load_queue"),
    _fields(
        _HOST, _COPIES + "HiCacheController", "mem_pool_host", "write_queue", "ack_write_queue"
    ),
    _fields(_HOST, _COPIES + "CacheOperation", "device_indices"),
    _fields(_LOADS, _COPIES + "HiCacheAck", "finish_event"),
    _fields(_HOST, _COPIES + "HiCacheAck", "start_event", "num_tokens", "timing_enabled"),
    _fields(_HOST, _CACHE + "pool_host.group:HostPoolGroup", "logical_size", "available_size"),
    # Prefetching: the engine's own way of loading what a turn needs.
    _call(_PREFETCHING, _TREE + ".load_back", "self", "node_id", "mem_quota="),
    _call(_PREFETCHING, _TREE + ".has_free_load_back_slot", "self"),
    _call(_PREFETCHING, _TREE + ".match_prefix", "self", "params"),
    _fields(_PREFETCHING, _TREE, "components", "ongoing_load_back", "load_back_threshold"),
    _call(_PREFETCHING, _CACHE + "radix_cache:RadixKey.raw_token_ids", "self"),
    _fields(_PREFETCHING, _CACHE + "radix_cache:RadixKey", "extra_key", "cache_salt"),
    _call(_PREFETCHING, _CORE + "UnifiedTreeCore.node_by_id", "self", "node_id"),
    _fields(_PREFETCHING, _CORE + "UnifiedTreeNode", "last_access_time"),
    _fields(
        _PREFETCHING, _CACHE + "unified_cache.components.base:TreeComponent", "_session_leaves"
    ),
    _call(_PREFETCHING, _CACHE + "base_prefix_cache:MatchPrefixParams", "key="),
    _call(
        _PREFETCHING, _CACHE + "radix_cache:RadixKey.__init__", "self", "token_ids", "extra_key",
        "cache_salt=",
    ),
    _fields(_PREFETCHING, _CACHE + "base_prefix_cache:MatchResult", "best_match_node"),
    _fields(_PREFETCHING, _BATCHES + "Req", "extra_key", "cache_salt"),
    _fields(_PREFETCHING, _SCHEDULER, "forward_stream", "device_module", "_engine_paused"),
    # Guarding.
    _hook(_GUARDING, _SCHEDULER + "._prefetch_kvcache", "req"),
    _fields(_GUARDING, _BATCHES + "Req", "to_finish"),
    # Trimming.
    _hook(_TRIMMING, _MANAGER + ".__init__"),
    _hook(_TRIMMING, _MANAGER + ".generate_request", "obj", "request"),
    _hook(_TRIMMING, _MANAGER + "._handle_batch_request", "obj"),
    _hook(_TRIMMING, _MANAGER + "._tokenize_one_request", "obj"),
    _hook(_TRIMMING, _MANAGER + "._wait_one_response", "obj"),
    _hook(_TRIMMING, _CONTROL + ".open_session", "obj"),
    _hook(_TRIMMING, _CONTROL + ".close_session", "obj"),
    _hook(
        _TRIMMING, _S + "managers.multi_tokenizer_mixin:MultiTokenizerRouter.__init__"
    ),
    _fields(_TRIMMING, _MESSAGES + "CloseSessionReqInput", "session_id"),
    _fields(_TRIMMING, _MANAGER, "tokenizer", "server_args", "rid_to_state"),
    _fields(
        _TRIMMING, _S + "managers.tokenizer_manager:ReqState", "obj", "finished", "out_list",
        "dispatched", "output_ids", "prompt_token_ids",
    ),
    _call(_TRIMMING, _MESSAGES + "SessionParams", "id="),
    _fields(
        _TRIMMING, _MESSAGES + "GenerateReqInput", "rid", "session_params",
        "return_prompt_token_ids",
    ),
    _fields(
        _TRIMMING, _MESSAGES + "TokenizedGenerateReqInput", "input_ids", "mm_inputs",
        "session_params", "session_id", "sampling_params", "return_logprob", "logprob_start_len",
        "lora_id", "extra_key", "cache_salt",
    ),
    _call(("demotion", "trimming"), _CONTEXT + "get_serving"),
    _fields(
        _TRIMMING, _ARGUMENTS + "serving:Serving", "enable_streaming_session",
        "tokenizer_worker_num", "allow_auto_truncate",
    ),
    _call(_TRIMMING, _CONTEXT + "get_disagg"),
    _fields(_TRIMMING, _ARGUMENTS + "disagg:Disagg", "disaggregation_mode"),
    _fields(_TRIMMING, _PARALLEL, "num_dp_ranks|dp_size"),
)
