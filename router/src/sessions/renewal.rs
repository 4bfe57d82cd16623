//! Renews claims while turns run whose sessions no agent reports yet.
//!
//! A claim lives long enough for a session's first turn to reach its agent, which then reports the
//! session. Turns that wait here for long need more, such as for staged prefill, and so do sessions
//! that are only placed, which no agent ever reports.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use contract::id::SessionKey;
use service::clock::now;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{bindings::KnownPlacementClaim, claims::PlacementClaims, directory::SessionDirectory};
use crate::fleet::worker::WorkerRef;

/// A claim beyond that isn't renewed, and expires.
const WATCHED_MAX: usize = 16_384;
/// The task takes each new claim at once.
const QUEUED_MAX: usize = 1024;

#[derive(Debug, Clone)]
struct Watched {
    key: SessionKey,
    worker: WorkerRef,
    generation: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct Renewals(mpsc::Sender<Watched>);

#[derive(Debug)]
pub(crate) struct RenewalQueue(mpsc::Receiver<Watched>);

pub(crate) fn queue() -> (Renewals, RenewalQueue) {
    let (sender, receiver) = mpsc::channel(QUEUED_MAX);
    (Renewals(sender), RenewalQueue(receiver))
}

impl Renewals {
    pub(crate) fn watch(&self, key: &SessionKey, worker: WorkerRef, generation: Option<u64>) {
        let Some(generation) = generation else { return };
        // If the queue is full, the claim expires. Its session is probably reported by then.
        let _ = self.0.try_send(Watched { key: key.clone(), worker, generation });
    }
}

pub(crate) async fn run(
    queue: RenewalQueue,
    directory: Arc<SessionDirectory>,
    claims: Arc<PlacementClaims>,
    token: CancellationToken,
) {
    tokio::select! {
        biased;
        () = token.cancelled() => {}
        () = renew_all(queue.0, &directory, &claims) => {}
    }
}

async fn renew_all(
    mut queue: mpsc::Receiver<Watched>,
    directory: &SessionDirectory,
    claims: &PlacementClaims,
) {
    // The number keeps claims of the same moment apart.
    let mut watched: BTreeMap<(Instant, u64), Watched> = BTreeMap::new();
    let mut number = 0;
    loop {
        let due = watched.first_key_value().map(|((due, _), _)| *due);
        let next = tokio::select! {
            biased;
            claim = queue.recv() => match claim {
                Some(claim) => Some(claim),
                None => return,
            },
            () = sleep_until(due) => {
                let (_, claim) = watched.pop_first().expect("one is due");
                renew(claim, directory, claims).await
            }
        };
        if let Some(claim) = next.filter(|_| watched.len() < WATCHED_MAX) {
            number += 1;
            watched.insert((now() + claims.ttl() / 2, number), claim);
        }
    }
}

/// Returns the claim to renew next; `None` if it is no longer needed.
async fn renew(
    Watched { key, worker, generation }: Watched,
    directory: &SessionDirectory,
    claims: &PlacementClaims,
) -> Option<Watched> {
    let is_reported = !directory.view().sessions.locate(&key).is_empty();
    let has_turns = directory.step(|bindings, now| {
        let binding = bindings.get(&key, now);
        binding.is_some_and(|binding| binding.turns > 0 && binding.worker.agent == worker.agent)
    });
    if is_reported || !has_turns {
        return None;
    }
    let (generation, valid_until) = claims.renew(&key, worker, generation).await?;
    let claimed = KnownPlacementClaim { generation: Some(generation), valid_until };
    directory.step(|bindings, _| bindings.renew_claim(&key, worker, claimed));
    Some(Watched { key, worker, generation })
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}
