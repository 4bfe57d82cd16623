//! The worker to which a turn is sent, or the two of a pair, and what placement expects there.

use std::{sync::Arc, time::Duration};

use contract::{
    bootstrap::{Bootstrap, Half},
    claim::Claim,
};
use http::uri::{PathAndQuery, Scheme, Uri};
use service::auth::gate;

use crate::{
    fleet::{agent::Facts, lease::LoadLease, snapshot::Snapshot, worker::WorkerRef},
    placement::{PrefillPlacement, Reason, TURN_TOKENS_ASSUMED},
    residency::block_locator::TurnBlocks,
};

/// A worker, and the data port of its agent.
#[derive(Debug, Clone)]
pub(crate) struct Destination {
    pub(crate) worker: WorkerRef,
    pub(crate) name: String,
    authority: Arc<str>,
    has_tls: bool,
}

#[derive(Debug)]
pub(crate) struct Assignment {
    /// Of a pair, that of the decode half.
    pub(crate) to: Destination,
    pub(crate) reason: Reason,
    /// What the agent is told of the session; no claim among routers. `None` without a session.
    pub(crate) claim: Option<Claim>,
    /// Whether another worker may take the turn if this one refuses it.
    pub(crate) can_move: bool,
    /// Set if the blocks were made. The worker has them after the turn.
    pub(crate) blocks: Option<TurnBlocks>,
    /// Leading prompt tokens resident on the worker, as reported or expected.
    pub(crate) resident_tokens: Option<u64>,
    /// Prompt tokens that placement expects the worker that computes the prompt to compute.
    pub(crate) uncached_tokens_expected: Option<u64>,
    /// Set if placement compared workers by the prompt.
    pub(crate) ttft_expected: Option<Duration>,
    /// `None` if the worker runs the whole turn.
    pub(crate) prefill: Option<PrefillHalf>,
    /// Whether others can use the turn's KV afterwards.
    pub(super) keeps_kv: bool,
}

/// The half of a pair's turn that computes the prompt.
#[derive(Debug)]
pub(crate) struct PrefillHalf {
    pub(crate) to: Destination,
    /// `None` after the half was sent.
    pub(crate) lease: Option<LoadLease>,
    /// Leading prompt tokens resident on the worker, as reported or expected.
    pub(crate) resident_tokens: Option<u64>,
    /// What the decode half is told.
    pub(crate) bootstrap: Bootstrap,
}

impl Destination {
    pub(super) fn new(view: &Snapshot, worker: WorkerRef) -> Self {
        let facts = view.agent(worker).facts.as_ref().expect("a placed worker was described");
        Self {
            worker,
            name: view.name(worker),
            authority: Arc::clone(&facts.data_authority),
            has_tls: facts.data_tls,
        }
    }

    pub(crate) fn uri(&self, path_and_query: PathAndQuery) -> Uri {
        Uri::builder()
            .scheme(if self.has_tls { Scheme::HTTPS } else { Scheme::HTTP })
            .authority(&*self.authority)
            .path_and_query(path_and_query)
            .build()
            .expect("authority and path were parsed before")
    }

    pub(crate) fn is_on_this_host(&self) -> bool {
        is_on_this_host(&self.authority)
    }
}

impl Assignment {
    pub(crate) fn workers_with_kv(&self) -> impl Iterator<Item = WorkerRef> {
        let decode = Some(self.to.worker).filter(|_| self.keeps_kv);
        self.prefill.as_ref().map(|prefill| prefill.to.worker).into_iter().chain(decode)
    }
}

impl PrefillHalf {
    /// `random` is new for each half, because an engine refuses a room that it knows.
    pub(super) fn new(view: &Snapshot, placement: &PrefillPlacement, random: u64) -> Self {
        let worker = placement.worker;
        let agent = view.agent(worker);
        let facts = agent.facts.as_ref().expect("a placed worker was described");
        let ranks = u32::try_from(facts.description.ranks.len()).unwrap_or(u32::MAX);
        let transfer = facts.description.engine.transfer.as_ref();
        let transfer = transfer.expect("placement pairs only described engines");
        let tokens = placement.uncached_tokens.unwrap_or(TURN_TOKENS_ASSUMED);
        Self {
            to: Destination::new(view, worker),
            lease: Some(LoadLease::acquire(&agent.in_flight[worker.dp_rank as usize], tokens)),
            resident_tokens: None,
            bootstrap: Bootstrap {
                half: Half::Decode,
                host: transfer.bootstrap_host.clone().unwrap_or_else(|| agent_host(facts)),
                port: transfer.bootstrap_port,
                room: Bootstrap::room_for(random, worker.dp_rank, ranks),
                prefill_rank: worker.dp_rank,
            },
        }
    }
}

/// Only an agent on this host may run without a proof of who its routers are, and so have an engine
/// that checks clients itself.
pub(crate) fn is_on_this_host(data_authority: &str) -> bool {
    let host = data_authority.rsplit_once(':').map_or(data_authority, |(host, _)| host);
    let ip = host.trim_start_matches('[').trim_end_matches(']').parse();
    host == "localhost" || ip.is_ok_and(gate::is_local)
}

/// An engine takes the host without brackets.
fn agent_host(facts: &Facts) -> String {
    let authority = &facts.data_authority;
    let host = authority.rsplit_once(':').map_or(&**authority, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']').to_owned()
}
