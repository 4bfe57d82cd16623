//! Routers agree although a place fails: simulated over seeds, with messages in random order.

use std::collections::BTreeSet;

use contract::{
    id::SessionKey,
    placement_claim::{CLAIMS_MAX, PlacementClaimTable},
};
use parking_lot::Mutex;
use tokio::{task::JoinSet, time::sleep};

use super::*;
use crate::fleet::{
    state::Update,
    testing::{fleet, start},
    worker::AgentKey,
};

const ROUTERS: usize = 3;
const PLACES: usize = 4;
const AGENTS: usize = 6;
const TTL: Duration = Duration::from_secs(30);

fn at(agent: usize) -> WorkerRef {
    WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 }
}

fn key() -> SessionKey {
    SessionKey::new("p", "s").unwrap()
}

fn proposal(wanted: usize, leaves: Option<usize>) -> Proposal {
    Proposal { key: key(), wanted: at(wanted), leaves: leaves.map(at), generation: None }
}

/// What goes wrong between a router and a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// No question arrives.
    Unreachable,
    /// The claim is recorded, and the answer is lost.
    NoAnswer,
    /// Every second question is lost.
    Unsteady,
    /// The place loses all claims with each question.
    Forgets,
}

const FAULTS: [Fault; 4] = [Fault::Unreachable, Fault::NoAnswer, Fault::Unsteady, Fault::Forgets];

/// A place as one router sees it.
#[derive(Debug)]
struct Simulated {
    table: Arc<Mutex<PlacementClaimTable>>,
    fault: Option<Fault>,
    random: Mutex<fastrand::Rng>,
}

#[async_trait]
impl ClaimPlace for Simulated {
    async fn ask(&self, request: PlacementClaimRequest) -> Option<PlacementClaim> {
        let pause = || Duration::from_millis(self.random.lock().u64(0..5));
        sleep(pause()).await;
        let is_lost = self.random.lock().bool();
        match self.fault {
            Some(Fault::Unreachable) => return None,
            Some(Fault::Unsteady) if is_lost => return None,
            Some(Fault::Forgets) => *self.table.lock() = PlacementClaimTable::new(CLAIMS_MAX, 1),
            _ => {}
        }
        let claim = self.table.lock().claim(request, now()).unwrap();
        sleep(pause()).await;
        (self.fault != Some(Fault::NoAnswer)).then_some(claim)
    }
}

/// Routers that get a session's first turns at once, and then all move it at once. Returns the
/// workers that the routers send the session's turns to, in both steps.
async fn play(seed: u64, needed: usize, faulty_places: &[usize]) -> [BTreeSet<usize>; 2] {
    let mut random = fastrand::Rng::with_seed(seed);
    let view = Arc::new(fleet(&[(0, 0); AGENTS], start()).snapshot());
    let tables: Vec<_> = (0..PLACES)
        .map(|_| Arc::new(Mutex::new(PlacementClaimTable::new(CLAIMS_MAX, 1))))
        .collect();
    let mut fault_at = |place: usize| {
        let fault = random.choice(FAULTS);
        fault.filter(|_| faulty_places.contains(&place) && random.bool())
    };
    let faults: Vec<Vec<_>> =
        (0..ROUTERS).map(|_| (0..PLACES).map(&mut fault_at).collect()).collect();
    let mut homes = [BTreeSet::new(), BTreeSet::new()];
    for step in 0..2 {
        let mut routers = JoinSet::new();
        for faults in &faults {
            let leaves = homes[0].first().copied().filter(|_| step == 1);
            let wanted = random.usize(0..AGENTS - 1);
            let wanted = wanted + usize::from(leaves.is_some_and(|leaves| wanted >= leaves));
            let (view, tables, faults) = (Arc::clone(&view), tables.clone(), faults.clone());
            let mut random = random.fork();
            routers.spawn(async move {
                let places = tables.into_iter().zip(faults).map(|(table, fault)| {
                    let random = Mutex::new(random.fork());
                    Box::new(Simulated { table, fault, random }) as Box<dyn ClaimPlace>
                });
                let places: Vec<_> = places.collect();
                let agreement = Agreement { places: &places, needed, ttl: TTL };
                let agreed = agreement.reach(&proposal(wanted, leaves), || Arc::clone(&view)).await;
                agreed.expect("two places answer").worker.agent.slot()
            });
        }
        homes[step] = routers.join_all().await.into_iter().collect();
    }
    homes
}

#[tokio::test(start_paused = true)]
async fn routers_agree_although_any_one_place_fails() {
    for seed in 0..2000 {
        let faulty = usize::try_from(seed).unwrap() % PLACES;
        let [began, moved] = play(seed, 2, &[faulty]).await;
        assert_eq!(began.len(), 1, "seed {seed}: it began on {began:?}");
        assert_eq!(moved.len(), 1, "seed {seed}: it moved to {moved:?}");
        assert_ne!(began, moved, "seed {seed}: it left its worker");
    }
}

#[tokio::test(start_paused = true)]
async fn one_place_alone_would_split_sessions_and_so_do_two_faults() {
    let mut split_by_one_place = 0;
    let mut split_by_two_faults = 0;
    for seed in 0..500 {
        split_by_one_place += usize::from(play(seed, 1, &[0]).await[0].len() > 1);
        split_by_two_faults += usize::from(play(seed, 2, &[0, 1]).await[0].len() > 1);
    }
    assert!(split_by_one_place > 100, "{split_by_one_place} of 500");
    assert!(split_by_two_faults > 10, "{split_by_two_faults} of 500");
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_renewed_at_both_places_until_another_worker_has_the_session() {
    let tables =
        [1, 100].map(|epoch| Arc::new(Mutex::new(PlacementClaimTable::new(CLAIMS_MAX, epoch))));
    let view = Arc::new(fleet(&[(0, 0); AGENTS], start()).snapshot());
    let places: Vec<_> = tables
        .iter()
        .map(|table| {
            let (table, random) = (Arc::clone(table), Mutex::default());
            Box::new(Simulated { table, fault: None, random }) as Box<dyn ClaimPlace>
        })
        .collect();
    let agreement = Agreement { places: &places, needed: 2, ttl: TTL };
    let agreed = agreement.reach(&proposal(3, None), || Arc::clone(&view)).await.unwrap();
    let worker = view.worker_id(at(3)).unwrap();
    let renew = async |generation, ttl| {
        let agreement = Agreement { places: &places, needed: 2, ttl };
        agreement.renew((&key()).into(), worker.clone(), generation).await
    };
    let life = Duration::from_millis(300);
    assert_eq!(renew(agreed.generation, life).await, Some(agreed.generation));
    for table in &tables {
        // Both claims live as long as the renewal says, although their generations differ.
        let wanted = view.worker_id(at(0)).unwrap();
        let request =
            PlacementClaimRequest { key: (&key()).into(), wanted, expected: None, ttl: TTL };
        let claim = |at| table.lock().claim(request.clone(), at).unwrap();
        assert!(!claim(now()).is_granted, "it lives");
        assert!(claim(now() + life).is_granted, "it was renewed for {life:?}");
    }
    assert_eq!(renew(agreed.generation, life).await, None, "another worker has it");
}

fn claim(agent: &str, is_granted: bool) -> PlacementClaim {
    let worker = WorkerId { agent: agent.to_owned(), dp_rank: 0 };
    PlacementClaim { worker, generation: 1, is_granted }
}

#[test]
fn a_claim_of_another_router_is_followed_unless_its_worker_is_of_no_use() {
    let now = start();
    let mut state = fleet(&[(0, 0), (0, 0), (0, 0)], now);
    let view = state.snapshot();
    let judged = |name: &str, leaves: Option<usize>| {
        judge(&claim(name, false), at(0), leaves.map(at), &view, now)
    };
    assert_eq!(judged("a1", None), Verdict::Holds(at(1)));
    assert_eq!(judged("a1", Some(1)), Verdict::Replace, "the session leaves it");
    assert_eq!(judged("a2", Some(1)), Verdict::Holds(at(2)), "moved by another");
    assert_eq!(judged("gone", None), Verdict::Replace);
    let granted = judge(&claim("a0", true), at(0), None, &view, now);
    assert_eq!(granted, Verdict::Holds(at(0)));
    state.apply(AgentKey::first(1), Update::AgentLost("gone".to_owned()), now);
    let view = state.snapshot();
    let judged = judge(&claim("a1", false), at(0), None, &view, now);
    assert_eq!(judged, Verdict::Replace);
}
