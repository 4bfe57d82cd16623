//! Placement claims: with them, routers agree on the worker of a new session. Pure.
//!
//! Two routers may get a session's first turns at the same moment. So a router first *claims* the
//! worker that it has chosen, at a place that all routers ask: an agent, or the operator's store.
//! The first claim holds. It has a time to live, because it is needed only until an agent reports
//! the session.
//!
//! Only a router that knows a claim's newest *generation* can replace or renew it. So a router that
//! was slow can't undo what others did.

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant},
};

use sha2::{Digest as _, Sha256};

use crate::{
    id::{SessionKey, WorkerId},
    v1,
};

/// Claims live for half a minute after a first turn, so this is enough for 1,000 new sessions a
/// second. A claim takes about 200 bytes, so a full table takes 7 MB.
pub const CLAIMS_MAX: usize = 32_768;

/// How long a claim lives at most without being renewed.
pub const TTL_MAX: Duration = Duration::from_secs(3600);

const PRINCIPAL_BYTES: usize = 4;

const AGENT_ID_BYTES_MAX: usize = 128;

/// A hash, so the client's id doesn't leave the router, and no client can choose an id that is
/// taken for another one. Its first bytes are the same for all sessions of a principal, so that a
/// table can share its places among principals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlacementClaimKey(pub [u8; 16]);

impl From<&SessionKey> for PlacementClaimKey {
    fn from(key: &SessionKey) -> Self {
        let mut hasher = Sha256::new();
        let principal = key.principal().as_bytes();
        hasher.update([u8::try_from(principal.len()).expect("a principal has up to 128 bytes")]);
        hasher.update(principal);
        hasher.update(key.id().as_bytes());
        let hash: [u8; 32] = hasher.finalize().into();
        let mut key: [u8; 16] = *hash.first_chunk().expect("a SHA-256 has 32 bytes");
        let of_principal = Sha256::digest(principal);
        key[..PRINCIPAL_BYTES].copy_from_slice(&of_principal[..PRINCIPAL_BYTES]);
        Self(key)
    }
}

impl PlacementClaimKey {
    fn principal(self) -> PrincipalHash {
        *self.0.first_chunk().expect("a key is longer")
    }
}

/// Two principals that have the same share their places.
type PrincipalHash = [u8; PRINCIPAL_BYTES];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementClaimRequest {
    pub key: PlacementClaimKey,
    pub wanted: WorkerId,
    /// Names the claim to replace or renew. `None` if the router knows of no claim.
    pub expected: Option<u64>,
    pub ttl: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementClaim {
    pub worker: WorkerId,
    /// Never 0.
    pub generation: u64,
    /// Whether the request made or renewed the claim. Otherwise another claim held before.
    pub is_granted: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{0} claims are held, which is the most; ask another agent")]
    Full(usize),
    #[error("a claim's key has 16 bytes, this one has {0}")]
    KeyLength(usize),
    #[error("an agent's id has 1 to {AGENT_ID_BYTES_MAX} bytes, this one has {0}")]
    AgentIdLength(usize),
    #[error("a claim lives for 1 to 3600000 ms, not {0} ms")]
    Ttl(u32),
    #[error("the claim has the generation 0, which no claim has")]
    NoGeneration,
}

#[derive(Debug, Clone)]
struct Held {
    worker: WorkerId,
    generation: u64,
    expires_at: Instant,
}

#[derive(Debug)]
pub struct PlacementClaimTable {
    claims: HashMap<PlacementClaimKey, Held>,
    expiry_order: BTreeSet<(Instant, PlacementClaimKey)>,
    /// A principal without claims has no entry.
    principals: HashMap<PrincipalHash, BTreeSet<(Instant, PlacementClaimKey)>>,
    claims_max: usize,
    /// The newest claim has it.
    last_generation: u64,
}

impl PlacementClaimTable {
    /// `epoch` identifies the process: the time of its start, unix nanoseconds. Generations count
    /// from there, so a later process gives out larger ones.
    #[must_use]
    pub fn new(claims_max: usize, epoch: u64) -> Self {
        Self {
            claims: HashMap::new(),
            expiry_order: BTreeSet::new(),
            principals: HashMap::new(),
            claims_max,
            last_generation: epoch,
        }
    }

    /// Without a claim, the request makes one. A request that expects the generation of the claim
    /// renews it, and replaces its worker. Any other request changes nothing.
    ///
    /// In a full table, the principal with the most claims loses the one that expires first to a
    /// principal with fewer.
    pub fn claim(
        &mut self,
        request: PlacementClaimRequest,
        now: Instant,
    ) -> Result<PlacementClaim, Error> {
        self.drop_expired(now);
        let PlacementClaimRequest { key, wanted, expected, ttl } = request;
        let expires_at = now + ttl.min(TTL_MAX);
        if !self.claims.contains_key(&key) {
            self.make_room(key)?;
        }
        match self.claims.get_mut(&key) {
            Some(held) if expected == Some(held.generation) => {
                if held.worker != wanted {
                    self.last_generation += 1;
                    held.generation = self.last_generation;
                    held.worker = wanted;
                }
                let former = std::mem::replace(&mut held.expires_at, expires_at);
                self.forget_place(former, key);
                self.note_place(expires_at, key);
            }
            Some(held) => return Ok(held.answer(false)),
            None => {
                self.last_generation += 1;
                let generation = self.last_generation;
                self.claims.insert(key, Held { worker: wanted, generation, expires_at });
                self.note_place(expires_at, key);
            }
        }
        #[cfg(debug_assertions)]
        self.check_invariants();
        Ok(self.claims[&key].answer(true))
    }

    /// Counts also claims that have expired since the last request.
    #[must_use]
    pub fn len(&self) -> usize {
        self.claims.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    fn make_room(&mut self, key: PlacementClaimKey) -> Result<(), Error> {
        if self.claims.len() < self.claims_max {
            return Ok(());
        }
        let own = self.principals.get(&key.principal()).map_or(0, BTreeSet::len);
        let largest = self.principals.values().max_by_key(|claims| claims.len());
        let yielding = largest.filter(|claims| claims.len() > own + 1);
        let Some(&(expires_at, yielding)) = yielding.and_then(BTreeSet::first) else {
            return Err(Error::Full(self.claims_max));
        };
        self.claims.remove(&yielding);
        self.forget_place(expires_at, yielding);
        Ok(())
    }

    fn drop_expired(&mut self, now: Instant) {
        while let Some(&(expires_at, key)) = self.expiry_order.first()
            && expires_at <= now
        {
            self.claims.remove(&key);
            self.forget_place(expires_at, key);
        }
    }

    fn note_place(&mut self, expires_at: Instant, key: PlacementClaimKey) {
        self.expiry_order.insert((expires_at, key));
        self.principals.entry(key.principal()).or_default().insert((expires_at, key));
    }

    fn forget_place(&mut self, expires_at: Instant, key: PlacementClaimKey) {
        self.expiry_order.remove(&(expires_at, key));
        let Some(claims) = self.principals.get_mut(&key.principal()) else { return };
        claims.remove(&(expires_at, key));
        if claims.is_empty() {
            self.principals.remove(&key.principal());
        }
    }

    /// Reads no more than a few claims, because every request calls this in debug builds.
    pub fn check_invariants(&self) {
        assert!(self.claims.len() <= self.claims_max, "over the bound");
        assert_eq!(self.claims.len(), self.expiry_order.len(), "claims without a place");
        for (expires_at, key) in self.expiry_order.iter().take(8) {
            let held = self.claims.get(key).expect("a place of a claim that is gone");
            assert_eq!(held.expires_at, *expires_at, "a claim at another's place");
            assert!(self.principals[&key.principal()].contains(&(*expires_at, *key)));
            assert!(held.generation <= self.last_generation, "a generation from nowhere");
        }
    }
}

impl Held {
    fn answer(&self, is_granted: bool) -> PlacementClaim {
        PlacementClaim { worker: self.worker.clone(), generation: self.generation, is_granted }
    }
}

fn worker_id(agent: String, dp_rank: u32) -> Result<WorkerId, Error> {
    if agent.is_empty() || agent.len() > AGENT_ID_BYTES_MAX {
        return Err(Error::AgentIdLength(agent.len()));
    }
    Ok(WorkerId { agent, dp_rank })
}

impl TryFrom<v1::ClaimPlacementRequest> for PlacementClaimRequest {
    type Error = Error;

    fn try_from(wire: v1::ClaimPlacementRequest) -> Result<Self, Error> {
        let key = wire.key.try_into().map_err(|key: Vec<u8>| Error::KeyLength(key.len()))?;
        let ttl = Duration::from_millis(wire.ttl_ms.into());
        if ttl.is_zero() || ttl > TTL_MAX {
            return Err(Error::Ttl(wire.ttl_ms));
        }
        Ok(Self {
            key: PlacementClaimKey(key),
            wanted: worker_id(wire.agent_id, wire.dp_rank)?,
            expected: (wire.generation > 0).then_some(wire.generation),
            ttl,
        })
    }
}

impl From<PlacementClaimRequest> for v1::ClaimPlacementRequest {
    fn from(request: PlacementClaimRequest) -> Self {
        Self {
            key: request.key.0.to_vec(),
            agent_id: request.wanted.agent,
            dp_rank: request.wanted.dp_rank,
            generation: request.expected.unwrap_or(0),
            ttl_ms: u32::try_from(request.ttl.as_millis()).unwrap_or(u32::MAX),
        }
    }
}

impl TryFrom<v1::PlacementClaim> for PlacementClaim {
    type Error = Error;

    fn try_from(wire: v1::PlacementClaim) -> Result<Self, Error> {
        if wire.generation == 0 {
            return Err(Error::NoGeneration);
        }
        Ok(Self {
            worker: worker_id(wire.agent_id, wire.dp_rank)?,
            generation: wire.generation,
            is_granted: wire.granted,
        })
    }
}

impl From<PlacementClaim> for v1::PlacementClaim {
    fn from(claim: PlacementClaim) -> Self {
        Self {
            agent_id: claim.worker.agent,
            dp_rank: claim.worker.dp_rank,
            generation: claim.generation,
            granted: claim.is_granted,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    #[expect(clippy::disallowed_methods, reason = "a start for the tests' own clock")]
    fn start() -> Instant {
        Instant::now()
    }

    fn request(key: u8, agent: u8, expected: Option<u64>) -> PlacementClaimRequest {
        let wanted = WorkerId { agent: format!("w{agent}"), dp_rank: 0 };
        PlacementClaimRequest { key: PlacementClaimKey([key; 16]), wanted, expected, ttl: TTL }
    }

    #[test]
    fn the_second_router_learns_the_worker_of_the_first() {
        let (mut table, now) = (PlacementClaimTable::new(8, 100), start());
        let first = table.claim(request(1, 1, None), now).unwrap();
        assert!(first.is_granted && first.generation > 100);
        let second = table.claim(request(1, 2, None), now).unwrap();
        assert_eq!(second, PlacementClaim { is_granted: false, ..first.clone() });
        let after_expiry = table.claim(request(1, 2, None), now + TTL).unwrap();
        assert!(after_expiry.is_granted && after_expiry.generation > first.generation);
    }

    #[test]
    fn a_late_router_cannot_overwrite_a_newer_claim() {
        let (mut table, now) = (PlacementClaimTable::new(8, 0), start());
        let first = table.claim(request(1, 1, None), now).unwrap();
        let moved = table.claim(request(1, 2, Some(first.generation)), now).unwrap();
        assert!(moved.is_granted && moved.generation > first.generation);
        let late = table.claim(request(1, 1, Some(first.generation)), now).unwrap();
        assert_eq!((late.is_granted, late.worker.agent.as_str()), (false, "w2"));
    }

    #[test]
    fn a_renewed_claim_keeps_its_generation_and_lives_on() {
        let (mut table, now) = (PlacementClaimTable::new(8, 0), start());
        let first = table.claim(request(1, 1, None), now).unwrap();
        let later = now + TTL / 2;
        let renewed = table.claim(request(1, 1, Some(first.generation)), later).unwrap();
        assert_eq!(renewed, first);
        assert!(!table.claim(request(1, 2, None), now + TTL).unwrap().is_granted);
    }

    #[test]
    fn a_full_table_refuses_until_a_claim_expires() {
        let (mut table, now) = (PlacementClaimTable::new(1, 0), start());
        table.claim(request(1, 1, None), now).unwrap();
        assert_eq!(table.claim(request(2, 1, None), now), Err(Error::Full(1)));
        assert!(table.claim(request(2, 1, None), now + TTL).unwrap().is_granted);
    }

    #[test]
    fn a_principal_with_many_claims_leaves_room_to_one_with_few() {
        let (mut table, now) = (PlacementClaimTable::new(100, 0), start());
        let mut claim = |principal: &str, number: u32| {
            let key =
                PlacementClaimKey::from(&SessionKey::new(principal, number.to_string()).unwrap());
            let now = now + Duration::from_millis(number.into());
            table.claim(PlacementClaimRequest { key, ..request(0, 1, None) }, now)
        };
        assert!((0..100).all(|number| claim("hog", number).is_ok()));
        assert_eq!(claim("hog", 100), Err(Error::Full(100)));
        let others = (0..60).filter(|number| claim("other", *number).is_ok()).count();
        assert_eq!(others, 50, "a half each");
        assert!(claim("hog", 99).is_ok_and(|held| !held.is_granted), "the newest claim holds");
        assert!(claim("third", 0).is_ok());
    }

    #[test]
    fn sessions_of_two_principals_never_share_a_key() {
        let key = |principal: &str, id: &str| {
            PlacementClaimKey::from(&SessionKey::new(principal, id).unwrap())
        };
        assert_ne!(key("p", "qs"), key("pq", "s"));
        assert_ne!(key("p", "\0s"), key("p\0", "s"));
    }

    #[test]
    fn impossible_requests_are_refused() {
        let wire = |key: u8| v1::ClaimPlacementRequest::from(request(key, 1, None));
        let read = PlacementClaimRequest::try_from;
        assert_eq!(read(wire(1)), Ok(request(1, 1, None)));
        let short = v1::ClaimPlacementRequest { key: vec![0; 15], ..wire(1) };
        assert_eq!(read(short), Err(Error::KeyLength(15)));
        let nobody = v1::ClaimPlacementRequest { agent_id: String::new(), ..wire(1) };
        assert_eq!(read(nobody), Err(Error::AgentIdLength(0)));
        for ttl_ms in [0, 3_600_001] {
            let bad = v1::ClaimPlacementRequest { ttl_ms, ..wire(1) };
            assert_eq!(read(bad), Err(Error::Ttl(ttl_ms)));
        }
    }

    proptest! {
        /// A model that keeps every claim with its time, without an order.
        #[test]
        fn it_agrees_with_a_list(
            steps in prop::collection::vec((0..6_u8, 0..4_u8, 0..4_u8, 0..20_u64), 0..150),
        ) {
            let mut now = start();
            let mut table = PlacementClaimTable::new(4, 0);
            let mut model: Vec<(u8, u8, u64, Instant)> = vec![];
            let mut newest = 0;
            for (key, agent, expects, wait) in steps {
                now += Duration::from_secs(wait);
                model.retain(|&(.., until)| until > now);
                let held = model.iter().position(|&(of, ..)| of == key);
                // The newest generation, one that is long gone, or none.
                let expected = match (expects, held) {
                    (0 | 1, Some(at)) => Some(model[at].2),
                    (2, _) => Some(0),
                    _ => None,
                };
                let answer = table.claim(request(key, agent, expected), now);
                table.check_invariants();
                match held {
                    Some(at) if expected == Some(model[at].2) => {
                        let answer = answer.unwrap();
                        prop_assert!(answer.is_granted);
                        prop_assert_eq!(answer.generation == model[at].2, agent == model[at].1);
                        newest = newest.max(answer.generation);
                        model[at] = (key, agent, answer.generation, now + TTL);
                    }
                    Some(at) => {
                        let answer = answer.unwrap();
                        prop_assert!(!answer.is_granted);
                        let holder = format!("w{}", model[at].1);
                        prop_assert_eq!((answer.worker.agent, answer.generation), (holder, model[at].2));
                    }
                    None if model.len() == 4 => prop_assert_eq!(answer, Err(Error::Full(4))),
                    None => {
                        let answer = answer.unwrap();
                        prop_assert!(answer.is_granted && answer.generation > newest);
                        newest = answer.generation;
                        model.push((key, agent, answer.generation, now + TTL));
                    }
                }
                prop_assert_eq!(table.len(), model.len());
            }
        }
    }
}
