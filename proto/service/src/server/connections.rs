//! Decides which connections of a port stay open, and which one is closed to make room. Pure.
//!
//! A table has a fixed number of *places*, and limits those of one peer. A connection is *idle*
//! while it has no complete request header and no unfinished answer. A new connection without a
//! place takes that of the longest idle one, which goes to a *reserve* place, from where the
//! longest idle one is closed. If none is idle, the new one gets a reserve place itself.
//!
//! A request counts for more than an idle connection: if its own has no usual place any more, it
//! takes one as a new connection would. While there is none, the server answers health checks in
//! the reserve, and refuses all other requests at once.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    time::Instant,
};

/// Each is taken for milliseconds, or until the next connection needs the place.
pub(super) const RESERVE_PLACES: usize = 16;

/// An IPv4 address, or an IPv6 network of 64 bits, the smallest that one host usually gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Peer(IpAddr);

impl From<IpAddr> for Peer {
    fn from(addr: IpAddr) -> Self {
        Self(match addr.to_canonical() {
            IpAddr::V4(addr) => addr.into(),
            IpAddr::V6(addr) => {
                let [a, b, c, d, ..] = addr.segments();
                std::net::Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
            }
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Any request.
    Usual,
    /// Health checks only.
    Reserve,
}

/// A connection in the table, by the order in which connections were opened.
pub(super) type ConnectionId = u64;

#[derive(Debug)]
pub(super) struct Opened<H> {
    pub(super) id: ConnectionId,
    /// The connection that must be closed now to make room.
    pub(super) evicted: Option<H>,
}

#[derive(Debug)]
pub(super) struct Begun<H> {
    /// The place of its connection. `None`: it was closed to make room.
    pub(super) place: Option<Place>,
    /// The connection that must be closed now to make room.
    pub(super) evicted: Option<H>,
}

/// All open connections of a port. `H` is what the caller needs to close a connection.
#[derive(Debug)]
pub(super) struct ConnectionTable<H> {
    /// Usual places, of which one peer gets at most `per_peer_max`.
    places_max: usize,
    per_peer_max: usize,
    connections: HashMap<ConnectionId, Connection<H>>,
    usual_count: usize,
    /// Number of usual places that each peer has. No peer has 0.
    peer_counts: HashMap<Peer, usize>,
    /// Idle connections with a usual place, longest idle first.
    idle: BTreeMap<IdleOrder, ConnectionId>,
    /// The same connections, by peer.
    idle_by_peer: BTreeSet<(Peer, IdleOrder)>,
    /// Idle connections with a reserve place, longest idle first.
    idle_in_reserve: BTreeMap<IdleOrder, ConnectionId>,
    /// The last number given to a connection, or to the begin of an idle time.
    last_number: u64,
}

/// Numbers the begins of idle times. A smaller number is an earlier begin.
type IdleOrder = u64;

#[derive(Debug, Clone, Copy)]
enum Room {
    Free,
    /// That of an idle connection, which gives way.
    Of(ConnectionId),
}

#[derive(Debug)]
struct Connection<H> {
    peer: Peer,
    place: Place,
    handle: H,
    /// When the connection became idle. `None` while a request is served.
    idle_since: Option<Idle>,
}

#[derive(Debug, Clone, Copy)]
struct Idle {
    order: IdleOrder,
    at: Instant,
}

impl<H> Connection<H> {
    fn new(peer: Peer, place: Place, handle: H) -> Self {
        Self { peer, place, handle, idle_since: None }
    }
}

impl<H> ConnectionTable<H> {
    pub(super) fn new(places_max: usize, per_peer_max: usize) -> Self {
        Self {
            places_max: places_max.max(1),
            per_peer_max: per_peer_max.max(1),
            connections: HashMap::new(),
            usual_count: 0,
            peer_counts: HashMap::new(),
            idle: BTreeMap::new(),
            idle_by_peer: BTreeSet::new(),
            idle_in_reserve: BTreeMap::new(),
            last_number: 0,
        }
    }

    /// The new connection is idle. `None` if there is no place at all: the caller closes it.
    pub(super) fn open(&mut self, peer: Peer, handle: H, now: Instant) -> Option<Opened<H>> {
        let (place, evicted) = match self.make_room(peer) {
            Some(evicted) => (Place::Usual, evicted),
            None => (Place::Reserve, self.make_room_in_reserve()?),
        };
        let id = self.next_number();
        self.insert(id, Connection::new(peer, place, handle));
        self.set_idle(id, now);
        self.check_in_debug();
        Some(Opened { id, evicted })
    }

    pub(super) fn evict_longest_idle(&mut self) -> Option<H> {
        let longest_idle = self.idle.first_key_value().map(|(_, &id)| id);
        self.remove(self.longest_idle_in_reserve().or(longest_idle)?)
    }

    /// A connection without a usual place gets one where a new connection would.
    pub(super) fn begin_request(&mut self, id: ConnectionId, peer: Peer) -> Begun<H> {
        let mut begun = Begun { place: self.place(id), evicted: None };
        if begun.place == Some(Place::Reserve)
            // Out of the reserve first: it may be the one that gives way there.
            && let Some(handle) = self.remove(id)
        {
            if let Some(evicted) = self.make_room(peer) {
                begun = Begun { place: Some(Place::Usual), evicted };
            }
            let place = begun.place.unwrap_or(Place::Reserve);
            self.insert(id, Connection::new(peer, place, handle));
        }
        self.set_busy(id);
        self.check_in_debug();
        begun
    }

    /// Records that the answer was passed on to its end, or that there will be none.
    pub(super) fn end_request(&mut self, id: ConnectionId, now: Instant) {
        self.set_idle(id, now);
        self.check_in_debug();
    }

    pub(super) fn close(&mut self, id: ConnectionId) {
        drop(self.remove(id));
        self.check_in_debug();
    }

    pub(super) fn len(&self) -> usize {
        self.connections.len()
    }

    fn longest_idle_of(&self, peer: Peer) -> Option<ConnectionId> {
        let (_, order) = self.idle_by_peer.range((peer, 0)..=(peer, u64::MAX)).next()?;
        self.idle.get(order).copied()
    }

    /// Since when the connection is idle that a new one of `peer` would close; `None` if it would
    /// close none.
    pub(super) fn closes_idle_since(&self, peer: Peer) -> Option<Instant> {
        let id = match self.usual_room(peer) {
            Some(Room::Free) => return None,
            _ if self.has_free_reserve() => return None,
            Some(Room::Of(id)) => self.longest_idle_in_reserve().unwrap_or(id),
            None => self.longest_idle_in_reserve()?,
        };
        self.connections.get(&id)?.idle_since.map(|idle| idle.at)
    }

    fn usual_room(&self, peer: Peer) -> Option<Room> {
        let peer_count = self.peer_counts.get(&peer).copied().unwrap_or(0);
        if peer_count >= self.per_peer_max {
            // A peer that has its share gets room from its own connections only.
            self.longest_idle_of(peer).map(Room::Of)
        } else if self.usual_count < self.places_max {
            Some(Room::Free)
        } else {
            self.idle.first_key_value().map(|(_, &id)| Room::Of(id))
        }
    }

    /// Frees a usual place if all are taken; `None` if none can be freed. The inner value is the
    /// connection to close.
    fn make_room(&mut self, peer: Peer) -> Option<Option<H>> {
        Some(match self.usual_room(peer)? {
            Room::Free => None,
            Room::Of(id) => self.give_way(id),
        })
    }

    /// The idle connection goes to the reserve. Returns the connection to close.
    fn give_way(&mut self, id: ConnectionId) -> Option<H> {
        let Some(evicted) = self.make_room_in_reserve() else { return self.remove(id) };
        let one = self.connections.get(&id)?;
        let (peer, idle) = (one.peer, one.idle_since?);
        let handle = self.remove(id)?;
        self.insert(id, Connection::new(peer, Place::Reserve, handle));
        self.set_idle(id, idle.at);
        evicted
    }

    /// As [`Self::make_room`], in the reserve.
    fn make_room_in_reserve(&mut self) -> Option<Option<H>> {
        if self.has_free_reserve() {
            return Some(None);
        }
        let id = self.longest_idle_in_reserve()?;
        Some(self.remove(id))
    }

    fn has_free_reserve(&self) -> bool {
        self.connections.len() - self.usual_count < RESERVE_PLACES
    }

    fn longest_idle_in_reserve(&self) -> Option<ConnectionId> {
        self.idle_in_reserve.first_key_value().map(|(_, &id)| id)
    }

    fn insert(&mut self, id: ConnectionId, connection: Connection<H>) {
        if connection.place == Place::Usual {
            self.usual_count += 1;
            *self.peer_counts.entry(connection.peer).or_default() += 1;
        }
        self.connections.insert(id, connection);
    }

    fn remove(&mut self, id: ConnectionId) -> Option<H> {
        self.set_busy(id);
        let Connection { peer, place, handle, .. } = self.connections.remove(&id)?;
        if place == Place::Usual {
            self.usual_count -= 1;
            let count = self.peer_counts.get_mut(&peer).expect("its connection was counted");
            *count -= 1;
            if *count == 0 {
                self.peer_counts.remove(&peer);
            }
        }
        Some(handle)
    }

    fn place(&self, id: ConnectionId) -> Option<Place> {
        self.connections.get(&id).map(|one| one.place)
    }

    fn set_idle(&mut self, id: ConnectionId, at: Instant) {
        let order = self.next_number();
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.idle_since.is_some() {
            return;
        }
        connection.idle_since = Some(Idle { order, at });
        match connection.place {
            Place::Usual => {
                self.idle.insert(order, id);
                self.idle_by_peer.insert((connection.peer, order));
            }
            Place::Reserve => drop(self.idle_in_reserve.insert(order, id)),
        }
    }

    fn set_busy(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Some(Idle { order, .. }) = connection.idle_since.take() else { return };
        match connection.place {
            Place::Usual => {
                self.idle.remove(&order);
                self.idle_by_peer.remove(&(connection.peer, order));
            }
            Place::Reserve => drop(self.idle_in_reserve.remove(&order)),
        }
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Checks the invariants in tests. Not in all debug builds, because a check reads the whole
    /// table, and a server of thousands of connections would become slow.
    fn check_in_debug(&self) {
        #[cfg(test)]
        self.check_invariants();
    }

    #[cfg(test)]
    pub(super) fn check_invariants(&self) {
        let usual = self.connections.values().filter(|one| one.place == Place::Usual);
        assert_eq!(usual.clone().count(), self.usual_count, "places miscounted");
        assert!(self.usual_count <= self.places_max, "more connections than places");
        assert!(self.connections.len() - self.usual_count <= RESERVE_PLACES, "reserve overfull");
        let mut peer_counts = HashMap::new();
        usual.for_each(|one| *peer_counts.entry(one.peer).or_default() += 1);
        assert_eq!(peer_counts, self.peer_counts, "peers miscounted");
        assert!(peer_counts.values().all(|&count| count <= self.per_peer_max), "a peer has more");
        for (id, one) in &self.connections {
            let Some(Idle { order, .. }) = one.idle_since else { continue };
            let (idle, other) = match one.place {
                Place::Usual => (&self.idle, &self.idle_in_reserve),
                Place::Reserve => (&self.idle_in_reserve, &self.idle),
            };
            assert_eq!(idle.get(&order), Some(id), "an idle connection is not in order");
            assert!(!other.contains_key(&order));
        }
        let idle_count = self.connections.values().filter(|one| one.idle_since.is_some()).count();
        assert_eq!(idle_count, self.idle.len() + self.idle_in_reserve.len());
        assert_eq!(self.idle.len(), self.idle_by_peer.len());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::clock::now;

    fn peer(number: u8) -> Peer {
        IpAddr::from([10, 0, 0, number]).into()
    }

    /// Opens a connection that has been idle since its only request.
    fn open_used<H>(table: &mut ConnectionTable<H>, number: u8, handle: H) -> Opened<H> {
        let opened = table.open(peer(number), handle, now()).unwrap();
        table.begin_request(opened.id, peer(number));
        table.end_request(opened.id, now());
        opened
    }

    #[test]
    fn a_newcomer_takes_the_place_of_the_connection_that_was_idle_for_longest() {
        let mut table = ConnectionTable::new(2, 2);
        let first = table.open(peer(1), 'a', now()).unwrap();
        let second = open_used(&mut table, 1, 'b');
        table.begin_request(first.id, peer(1));
        table.end_request(first.id, now());
        let third = table.open(peer(2), 'c', now()).unwrap();
        assert_eq!(table.place(third.id), Some(Place::Usual));
        assert_eq!(table.place(second.id), Some(Place::Reserve));
        table.begin_request(first.id, peer(1));
        table.begin_request(third.id, peer(2));
        let begun = table.begin_request(second.id, peer(1));
        assert_eq!(begun.place, Some(Place::Reserve), "all work");
    }

    #[test]
    fn the_longest_idle_connection_of_the_reserve_is_closed() {
        let mut table = ConnectionTable::new(1, 1);
        let first = open_used(&mut table, 1, 0);
        for number in 1..=RESERVE_PLACES {
            assert_eq!(table.closes_idle_since(peer(1)), None);
            assert_eq!(open_used(&mut table, 1, number).evicted, None);
        }
        assert_eq!(table.place(first.id), Some(Place::Reserve));
        let begun = table.begin_request(first.id, peer(1));
        assert_eq!((begun.place, begun.evicted), (Some(Place::Usual), None));
        // The one that lost its place for this is in the reserve now.
        let idle_since = table.closes_idle_since(peer(2)).unwrap();
        let newest = table.open(peer(2), 99, idle_since + Duration::from_secs(1)).unwrap();
        assert_eq!(newest.evicted, Some(1));
    }

    #[test]
    fn when_all_work_a_newcomer_gets_the_reserve_and_silent_ones_in_it_give_way() {
        let mut table = ConnectionTable::new(1, 1);
        let busy = table.open(peer(1), 0, now()).unwrap();
        table.begin_request(busy.id, peer(1));
        for number in 0..RESERVE_PLACES {
            let opened = table.open(peer(2), number, now()).unwrap();
            assert_eq!((table.place(opened.id), opened.evicted), (Some(Place::Reserve), None));
        }
        let health = table.open(peer(3), 99, now()).unwrap();
        assert_eq!((table.place(health.id), health.evicted), (Some(Place::Reserve), Some(0)));
    }

    #[test]
    fn a_peer_at_its_limit_takes_its_own_place_and_no_other() {
        let mut table = ConnectionTable::new(10, 2);
        let other = open_used(&mut table, 1, "other");
        let [a, b] = ["a", "b"].map(|name| open_used(&mut table, 2, name));
        let c = open_used(&mut table, 2, "c");
        let places = [other, a, b, c].map(|opened| table.place(opened.id).unwrap());
        assert_eq!(places, [Place::Usual, Place::Reserve, Place::Usual, Place::Usual]);
    }

    #[test]
    fn a_request_takes_an_idle_place_after_its_own_was_taken() {
        let mut table = ConnectionTable::new(3, 2);
        let asks = open_used(&mut table, 1, "asks");
        let other = open_used(&mut table, 2, "other");
        let silent = open_used(&mut table, 1, "silent");
        table.open(peer(1), "new", now()).unwrap();
        assert_eq!(table.place(asks.id), Some(Place::Reserve));
        assert_eq!(table.begin_request(asks.id, peer(1)).place, Some(Place::Usual));
        assert_eq!(table.place(silent.id), Some(Place::Reserve));
        assert_eq!(table.place(other.id), Some(Place::Usual));
        table.close(asks.id);
        assert_eq!(table.begin_request(asks.id, peer(1)).place, None, "it is closed");
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_one_peer() {
        let of = |text: &str| Peer::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:2"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    }

    proptest! {
        #[test]
        fn the_table_stays_consistent(ops in prop::collection::vec((0..4_u8, 0..3_u8, 0..30_u64), 0..200)) {
            let mut table = ConnectionTable::new(8, 5);
            let mut ids = vec![];
            for (op, peer_number, pick) in ops {
                let picked = ids.get(usize::try_from(pick).unwrap() % ids.len().max(1)).copied();
                match (op, picked) {
                    (0, _) | (_, None) => {
                        let closes = table.closes_idle_since(peer(peer_number)).is_some();
                        let was = table.len();
                        let opened = table.open(peer(peer_number), (), now());
                        prop_assert_eq!(opened.is_some() && table.len() == was, closes);
                        ids.extend(opened.map(|new| (new.id, peer(peer_number))));
                    }
                    (1, Some((id, peer))) => drop(table.begin_request(id, peer)),
                    (2, Some((id, _))) => table.end_request(id, now()),
                    (_, Some((id, _))) => table.close(id),
                }
            }
            ids.into_iter().for_each(|(id, _)| table.close(id));
            prop_assert_eq!(table.len(), 0);
        }
    }
}
