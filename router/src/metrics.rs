//! Counts what the router does, for its metrics: placements, turns, refusals, retries and bytes.
//!
//! `turn` and `http` call a method here for each event, such as the end of a turn (a request and
//! its answer). The admin port serves the counts to Prometheus, with the prefix `berth_router_`.
//! Metrics of the fleet and of the index of resident blocks are not here. The collectors in `fleet`
//! and `residency` compute those at each scrape. The child `turns` has what turns use and take.

mod turns;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use service::refusal::Code;

pub(crate) use self::turns::{TurnMetrics, TurnTokenCounts};

/// A label `reason`, with a value from a small fixed set.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ReasonLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct CodeLabel {
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClientLabel {
    client: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct StateLabel {
    pub(crate) state: &'static str,
}

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

#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    placements: Family<ReasonLabel, Counter>,
    turns: Family<OutcomeLabel, Counter>,
    refusals: Family<CodeLabel, Counter>,
    retries: Family<ReasonLabel, Counter>,
    staged_prefills: Family<OutcomeLabel, Counter>,
    hand_offs: Family<OutcomeLabel, Counter>,
    preambles: Family<ClientLabel, Counter>,
    untokenized_prompts: Family<ReasonLabel, Counter>,
    sessions_left_out: Family<ReasonLabel, Counter>,
    /// What turns use, and how long their steps take.
    pub(crate) turn: TurnMetrics,
    /// Placed turns that have not ended. The metric's name is `streams_in_flight`.
    pub(crate) turns_in_flight: Gauge,
    /// Turns that were not sent to a second worker, because their bodies had given way.
    pub(crate) bodies_gone: Counter,
    pub(crate) request_bytes: Counter,
    pub(crate) response_bytes: Counter,
}

impl Metrics {
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            placements: Family::default(),
            turns: Family::default(),
            refusals: Family::default(),
            retries: Family::default(),
            staged_prefills: Family::default(),
            hand_offs: Family::default(),
            preambles: Family::default(),
            untokenized_prompts: Family::default(),
            sessions_left_out: Family::default(),
            turn: TurnMetrics::new(registry),
            turns_in_flight: Gauge::default(),
            bodies_gone: Counter::default(),
            request_bytes: Counter::default(),
            response_bytes: Counter::default(),
        };
        let help = "Placements by reason; retried turns and opened sessions count, too";
        registry.register("placements", help, metrics.placements.clone());
        registry.register(
            "turns",
            "Placed turns that have ended, by outcome",
            metrics.turns.clone(),
        );
        registry.register("refusals", "Refusals by the router, by code", metrics.refusals.clone());
        registry.register(
            "retries",
            "Turns and opens sent to a second worker, by reason",
            metrics.retries.clone(),
        );
        let help =
            "Long prompts computed in stages before their turns (staged prefill), by outcome";
        registry.register("staged_prefills", help, metrics.staged_prefills.clone());
        let help = "Turns on a pair of a prefill and a decode engine, by the end of their hand-off";
        registry.register("hand_offs", help, metrics.hand_offs.clone());
        let help = "Volatile preambles removed from request bodies, by the client that writes them";
        registry.register("preambles_removed", help, metrics.preambles.clone());
        let help = "Prompts of text placed without all of their tokens, by reason";
        registry.register("untokenized_prompts", help, metrics.untokenized_prompts.clone());
        let help = "Turns run without the session at which their client hinted, by reason";
        registry.register("sessions_left_out", help, metrics.sessions_left_out.clone());
        let help = "Turns not sent to a second worker, as their bodies had given way to others";
        registry.register("bodies_gone", help, metrics.bodies_gone.clone());
        registry.register(
            "streams_in_flight",
            "Placed turns that have not ended",
            metrics.turns_in_flight.clone(),
        );
        let help = "Bytes of request bodies received from clients";
        registry.register_with_unit("request", help, Unit::Bytes, metrics.request_bytes.clone());
        let help = "Bytes of answer bodies received from workers";
        registry.register_with_unit("response", help, Unit::Bytes, metrics.response_bytes.clone());
        metrics
    }

    /// Counts a placement.
    pub(crate) fn count_placement(&self, reason: &'static str) {
        self.placements.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Counts the end of a placed turn.
    pub(crate) fn count_turn_end(&self, outcome: TurnOutcome) {
        self.turns.get_or_create(&OutcomeLabel { outcome: outcome.as_str() }).inc();
    }

    /// Counts a refusal by the router.
    pub(crate) fn count_refusal(&self, code: Code) {
        self.refusals.get_or_create(&CodeLabel { code: code.as_str() }).inc();
    }

    /// Counts a turn, or the opening of a session, that is sent to a second worker.
    pub(crate) fn count_retry(&self, reason: &'static str) {
        self.retries.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Counts the end of a staged prefill.
    pub(crate) fn count_hand_off(&self, end: HandOffEnd) {
        self.hand_offs.get_or_create(&OutcomeLabel { outcome: end.as_str() }).inc();
    }

    pub(crate) fn count_staged_prefill_end(&self, end: StagedPrefillEnd) {
        self.staged_prefills.get_or_create(&OutcomeLabel { outcome: end.as_str() }).inc();
    }

    /// Counts a prompt of text that is placed without all of its tokens.
    pub(crate) fn count_untokenized_prompt(&self, reason: &'static str) {
        self.untokenized_prompts.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Counts a turn that runs without the session at which its client only hinted.
    pub(crate) fn count_session_left_out(&self, reason: &'static str) {
        self.sessions_left_out.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Counts a preamble removed from a request of `client`. Returns how many preambles of this
    /// client were removed before.
    pub(crate) fn count_removed_preamble(&self, client: &'static str) -> u64 {
        self.preambles.get_or_create(&ClientLabel { client }).inc()
    }
}
