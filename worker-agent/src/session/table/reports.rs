//! Describes what the engine and its shims report to the table.

use crate::session::WeightsReport;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineLoad {
    pub waiting_requests: u64,
    /// KV tokens that the engine can't evict.
    pub used_tokens: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionReport {
    pub id: String,
    pub holds_row: bool,
    pub allocated_tokens: u64,
    /// Of the committed history.
    pub history_tokens: u64,
    pub in_flight: bool,
}

/// Where in a full session table a batch of reports lies. A batch of changes has neither flag set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TablePart {
    pub begins_table: bool,
    pub ends_table: bool,
}

/// What the shim of one rank says, or that it is there or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShimReport<'a> {
    /// Asks about handed-over sessions: without a shim, any other suspect was closed.
    Up {
        can_demote: bool,
    },
    /// Closes every session that was waiting for the shim's answer.
    Down,
    /// The answer to the [`Effect::Demote`](crate::session::Effect::Demote) with this number.
    Demotion {
        number: u64,
        is_demoted: bool,
    },
    /// The answer to the [`Effect::Inspect`](crate::session::Effect::Inspect) with this number.
    /// `report` is `None` if the engine doesn't have the session.
    Inspection {
        number: u64,
        report: Option<&'a SessionReport>,
    },
    /// The end of a full table means that the engine doesn't have the foreign sessions that the
    /// table lacks. It proves nothing of the agent's own: one that is being opened or closed may be
    /// listed or not. The shim reports each that ends, and a close is repeated until the engine
    /// confirms it.
    Sessions {
        part: TablePart,
        reports: &'a [SessionReport],
    },
    SessionGone {
        id: &'a str,
    },
    /// The engine aborted a running turn of the incarnation, so the row and KV are free. The answer
    /// may look like a refusal.
    ///
    /// The report names no turn. A late one is still true of a turn that ends as refused, as that
    /// takes no row. An abandoned turn that ends too early leaves a doubt, which the shim clears.
    Aborted {
        incarnation: &'a str,
    },
}

/// What has become of KV that sessions may continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvChange<'a> {
    /// The engine has freed all its KV.
    Flushed,
    /// The agent has caused a change of the weights. `is_counted`: the shim counts it too.
    /// `was_flushed`: the engine freed all its KV with the change.
    Weights { is_counted: bool, was_flushed: bool },
    /// The shim may have counted changes that aren't the agent's. `is_changing`: a call of the
    /// agent's own changes the weights now.
    WeightsCounted { report: WeightsReport, is_changing: bool },
    /// No call of the agent's own changes the weights any more.
    WeightsSettled,
    /// An adapter was loaded or unloaded: this one, or any of which the name isn't known.
    Adapter(Option<&'a str>),
    /// These are loaded. One that isn't listed was unloaded. If it comes back, it may be another.
    Adapters(&'a [String]),
    /// An audit found pages of the incarnation that other sessions also have, or wrote to.
    Corrupt { incarnation: &'a str },
}
