//! The table of all refusal codes, from which refusals, the guide and the tests are made.
//!
//! A new code is one entry of [`codes!`] below. Tests then fail until the guide
//! `deploy/docs/sessions.md` has the code too, and until a test provokes it; they say what to do.
//! Each code has exactly one status, so that a client may decide by either. This module is pure.

#[macro_use]
mod entry;

use std::{fmt, time::Duration};

use http::StatusCode;

use self::entry::Repeat::{AfterChange, AfterCheck, AfterSeconds};
pub use self::entry::{Group, Origin, Repeat};

codes! {
    "Who may" {
        Unauthorized "unauthorized" UNAUTHORIZED Both AfterChange,
            "the request has no valid key, or two different ones; the message says which",
            "send one key as `Authorization: Bearer KEY` or `x-api-key`";
        AdminOnly "admin_only" FORBIDDEN Both AfterChange,
            "the route is for operators",
            "send a key with `admin = true`; on an admin port without keys, ask from its host";
        ForeignPage "foreign_page" FORBIDDEN Router AfterChange,
            "a page of another origin, or a request to a name that is none of the router's host, \
             reached a router without keys",
            "list the page in `listen.cors_origins`, or the name in `listen.allowed_hosts`";
        ScrapeKey "scrape_key" FORBIDDEN Router AfterChange,
            "a key for monitoring was sent to the data port",
            "send a client's key";
        AnnounceForbidden "announce_forbidden" FORBIDDEN Router AfterChange,
            "the key may not announce this agent at this address, or the router takes none",
            "name the agent's id and address in the key's right `announce`";
        EngineKey "engine_key" UNAUTHORIZED Agent AfterChange,
            "the engine wants its `--api-key`, and got none or another",
            "an operator gives the agent `BERTH_ENGINE_API_KEY`, and agent and router a \
             [token](certificates.md); or send the engine's key to a router without keys";
        NotARouter "not_a_router" UNAUTHORIZED Agent AfterChange,
            "the agent serves routers only",
            "send the request to a router; an operator gives the router a token of this agent";
    }
    "The session is in another state" {
        SessionBusy "session_busy" CONFLICT Both AfterChange,
            "a turn of this session runs",
            "send this turn, or demote the session, when the answer of that turn has ended";
        SessionLost "session_lost" CONFLICT Both AfterChange,
            "the engine restarted, or its agent can't be reached",
            "open the session again, send the full history";
        SessionReclaimed "session_reclaimed" CONFLICT Agent AfterChange,
            "the session was idle and others needed its room, or the engine's cache was flushed",
            "open it again, send the full history";
        HistoryUnknown "history_unknown" CONFLICT Agent AfterChange,
            "the end of an earlier turn was not seen, or the engine's history lacks turns that you \
             know",
            "close it, open it again, send the full history";
        KvCorrupt "kv_corrupt" CONFLICT Agent AfterChange,
            "a [page audit](page-audit.md) found pages of the session shared or overwritten",
            "open it again, send the full history";
        WeightsChanged "weights_changed" CONFLICT Agent AfterChange,
            "the engine's [weights](rl.md) changed, and the KV of the session, or in the cache, is \
             of older ones",
            "open it again, send the full history; if the message says so, flush the cache";
        AdapterChanged "adapter_changed" CONFLICT Agent AfterChange,
            "the [adapter](rl.md#adapters) of the session was loaded or unloaded, so its KV may be \
             of another one of that name",
            "open it again, send the full history";
        OtherKv "other_kv" CONFLICT Agent AfterChange,
            "the delta names another adapter, `cache_salt` or `extra_key` than the session's KV \
             has; the session is unchanged",
            "name the session's, or open another session, send the full history";
        SessionOpenOtherwise "session_open_otherwise" CONFLICT Agent AfterChange,
            "the session is open with another retention",
            "close it first, or open it as it is";
        SessionOpen "session_open" CONFLICT Agent AfterChange,
            "a delta that opens its session found a history",
            "leave the opening out, or close the session first";
        SessionExists "session_exists" BAD_REQUEST Router AfterChange,
            "`/open_session` names a session that is open; SGLang answers so too",
            "close it first, or use it";
        TurnBeforeFailed "turn_before_failed" CONFLICT Agent AfterChange,
            "this delta waited behind a turn that did not become history",
            "look up the session, send the delta again if it still fits";
        WholeHistory "whole_history" CONFLICT Agent AfterChange,
            "this full history doesn't continue a session that takes deltas, or no shim here trims \
             full histories",
            "send only what is new, or open the session again (`action: \"open\"`), or open it as \
             `tagged`";
        DeltaNeedsOpen "delta_needs_open" CONFLICT Agent AfterChange,
            "a full history began or replaced this session",
            "close it, open it, send the full history";
        DeltaNeedsPinned "delta_needs_pinned" CONFLICT Agent AfterChange,
            "a delta was sent to a session that is not pinned",
            "send the full history";
        SessionNotPinned "session_not_pinned" CONFLICT Agent AfterChange,
            "the session to demote is not pinned, so the engine may evict its KV already",
            "nothing, or close the session";
        DemotionUnavailable "demotion_unavailable" CONFLICT Both AfterChange,
            "the engine's shim doesn't demote this session, or the agent is of an earlier version; \
             the message says which",
            "close the session to free its KV";
        RetentionUnavailable "retention_unavailable" CONFLICT Both AfterChange,
            "no worker, or not this one, offers the retention",
            "use an offered retention, or start the engine with the flag that the message names";
        TurnAborted "turn_aborted" CONFLICT Both AfterChange,
            "the client [aborted](turns.md#abort-turns) the turn before its answer began",
            "send it again if you still want it";
        ResponseElsewhere "response_elsewhere" CONFLICT Router AfterChange,
            "the turn's session must stay on its worker, and the response of its \
             `previous_response_id` is on another",
            "leave one of both out, and send the full history";
        SessionClosing "session_closing" CONFLICT Both AfterSeconds(1),
            "the session closes after its running turn",
            "wait until that turn has ended; a delta needs the session to be opened again";
        SessionUnknown "session_unknown" NOT_FOUND Both AfterChange,
            "no session is open under this id",
            "open it with `POST /v1/sessions`, or send the full history without delta";
    }
    "Too much" {
        TurnTooLarge "turn_too_large" PAYLOAD_TOO_LARGE Agent AfterChange,
            "the turn may need more KV than all pinned sessions have together",
            "lower `max_new_tokens`, send less, or open the session as `tagged`";
        BatchOverShare "batch_over_share" PAYLOAD_TOO_LARGE Both AfterChange,
            "the request has more sequences (prompts times answers) than one client may have at \
             once",
            "send smaller batches; the message has the most";
        BodyTooLarge "body_too_large" PAYLOAD_TOO_LARGE Both AfterChange,
            "the body exceeds `limits.body_bytes_max`, or what a route of Berth's own takes, or \
             grows 100 times as it is decompressed",
            "send less, or raise the setting";
        // OpenAI's name, by which clients know to compact their history.
        ContextLengthExceeded "context_length_exceeded" BAD_REQUEST Router AfterChange,
            "the body has more text, or the prompt more tokens, than any worker's context holds",
            "send a shorter prompt";
        Rows "rows" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "pinned sessions hold all the request rows that they may hold, none can give way, and \
             other clients hold no more than you",
            "retry, or close sessions";
        PinTokens "pin_tokens" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "pinned sessions hold all the tokens that they may hold, none can give way, and other \
             clients hold no more than you",
            "retry, or close sessions";
        QueuePlaces "queue_places" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "`limits.turns_queued_max` turns wait in the agent, and no other client has more there \
             than you",
            "retry";
        QueueShare "queue_share" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "the queue is full, most of it with your turns, and this one made room for another \
             client's",
            "retry, with fewer turns at once";
        QueueTime "queue_time" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "the turn waited for `limits.queue_wait_ms_max`",
            "retry";
        PrefetchShare "prefetch_share" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "as many sessions of yours as may be were loaded ahead of their turns, and have not \
             returned",
            "send their turns; the next turn loads its KV itself";
        PrefetchNoRoom "prefetch_no_room" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "prompts wait at the engine, an operator holds it back, or it has no room for the \
             session's KV on the device",
            "retry, or send the turn, which loads its KV itself";
        Sessions "sessions" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "the agent has `limits.sessions_max` sessions and none can be closed for you",
            "close sessions";
        PrincipalSessions "principal_sessions" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "you have `limits.principal_sessions_max` sessions at the agent",
            "close sessions";
        Turns "turns" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "the agent has no place for another turn's end",
            "retry";
        SessionsFull "sessions_full" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "all `limits.sessions_max` sessions of the router have turns in flight",
            "retry";
        SessionsShare "sessions_share" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "you have your [share](fair-shares.md) of the router's sessions, and all have turns in \
             flight",
            "retry when a turn of yours has ended";
        KeySessions "key_sessions" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "this key has its own [limit](fair-shares.md#limits-of-a-key) of open sessions",
            "close a session, then retry";
        TurnsInFlight "turns_in_flight" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "the router has `limits.turns_in_flight_max` turns in flight",
            "retry";
        RequestsShare "requests_share" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "you have your [share](fair-shares.md) of the requests that the router serves at once",
            "retry when a request of yours has ended";
        TurnsInFlightShare "turns_in_flight_share" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "you have your [share](fair-shares.md) of the router's turns in flight",
            "retry when a turn of yours has ended";
        KeyTurnsInFlight "key_turns_in_flight" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "this key has its own [limit](fair-shares.md#limits-of-a-key) of turns at once",
            "retry when a turn of yours has ended";
        BodyBytesShare "body_bytes_share" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "you have your [share](fair-shares.md) of the router's memory for request bodies",
            "retry when a turn of yours has ended";
        RequestsPerMinute "requests_per_minute" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "this key has used its requests [per minute](fair-shares.md#limits-of-a-key)",
            "wait as long as `Retry-After` says";
        TokensPerMinute "tokens_per_minute" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "this key has used its tokens [per minute](fair-shares.md#limits-of-a-key)",
            "wait as long as `Retry-After` says";
        PriorityShed "priority_shed" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "the router is too full for this turn's [priority class](fair-shares.md#priority)",
            "retry, or ask for a key of a higher class";
        AnnounceLimit "announce_limit" TOO_MANY_REQUESTS Router AfterSeconds(5),
            "this key, or all, have [announced](discovery.md#announcements) as many agents as they \
             may; the message says which",
            "withdraw agents that are gone, or raise `discovery.announced_per_key_max`";
        WorkerFull "worker_full" TOO_MANY_REQUESTS Router AfterSeconds(1),
            "an agent refused an open for want of room and gave no code",
            "retry";
    }
    "Not available now" {
        EngineDown "engine_down" SERVICE_UNAVAILABLE Agent AfterSeconds(2),
            "the engine doesn't answer or is unhealthy",
            "retry";
        EngineSilent "engine_silent" SERVICE_UNAVAILABLE Agent AfterSeconds(2),
            "the engine's process runs but says nothing; the turn was not sent",
            "retry";
        EngineHeld "engine_held" SERVICE_UNAVAILABLE Agent AfterSeconds(2),
            "an operator has paused the engine, released its memory or is changing its \
             [weights](rl.md), for longer than `limits.queue_wait_ms_max`",
            "retry";
        WeightsUnavailable "weights_unavailable" SERVICE_UNAVAILABLE Router AfterSeconds(1),
            "no worker that can take the turn has the [weights](rl.md) that `x-berth-weights` asks \
             for",
            "retry, or ask for weights that `GET /v1/workers` lists";
        EngineBusy "engine_busy" SERVICE_UNAVAILABLE Agent AfterSeconds(2),
            "turns run in the engine, so its memory can't be [released](rl.md) now; or it loads KV \
             ahead of one, so it can't be paused or changed for three seconds",
            "pause it first, or wait until its turns have ended";
        EngineLost "engine_lost" SERVICE_UNAVAILABLE Agent AfterSeconds(2),
            "the engine went away while the turn waited; the turn did not run",
            "retry";
        EngineBrokeOff "engine_broke_off" BAD_GATEWAY Agent AfterCheck,
            "the engine closed the connection before its answer began; the turn may have run",
            "look up the session before you send it again";
        OpenFailed "open_failed" SERVICE_UNAVAILABLE Agent AfterSeconds(2),
            "the engine did not open the session",
            "retry";
        JournalFailed "journal_failed" SERVICE_UNAVAILABLE Agent AfterSeconds(2),
            "the agent can't write its journal of open sessions, for example because its disk is \
             full, and pins none meanwhile",
            "send the turn without a pin; an operator looks at [files](operations.md#files)";
        Stopping "stopping" SERVICE_UNAVAILABLE Both AfterSeconds(2),
            "the agent shuts down; on a health route, the router",
            "retry";
        NoWorker "no_worker" SERVICE_UNAVAILABLE Router AfterSeconds(1),
            "no worker can take turns now",
            "retry; an operator looks at `GET /v1/workers`";
        EnginesDisaggregated "engines_disaggregated" SERVICE_UNAVAILABLE Router AfterChange,
            "every engine runs in prefill or decode mode, and no two of them fit",
            "start engines that fit, or one without `--disaggregation-mode`";
        NoPair "no_pair" SERVICE_UNAVAILABLE Router AfterSeconds(1),
            "no prefill and decode engine that fit can take turns now",
            "retry; an operator looks at `GET /v1/workers`";
        HandOffLate "hand_off_late" GATEWAY_TIMEOUT Router AfterCheck,
            "a prefill and a decode engine did not hand over the turn's KV in `bootstrap_ms_max`",
            "retry; an operator checks that the decode engine reaches the bootstrap port";
        WorkerUnreachable "worker_unreachable" SERVICE_UNAVAILABLE Router AfterSeconds(1),
            "the agent can't be reached, or doesn't recognize the router",
            "retry";
        WorkerSilent "worker_silent" SERVICE_UNAVAILABLE Router AfterCheck,
            "the agent has [stopped answering](operations.md#slow-and-silent-peers), and the turn \
             is given up; it may have run",
            "look up the session before you send it again";
        AuthUnavailable "auth_unavailable" SERVICE_UNAVAILABLE Router AfterSeconds(1),
            "tokens can't be checked before the issuer's keys were read",
            "retry";
        ConnectionsFull "connections_full" SERVICE_UNAVAILABLE Both AfterSeconds(1),
            "the server, or your address, has as many connections as it may have, and all work",
            "close some, or retry";
        RouterDescriptors "router_descriptors" SERVICE_UNAVAILABLE Router AfterSeconds(1),
            "the router has no file descriptor left for a connection; nothing was sent",
            "retry";
        AgentDescriptors "agent_descriptors" SERVICE_UNAVAILABLE Agent AfterSeconds(2),
            "the agent has no file descriptor left for a connection; nothing was sent",
            "retry";
        BodyBytesInFlight "body_bytes_in_flight" SERVICE_UNAVAILABLE Both AfterSeconds(1),
            "request bodies fill `limits.body_bytes_in_flight_max`",
            "retry";
        WorkerBrokeOff "worker_broke_off" BAD_GATEWAY Router AfterCheck,
            "the agent closed the connection before the answer began; the turn may have run",
            "look up the session before you send it again";
        WorkerFailed "worker_failed" BAD_GATEWAY Router AfterCheck,
            "an agent failed at an open, a close or a demotion",
            "look up the session; an operator looks at the router's log";
        TurnTimeout "turn_timeout" GATEWAY_TIMEOUT Both AfterCheck,
            "the turn took longer than `limits.turn_ms_max` and was aborted",
            "send a shorter prompt, or raise the limit";
        WorkerTimeout "worker_timeout" GATEWAY_TIMEOUT Router AfterCheck,
            "an agent did not answer an open, a close or a demotion in time",
            "look up the session, then repeat it";
        Internal "internal" INTERNAL_SERVER_ERROR Router AfterCheck,
            "the router failed",
            "look up the session; an operator looks at the router's log";
    }
    "Wrong request" {
        InvalidPath "invalid_path" BAD_REQUEST Router AfterChange,
            "the path has an escape that isn't UTF-8, such as `%ff`",
            "escape the id's UTF-8 bytes";
        InvalidJson "invalid_json" BAD_REQUEST Both AfterChange,
            "the body is not one JSON object; the message says where and why",
            "mend the body";
        InvalidSessionId "invalid_session_id" BAD_REQUEST Router AfterChange,
            "the id has not 1 to 256 bytes",
            "use another id";
        InvalidField "invalid_field" BAD_REQUEST Both AfterChange,
            "a header or member has a wrong type or value",
            "mend it; the message names it";
        NotIsolated "not_isolated" BAD_REQUEST Router AfterChange,
            "the fleet keeps [caches](authentication.md#caches-of-several-clients) of clients \
             apart, and the engine can't on this route",
            "use `/v1/chat/completions`";
        DeltaWithoutSession "delta_without_session" BAD_REQUEST Router AfterChange,
            "`x-berth-delta` is set and no session is named",
            "add `x-berth-session-id`";
        SessionParams "session_params" BAD_REQUEST Agent AfterChange,
            "`session_params` may hold `id` (and `rid`) only: sessions only append",
            "leave the rest out";
        BatchInSession "batch_in_session" BAD_REQUEST Agent AfterChange,
            "a turn of a session has one prompt and one answer",
            "send `n` = 1 and no list of prompts";
        PairUnsupported "pair_unsupported" BAD_REQUEST Router AfterChange,
            "every engine runs in prefill or decode mode, and a pair can't run this request: it \
             has several prompts or answers, or echoes the prompt with log probabilities",
            "send one prompt with `n` = 1, without `echo`; or add an engine for whole turns";
        BackgroundUnsupported "background_unsupported" BAD_REQUEST Agent AfterChange,
            "a turn in the [background](turns.md#stored-responses) would run on after its answer, \
             without its place in the engine",
            "leave `background` out, and read the answer";
        ThreadUnsupported "thread_unsupported_request" BAD_REQUEST Agent AfterChange,
            "the engine knows no message threads, and would answer to the new message alone",
            "leave `thread` out, and send all messages; Anthropic's clients do so by themselves";
        ThreadNotFound "thread_not_found" NOT_FOUND Agent AfterChange,
            "the turn continues a message thread, and there are none",
            "leave `thread` out, and send all messages; Anthropic's clients do so by themselves";
        ConversationUnsupported "conversation_unsupported" BAD_REQUEST Agent AfterChange,
            "the engine keeps no conversations and stored prompts, and would answer without them",
            "leave the member out that the message names, and send all of the input";
        TokenIds "token_ids" BAD_REQUEST Agent AfterChange,
            "token ids must be integers; anything else would crash the engine",
            "mend the prompt";
        TokenOutOfVocabulary "token_out_of_vocabulary" BAD_REQUEST Agent AfterChange,
            "a token id is outside the vocabulary, which would crash the engine",
            "mend the prompt";
        NoRank "no_rank" BAD_REQUEST Agent AfterChange,
            "there is no such DP rank",
            "use a rank that `GET /v1/workers` lists";
        Claim "claim" BAD_REQUEST Agent AfterChange,
            "a header that only a router may send is invalid",
            "send turns to a router";
        BodyIncomplete "body_incomplete" BAD_REQUEST Both AfterChange,
            "the body ended early",
            "send it whole";
        BodyLate "body_late" REQUEST_TIMEOUT Both AfterSeconds(1),
            "the body did not arrive within 60 s, or within `limits.turn_ms_max` at the router",
            "send it faster";
        ContentEncoding "content_encoding" UNSUPPORTED_MEDIA_TYPE Agent AfterChange,
            "compressed bodies are not taken",
            "send the body as it is";
        ModelNotFound "model_not_found" NOT_FOUND Router AfterChange,
            "no worker serves this model",
            "use a served model; the message lists them";
        PlacementUnknown "placement_unknown" NOT_FOUND Router AfterChange,
            "the router keeps no placement of this turn",
            "ask soon after the turn, with the id of its `x-berth-turn`";
        ResponseUnknown "response_unknown" NOT_FOUND Router AfterChange,
            "no worker has a [response](turns.md#stored-responses) of yours under this id",
            "use the id of an answer to your own key";
        PrefetchUnavailable "prefetch_unavailable" NOT_IMPLEMENTED Both AfterChange,
            "the session's engine has no [host memory for KV](sizing.md#host-memory), or can't \
             load from it ahead of a turn, or the agent is of an earlier version; the message says \
             which",
            "send the turn";
        EngineLacks "engine_lacks" NOT_IMPLEMENTED Router AfterChange,
            "SGLang has no such function; the message names it",
            "do without it";
        WorkerUnknown "worker_unknown" NOT_FOUND Router AfterChange,
            "a [control call](rl.md) names a worker that doesn't exist",
            "use a worker that `GET /v1/workers` lists";
        RouteUnknown "route_unknown" NOT_FOUND Both AfterChange,
            "there is no such route",
            "mend the path";
        MethodNotAllowed "method_not_allowed" METHOD_NOT_ALLOWED Both AfterChange,
            "the route doesn't have this method",
            "use one that the header `Allow` lists";
    }
    "For routers only" {
        StagedPrefill "staged_prefill" BAD_REQUEST Agent AfterChange,
            "a request for [staged prefill](staged-prefill.md) is invalid",
            "the router sends the turn as usual";
        StagedPrefillFull "staged_prefill_full" TOO_MANY_REQUESTS Agent AfterSeconds(1),
            "too many prompts wait for staged prefill",
            "the router sends the turn as usual";
        StagedPrefillLate "staged_prefill_late" SERVICE_UNAVAILABLE Agent AfterChange,
            "a stage took over 10 s",
            "the router sends the turn as usual";
        StagedPrefillFailed "staged_prefill_failed" BAD_GATEWAY Agent AfterChange,
            "the engine failed at a stage",
            "the router sends the turn as usual";
    }
}

impl Code {
    /// Returns all codes, in the order of the guide.
    pub fn all() -> impl Iterator<Item = Self> {
        GROUPS.iter().flat_map(|group| group.codes.iter().copied())
    }

    /// Returns the code that an agent sent by this name. `None` if agents don't have such a code;
    /// an agent of another version may send one.
    #[must_use]
    pub fn of_agent(name: &[u8]) -> Option<Self> {
        Self::all()
            .filter(|code| code.origin() != Origin::Router)
            .find(|code| code.as_str().as_bytes() == name)
    }

    /// Returns the time after which the same request may succeed, for the header `Retry-After`.
    #[must_use]
    pub const fn retry_after(self) -> Option<Duration> {
        match self.repeat() {
            Repeat::AfterSeconds(seconds) => Some(Duration::from_secs(seconds)),
            Repeat::AfterChange | Repeat::AfterCheck => None,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_code_has_a_name_of_its_own() {
        let names: BTreeSet<&str> = Code::all().map(Code::as_str).collect();
        assert_eq!(names.len(), Code::all().count());
        let is_plain = |name: &str| name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'_'));
        assert!(names.into_iter().all(is_plain));
    }

    #[test]
    fn a_router_recognizes_that_an_agent_refuses_it() {
        assert_eq!(Code::NotARouter.as_str(), contract::claim::NOT_A_ROUTER);
    }

    #[test]
    fn a_client_may_repeat_what_its_status_says() {
        for code in Code::all() {
            let waits = matches!(code.repeat(), Repeat::AfterSeconds(_));
            match code.status().as_u16() {
                429 => assert!(waits, "{code}: 429 says that room comes back"),
                500 | 502 | 504 => assert!(!waits, "{code}: it may have run"),
                400 | 401 | 403 | 404 | 405 | 413 | 415 | 431 | 501 => assert!(!waits, "{code}"),
                408 | 409 | 503 => {}
                other => panic!("{code}: say here what {other} means for a client"),
            }
        }
    }

    #[test]
    fn a_router_knows_the_codes_of_agents_and_no_others() {
        assert_eq!(Code::of_agent(b"rows"), Some(Code::Rows));
        assert_eq!(Code::of_agent(b"session_lost"), Some(Code::SessionLost));
        assert_eq!(Code::of_agent(b"internal"), None, "only a router fails so");
        assert_eq!(Code::of_agent(b"of_a_later_version"), None);
    }
}
