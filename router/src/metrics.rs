//! Counts what the router does, for its metrics: placements, turns, refusals, retries and bytes.
//!
//! `turn` and `http` call a method here for each event, such as the end of a turn (a request and
//! its answer). The admin port serves the counts to Prometheus, with the prefix `berth_router_`.
//! Metrics of the fleet and of the index of resident blocks are not here. The collectors in `fleet`
//! and `residency` compute those at each scrape. The child `turns` has what turns use and take.

mod turns;

use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use service::{metrics::By, refusal::Code};

pub(crate) use self::turns::{TurnMetrics, TurnTokenCounts};

/// How a placed turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TurnOutcome {
    /// The answer's status was 2xx, and its body ran to its end.
    Ok,
    /// The engine or the agent answered with an error, which the router passed on.
    ErrorAnswer,
    /// The worker gave no answer, or the answer broke off.
    WorkerFailed,
    /// This router had no file descriptor for a connection to the worker.
    NotSent,
    /// The turn's time limit was reached.
    TimedOut,
    /// The client left before the answer's end.
    ClientGone,
}

impl TurnOutcome {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ErrorAnswer => "error_answer",
            Self::WorkerFailed => "worker_failed",
            Self::NotSent => "not_sent",
            Self::TimedOut => "timed_out",
            Self::ClientGone => "client_gone",
        }
    }
}

/// How computing a long prompt before its turn (staged prefill) ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StagedPrefillEnd {
    /// The prompt is computed, except for at most one stage.
    Computed,
    /// More than one stage is not computed, or was evicted again.
    Partly,
    /// The computation took too long.
    Late,
    /// The agent refused, or its answer doesn't say how much of the prompt is left.
    Refused,
    /// The agent gave no answer.
    Failed,
    /// The prompt's token ids are unknown.
    NoIds,
}

/// How a hand-off of KV from a prefill to a decode engine ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandOffEnd {
    /// The decode engine has begun its answer.
    Done,
    PrefillFailed,
    DecodeFailed,
    /// Neither has answered in time.
    Late,
}

impl HandOffEnd {
    fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::PrefillFailed => "prefill_failed",
            Self::DecodeFailed => "decode_failed",
            Self::Late => "late",
        }
    }
}

impl StagedPrefillEnd {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Computed => "computed",
            Self::Partly => "partly",
            Self::Late => "late",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::NoIds => "no_ids",
        }
    }
}

service::metrics! {
    pub(crate) struct Metrics {
        /// Placements by reason; retried turns and opened sessions count, too
        placements: By<Counter> = "placements", By::label("reason");
        /// Placed turns that have ended, by outcome
        turns: By<Counter> = "turns", By::label("outcome");
        /// Refusals by the router, by code
        refusals: By<Counter> = "refusals", By::label("code");
        /// Turns and opens sent to a second worker, by reason
        retries: By<Counter> = "retries", By::label("reason");
        /// Long prompts computed in stages before their turns (staged prefill), by outcome
        staged_prefills: By<Counter> = "staged_prefills", By::label("outcome");
        /// Turns on a pair of a prefill and a decode engine, by the end of their hand-off
        hand_offs: By<Counter> = "hand_offs", By::label("outcome");
        /// Volatile preambles removed from request bodies, by the client that writes them
        preambles: By<Counter> = "preambles_removed", By::label("client");
        /// Prompts of text placed without all of their tokens, by reason
        untokenized_prompts: By<Counter> = "untokenized_prompts", By::label("reason");
        /// Turns run without the session at which their client hinted, by reason
        sessions_left_out: By<Counter> = "sessions_left_out", By::label("reason");
        /// Turns not sent to a second worker, as their bodies had given way to others
        pub(crate) bodies_gone: Counter = "bodies_gone";
        /// Placed turns that have not ended
        pub(crate) turns_in_flight: Gauge = "streams_in_flight";
        /// Bytes of request bodies received from clients
        pub(crate) request_bytes: Counter = "request" in "bytes";
        /// Bytes of answer bodies received from workers
        pub(crate) response_bytes: Counter = "response" in "bytes";
        ..pub(crate) turn: TurnMetrics;
    }
}

impl Metrics {
    /// Counts a placement.
    pub(crate) fn count_placement(&self, reason: &'static str) {
        self.placements.get(reason).inc();
    }

    /// Counts the end of a placed turn.
    pub(crate) fn count_turn_end(&self, outcome: TurnOutcome) {
        self.turns.get(outcome.as_str()).inc();
    }

    /// Counts a refusal by the router.
    pub(crate) fn count_refusal(&self, code: Code) {
        self.refusals.get(code.as_str()).inc();
    }

    /// Counts a turn, or the opening of a session, that is sent to a second worker.
    pub(crate) fn count_retry(&self, reason: &'static str) {
        self.retries.get(reason).inc();
    }

    pub(crate) fn count_hand_off(&self, end: HandOffEnd) {
        self.hand_offs.get(end.as_str()).inc();
    }

    /// Counts the end of a staged prefill.
    pub(crate) fn count_staged_prefill_end(&self, end: StagedPrefillEnd) {
        self.staged_prefills.get(end.as_str()).inc();
    }

    /// Counts a prompt of text that is placed without all of its tokens.
    pub(crate) fn count_untokenized_prompt(&self, reason: &'static str) {
        self.untokenized_prompts.get(reason).inc();
    }

    /// Counts a turn that runs without the session at which its client only hinted.
    pub(crate) fn count_session_left_out(&self, reason: &'static str) {
        self.sessions_left_out.get(reason).inc();
    }

    /// Counts a preamble removed from a request of `client`. Returns how many preambles of this
    /// client were removed before.
    pub(crate) fn count_removed_preamble(&self, client: &'static str) -> u64 {
        self.preambles.get(client).inc()
    }
}
