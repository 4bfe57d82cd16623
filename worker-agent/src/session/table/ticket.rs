//! Describes one ticket: a turn between its claim and its end, or a request that waits for an open.

use std::{sync::Arc, time::Instant};

use contract::{claim::Claim, id::SessionKey};

use super::{Need, PromptStart, RouteTurns, RunMode, trim_turn::Trim};

#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) dp_rank: u32,
    pub(super) principal: Arc<str>,
    /// `None` for a turn without a session.
    pub(super) session: Option<ClaimedSession>,
    /// When the ticket entered its present stage.
    pub(super) since: Instant,
    pub(super) stage: Stage,
}

#[derive(Debug)]
pub(super) struct ClaimedSession {
    pub(super) key: SessionKey,
    /// Differs from the `Session::generation` of a later session with the same key.
    pub(super) generation: u64,
    pub(super) claim: Claim,
    pub(super) route_turns: RouteTurns,
    /// Among all claims. Turns are admitted in this order, however long their bodies take to
    /// arrive.
    pub(super) order: u64,
    /// The order of the session's newest turn that its client gave up before it sent this one. It
    /// counts on no turn up to that. 0: none.
    pub(super) abandoned_up_to: u64,
    /// Whether this is a delta whose earlier turn did not become history.
    pub(super) is_orphaned: bool,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// A client, not a turn, waits until its session is open.
    AwaitsOpen,
    /// The turn's body is being read. The start is empty until it is known.
    Claimed(PromptStart),
    /// The turn waits for room.
    Queued { need: Need, prompt_start: PromptStart },
    /// The turn is inside the engine.
    Inside(Inside),
}

#[derive(Debug)]
pub(super) struct Inside {
    pub(super) need: Need,
    pub(super) incarnation: Option<String>,
    pub(super) tag: Option<String>,
    /// When the client disconnected, if the turn's end at the engine is still awaited.
    pub(super) abandoned_since: Option<Instant>,
    /// Whether the shim has reported that the engine aborted the turn while it ran.
    pub(super) was_aborted: bool,
    /// Whether the engine has asked its model again for the same request, outside the session, as
    /// after it has called a tool of its own.
    pub(super) asks_again: bool,
    /// Whether the turn belongs to another conversation than its session's, so that it changes
    /// nothing that is known of the session's history.
    pub(super) is_aside: bool,
    pub(super) run: Run,
}

#[derive(Debug)]
pub(super) enum Run {
    /// On the radix tree. `large_tokens`: what the turn may need, if it is large.
    Plain { large_tokens: Option<u64> },
    /// In its pinned session. `had_no_kv`: it held no row and KV of its own at the admission.
    Pinned { had_no_kv: bool, trim: Trim },
}

impl Ticket {
    pub(super) fn key(&self) -> Option<&SessionKey> {
        self.session.as_ref().map(|session| &session.key)
    }

    pub(super) fn is_of(&self, generation: u64) -> bool {
        self.session.as_ref().is_some_and(|session| session.generation == generation)
    }

    /// Whether the ticket is a turn that has claimed its session and is not inside the engine.
    pub(super) fn is_waiting_turn(&self) -> bool {
        matches!(self.stage, Stage::Claimed(_) | Stage::Queued { .. })
    }

    pub(super) fn inside(&self) -> Option<&Inside> {
        match &self.stage {
            Stage::Inside(inside) => Some(inside),
            _ => None,
        }
    }

    /// Returns `None` before the body was read.
    pub(super) fn need(&self) -> Option<Need> {
        match &self.stage {
            Stage::Queued { need, .. } | Stage::Inside(Inside { need, .. }) => Some(*need),
            Stage::AwaitsOpen | Stage::Claimed(_) => None,
        }
    }

    pub(super) fn places(&self) -> u32 {
        self.need().map_or(1, |need| need.places())
    }

    pub(super) fn awaits_plan(&self) -> bool {
        matches!(self.inside().and_then(Inside::trim), Some(Trim::Awaited(_)))
    }

    pub(super) fn run_mode(&self, planned: RunMode, shim_trims: bool) -> RunMode {
        let session = self.session.as_ref();
        session.map_or(planned, |session| session.route_turns.run_mode(planned, shim_trims))
    }

    pub(super) fn is_delta(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.claim.delta)
    }

    pub(super) fn opens_session(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.claim.open)
    }

    pub(super) fn had_no_kv(&self) -> bool {
        self.inside().is_some_and(Inside::had_no_kv)
    }

    pub(super) fn closes_session(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.claim.close)
    }
}

impl Inside {
    pub(super) fn runs_pinned(&self) -> bool {
        matches!(self.run, Run::Pinned { .. })
    }

    pub(super) fn had_no_kv(&self) -> bool {
        matches!(self.run, Run::Pinned { had_no_kv: true, .. })
    }

    /// `None` if the turn doesn't run in its pinned session.
    pub(super) fn trim(&self) -> Option<&Trim> {
        match &self.run {
            Run::Pinned { trim, .. } => Some(trim),
            Run::Plain { .. } => None,
        }
    }
}
