//! Describes one ticket: a turn between its claim and its end, or a request that waits for an open.
//!
//! Each stage of a ticket has the data that only that stage has. This module decides nothing.

use std::{sync::Arc, time::Instant};

use proto::{claim::Claim, id::SessionKey};

use super::{Need, PromptStart, RouteTurns, RunMode, trim_turn::Trim};

/// A turn between its claim and its end, or the request of a client that waits for its session to
/// open.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) dp_rank: u32,
    /// The client that the turn or request belongs to.
    pub(super) principal: Arc<str>,
    /// `None` for a turn without a session.
    pub(super) session: Option<ClaimedSession>,
    /// When the ticket entered its present stage.
    pub(super) since: Instant,
    pub(super) stage: Stage,
}

/// The session of a ticket, and what the ticket asks of it.
#[derive(Debug)]
pub(super) struct ClaimedSession {
    pub(super) key: SessionKey,
    /// The `Session::generation` of the claimed session. It differs if that session has been closed
    /// and another session has the same key.
    pub(super) generation: u64,
    pub(super) claim: Claim,
    pub(super) route_turns: RouteTurns,
    /// The position among all claims. The turns of a session are admitted in this order, no matter
    /// how long their bodies take to arrive.
    pub(super) order: u64,
    /// The order of the newest turn of the session that its client had given up before it sent
    /// this one, so that it counts on no turn up to that. 0 if there is none.
    pub(super) abandoned_up_to: u64,
    /// Whether this is a delta that was to follow an earlier turn, and that turn did not become
    /// history.
    pub(super) is_orphaned: bool,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// The ticket is not a turn. A client waits until its session is open.
    AwaitsOpen,
    /// The turn's body is being read. Holds the beginning of its prompt, once that is known.
    Claimed(PromptStart),
    /// The turn waits for room.
    Queued { need: Need, prompt_start: PromptStart },
    /// The turn is inside the engine.
    Inside(Inside),
}

/// A turn inside the engine.
#[derive(Debug)]
pub(super) struct Inside {
    pub(super) need: Need,
    /// Id of the incarnation that the turn was admitted to. `None` for a turn without a session.
    pub(super) incarnation: Option<String>,
    /// The incarnation id with which the engine may tag the turn's KV.
    pub(super) tag: Option<String>,
    /// When the client disconnected, if the turn's end at the engine is still awaited.
    pub(super) abandoned_since: Option<Instant>,
    /// Whether the shim has reported that the engine aborted the turn while it ran.
    pub(super) was_aborted: bool,
    /// Whether the engine has asked its model again for the same request, outside the session, as
    /// it does after it has called a tool of its own.
    pub(super) asks_again: bool,
    /// Whether the turn belongs to another conversation than its session's, so that it changes
    /// nothing that is known of the session's history.
    pub(super) is_aside: bool,
    pub(super) run: Run,
}

/// How a turn runs inside the engine.
#[derive(Debug)]
pub(super) enum Run {
    /// On the radix tree. `large_tokens`: the KV tokens that the turn may need, if it is large.
    Plain { large_tokens: Option<u64> },
    /// In its pinned session. `had_no_kv`: the session held no row and no KV of its own when the
    /// turn was admitted.
    Pinned { had_no_kv: bool, trim: Trim },
}

impl Ticket {
    pub(super) fn key(&self) -> Option<&SessionKey> {
        self.session.as_ref().map(|session| &session.key)
    }

    /// Whether the ticket has claimed the session of this generation.
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

    /// Returns what the turn may need, once its body was read.
    pub(super) fn need(&self) -> Option<Need> {
        match &self.stage {
            Stage::Queued { need, .. } | Stage::Inside(Inside { need, .. }) => Some(*need),
            Stage::AwaitsOpen | Stage::Claimed(_) => None,
        }
    }

    /// Returns the places for turns that the ticket takes or wants, as far as that is known.
    pub(super) fn places(&self) -> u32 {
        self.need().map_or(1, |need| need.places())
    }

    /// Whether the turn awaits the shim's plan.
    pub(super) fn awaits_plan(&self) -> bool {
        matches!(self.inside().and_then(Inside::trim), Some(Trim::Awaited(_)))
    }

    /// Returns how the turn really runs on its route if it is to run as `planned`.
    pub(super) fn run_mode(&self, planned: RunMode, shim_trims: bool) -> RunMode {
        let session = self.session.as_ref();
        session.map_or(planned, |session| session.route_turns.run_mode(planned, shim_trims))
    }

    /// Whether the turn is a delta: it holds only new tokens.
    pub(super) fn is_delta(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.claim.delta)
    }

    /// Whether the client opens the session with this turn.
    pub(super) fn opens_session(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.claim.open)
    }

    /// Whether the turn was admitted to a session that held no row and no KV of its own.
    pub(super) fn had_no_kv(&self) -> bool {
        self.inside().is_some_and(Inside::had_no_kv)
    }

    /// Whether the turn's claim asks to close the session after the turn.
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

    /// Returns what became of the turn's full history. `None` if the turn doesn't run in its
    /// pinned session.
    pub(super) fn trim(&self) -> Option<&Trim> {
        match &self.run {
            Run::Pinned { trim, .. } => Some(trim),
            Run::Plain { .. } => None,
        }
    }
}
