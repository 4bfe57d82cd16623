//! What turns notice of claims: they share one, follow it, and go on without one.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use contract::placement_claim::{PlacementClaim, PlacementClaimRequest};
use tokio::sync::Semaphore;
use tonic::async_trait;

use super::*;
use crate::{
    claims::store::Error,
    fleet::{
        testing::{fleet, start},
        worker::AgentKey,
    },
};

/// A store that counts questions, and answers each when it is told to.
#[derive(Debug)]
struct Slow {
    table: MemoryStore,
    asked: AtomicU32,
    answers: Semaphore,
}

#[async_trait]
impl ClaimStore for Arc<Slow> {
    async fn claim(
        &self,
        request: PlacementClaimRequest,
        time_max: Duration,
    ) -> Result<PlacementClaim, Error> {
        self.asked.fetch_add(1, Relaxed);
        let answer = tokio::time::timeout(time_max, self.answers.acquire()).await;
        answer.map_err(|_| Error::Late(time_max))?.expect("it is open").forget();
        self.table.claim(request, time_max).await
    }
}

/// Returns the store, and what asks it for claims in a fleet of three agents.
fn claims(settings: &ClaimsTable) -> (Arc<Slow>, Arc<PlacementClaims>) {
    let table = MemoryStore(Mutex::new(PlacementClaimTable::new(CLAIMS_MAX, 1)));
    let slow = Arc::new(Slow { table, asked: AtomicU32::new(0), answers: Semaphore::new(0) });
    let guarded = Guarded::new(StoreKind::Memory, Box::new(Arc::clone(&slow)));
    let metrics = Metrics::default();
    let store = OpenStore { store: Some(guarded), metrics };
    let state = fleet(&[(0, 0); 3], start());
    let view = Arc::new(View::new(state.snapshot(), state.conversations()));
    let claims = PlacementClaims::new(settings, store, view, Arc::default(), Tasks::default());
    (slow, Arc::new(claims))
}

fn proposal(session: &str, wanted: usize) -> Proposal {
    let key = SessionKey::new("p", session).unwrap();
    let wanted = WorkerRef { agent: AgentKey::first(wanted), dp_rank: 0 };
    Proposal { key, wanted, leaves: None, generation: None }
}

/// Runs until all other tasks wait.
async fn settle_down() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
#[expect(clippy::disallowed_methods, reason = "a turn of a test may be given up")]
async fn turns_of_one_session_share_a_claim_and_those_of_others_do_not_wait_for_it() {
    let (slow, claims) = claims(&ClaimsTable::default());
    let settle = |session: &str, wanted| {
        let (claims, proposal) = (Arc::clone(&claims), proposal(session, wanted));
        tokio::spawn(async move { claims.agree(proposal).await })
    };
    let [first, second, other] = [settle("s", 0), settle("s", 1), settle("t", 2)];
    settle_down().await;
    assert_eq!(slow.asked.load(Relaxed), 2, "one for each session");
    // The turn that began the claim goes away; the claim goes on for the other.
    first.abort();
    slow.answers.add_permits(2);
    let (second, other) = (second.await.unwrap(), other.await.unwrap());
    assert_eq!((second.worker.agent.slot(), other.worker.agent.slot()), (0, 2));
    assert!(second.generation.is_some());
    settle_down().await;
    assert!(claims.flights.lock().is_empty(), "nothing stays behind");
    slow.answers.add_permits(1);
    assert_eq!(settle("s", 1).await.unwrap().worker.agent.slot(), 0, "the claim holds");
    assert_eq!(slow.asked.load(Relaxed), 3, "a later turn asks again");
}

#[tokio::test(start_paused = true)]
async fn a_store_without_an_answer_costs_patience_once_and_then_little() {
    let settings = ClaimsTable { deadline_ms: 20, patience_ms: 500, ..ClaimsTable::default() };
    let (_slow, claims) = claims(&settings);
    for expected_ms in [500, 20, 20, 0, 0] {
        let began = tokio::time::Instant::now();
        let settled = claims.agree(proposal("s", 1)).await;
        assert_eq!((settled.worker.agent.slot(), settled.generation), (1, None), "it goes on");
        let waited_ms = began.elapsed().as_millis();
        assert!((expected_ms..expected_ms + 5).contains(&waited_ms), "{waited_ms} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn a_renewal_says_until_when_the_claim_lives_and_ends_when_the_session_has_moved() {
    let (slow, claims) = claims(&ClaimsTable { ttl_ms: 1000, ..ClaimsTable::default() });
    slow.answers.add_permits(100);
    let first = claims.agree(proposal("s", 0)).await;
    let generation = first.generation.unwrap();
    let key = SessionKey::new("p", "s").unwrap();
    let before = now();
    let (renewed, valid_until) = claims.renew(&key, first.worker, generation).await.unwrap();
    assert_eq!(renewed, generation);
    let life = Duration::from_millis(1000);
    assert!(valid_until >= before + life && valid_until <= now() + life);
    let moves = Proposal { leaves: Some(first.worker), ..proposal("s", 1) };
    assert_eq!(claims.agree(moves).await.worker.agent.slot(), 1);
    assert_eq!(claims.renew(&key, first.worker, generation).await, None);
}
