//! The workers to which a turn is sent: one, or the two of a pair.

use std::sync::Arc;

use contract::bootstrap::{Bootstrap, Half};
use service::auth::gate;

use crate::{
    fleet::{agent::Facts, lease::Lease, snapshot::Snapshot, worker::WorkerRef},
    placement::{PrefillPlacement, TURN_TOKENS_ASSUMED},
};

#[derive(Debug, Clone, Copy)]
pub(super) struct Target<'a> {
    pub(super) worker: WorkerRef,
    pub(super) data_authority: &'a str,
    pub(super) data_tls: bool,
    /// Leading prompt tokens resident on the worker, as reported or expected.
    pub(super) resident_tokens: Option<u64>,
    /// How the engine finds the other one of its pair. `None` for a whole turn.
    pub(super) bootstrap: Option<&'a Bootstrap>,
}

#[derive(Debug)]
pub(super) struct PlacedPrefill {
    pub(super) worker: WorkerRef,
    pub(super) worker_name: String,
    pub(super) data_authority: Arc<str>,
    pub(super) data_tls: bool,
    /// `None` after the half was sent.
    pub(super) lease: Option<Lease>,
    /// Leading prompt tokens resident on the worker, as reported or expected.
    pub(super) resident_tokens: Option<u64>,
    /// What the decode half is told.
    pub(super) bootstrap: Bootstrap,
}

impl PlacedPrefill {
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
            worker,
            worker_name: view.name(worker),
            data_authority: Arc::clone(&facts.data_authority),
            data_tls: facts.data_tls,
            lease: Some(Lease::acquire(&agent.in_flight[worker.dp_rank as usize], tokens)),
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
pub(super) fn is_on_this_host(data_authority: &str) -> bool {
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
