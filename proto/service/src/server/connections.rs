//! Decides which connections of a port stay open, and which one is closed to make room. Pure.
//!
//! The server in the parent module asks a [`ConnectionTable`] about each new connection. The table
//! has a fixed number of *places*, and limits the places that one peer (an address of clients) has.
//! A connection is *idle* while it has no complete request header and no unfinished answer. If a
//! new connection finds no place, the table closes the connection that has been idle for longest.
//! If no connection is idle, the new one gets a *reserve* place. There, the server answers health
//! checks, and refuses all other requests at once.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

/// The number of reserve places of a port. Each is taken for milliseconds, or until the next
/// connection needs the place.
pub(super) const RESERVE_PLACES: usize = 16;

/// The address range of one client or proxy: an IPv4 address, or an IPv6 network of 64 bits, which
/// is the smallest network that one host usually gets.
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

/// What a connection may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Any request.
    Usual,
    /// Health checks only.
    Reserve,
}

/// A connection in the table, by the order in which connections were opened.
pub(super) type ConnectionId = u64;

/// A connection that the table has accepted.
#[derive(Debug)]
pub(super) struct Opened<H> {
    pub(super) id: ConnectionId,
    pub(super) place: Place,
    /// The connection that must be closed now to make room.
    pub(super) evicted: Option<H>,
}

/// All open connections of a port. `H` is what the caller needs to close a connection.
#[derive(Debug)]
pub(super) struct ConnectionTable<H> {
    places_max: usize,
    per_peer_max: usize,
    connections: HashMap<ConnectionId, Connection<H>>,
    /// Number of connections that have a usual place.
    usual_count: usize,
    /// Number of usual places that each peer has. No peer has 0.
    peer_counts: HashMap<Peer, usize>,
    /// Idle connections with a usual place, longest idle first.
    idle: BTreeMap<IdleOrder, ConnectionId>,
    /// The same connections, by peer.
    idle_by_peer: BTreeSet<(Peer, IdleOrder)>,
    /// Idle connections with a reserve place, longest idle first.
    idle_in_reserve: BTreeMap<IdleOrder, ConnectionId>,
    /// The last number given to a connection or to the begin of an idle time.
    last_number: u64,
}

/// Numbers the begins of idle times. A smaller number is an earlier begin.
type IdleOrder = u64;

#[derive(Debug)]
struct Connection<H> {
    peer: Peer,
    place: Place,
    handle: H,
    /// When the connection became idle. `None` while a request is served.
    idle_since: Option<IdleOrder>,
}

impl<H> ConnectionTable<H> {
    /// Creates an empty table with `places_max` usual places, of which one peer gets at most
    /// `per_peer_max`.
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

    /// Adds a new connection, which is idle. Returns `None` if there is no place at all, not even
    /// in the reserve. The caller then closes the new connection.
    pub(super) fn open(&mut self, peer: Peer, handle: H) -> Option<Opened<H>> {
        let peer_count = self.peer_counts.get(&peer).copied().unwrap_or(0);
        let (place, evicted) = if peer_count >= self.per_peer_max {
            // A peer that has its share gets room from its own connections only.
            match self.longest_idle_of(peer) {
                Some(id) => (Place::Usual, self.remove(id)),
                None => (Place::Reserve, self.make_room_in_reserve()?),
            }
        } else if self.usual_count < self.places_max {
            (Place::Usual, None)
        } else {
            match self.idle.first_key_value() {
                Some((_, &id)) => (Place::Usual, self.remove(id)),
                None => (Place::Reserve, self.make_room_in_reserve()?),
            }
        };
        let id = self.next_number();
        if place == Place::Usual {
            self.usual_count += 1;
            *self.peer_counts.entry(peer).or_default() += 1;
        }
        self.connections.insert(id, Connection { peer, place, handle, idle_since: None });
        self.set_idle(id);
        self.check_in_debug();
        Some(Opened { id, place, evicted })
    }

    /// Removes the connection that has been idle for longest, and returns it to be closed.
    pub(super) fn evict_longest_idle(&mut self) -> Option<H> {
        let (_, &id) = self.idle.first_key_value()?;
        self.remove(id)
    }

    /// Records that a request's header has arrived. Returns false if the connection was evicted;
    /// then it must not serve the request.
    pub(super) fn begin_request(&mut self, id: ConnectionId) -> bool {
        let is_open = self.connections.contains_key(&id);
        self.set_busy(id);
        self.check_in_debug();
        is_open
    }

    /// Records that the answer was passed on to its end, or that there will be none.
    pub(super) fn end_request(&mut self, id: ConnectionId) {
        self.set_idle(id);
        self.check_in_debug();
    }

    /// Removes a closed connection. Does nothing if it was evicted.
    pub(super) fn close(&mut self, id: ConnectionId) {
        drop(self.remove(id));
        self.check_in_debug();
    }

    /// Returns the number of connections, the reserve's included.
    pub(super) fn len(&self) -> usize {
        self.connections.len()
    }

    fn longest_idle_of(&self, peer: Peer) -> Option<ConnectionId> {
        let (_, order) = self.idle_by_peer.range((peer, 0)..=(peer, u64::MAX)).next()?;
        self.idle.get(order).copied()
    }

    /// Frees a reserve place if all are taken. The inner value is the connection to close. Returns
    /// `None` if no reserve place can be freed.
    fn make_room_in_reserve(&mut self) -> Option<Option<H>> {
        if self.connections.len() - self.usual_count < RESERVE_PLACES {
            return Some(None);
        }
        let (_, &id) = self.idle_in_reserve.first_key_value()?;
        Some(self.remove(id))
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

    fn set_idle(&mut self, id: ConnectionId) {
        let order = self.next_number();
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.idle_since.is_some() {
            return;
        }
        connection.idle_since = Some(order);
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
        let Some(order) = connection.idle_since.take() else { return };
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

    /// Panics if the parts of the table contradict each other.
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
            let Some(order) = one.idle_since else { continue };
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
    use proptest::prelude::*;

    use super::*;

    fn peer(number: u8) -> Peer {
        IpAddr::from([10, 0, 0, number]).into()
    }

    #[test]
    fn a_newcomer_takes_the_place_of_the_connection_that_was_idle_for_longest() {
        let mut table = ConnectionTable::new(2, 2);
        let first = table.open(peer(1), 'a').unwrap();
        let second = table.open(peer(1), 'b').unwrap();
        assert!(table.begin_request(first.id));
        table.end_request(first.id);
        let third = table.open(peer(2), 'c').unwrap();
        assert_eq!((third.place, third.evicted), (Place::Usual, Some('b')));
        assert!(!table.begin_request(second.id), "an evicted connection serves nothing");
    }

    #[test]
    fn when_all_work_a_newcomer_gets_the_reserve_and_silent_ones_in_it_give_way() {
        let mut table = ConnectionTable::new(1, 1);
        let busy = table.open(peer(1), 0).unwrap();
        assert!(table.begin_request(busy.id));
        for number in 0..RESERVE_PLACES {
            let opened = table.open(peer(2), number).unwrap();
            assert_eq!((opened.place, opened.evicted), (Place::Reserve, None));
        }
        let health = table.open(peer(3), 99).unwrap();
        assert_eq!((health.place, health.evicted), (Place::Reserve, Some(0)));
    }

    #[test]
    fn a_peer_at_its_limit_loses_its_own_connection_and_no_other() {
        let mut table = ConnectionTable::new(10, 2);
        let other = table.open(peer(1), "other").unwrap();
        for name in ["a", "b"] {
            assert!(table.open(peer(2), name).unwrap().evicted.is_none());
        }
        assert_eq!(table.open(peer(2), "c").unwrap().evicted, Some("a"));
        assert!(table.begin_request(other.id));
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
                    (0, _) | (_, None) => ids.extend(table.open(peer(peer_number), ()).map(|new| new.id)),
                    (1, Some(id)) => drop(table.begin_request(id)),
                    (2, Some(id)) => table.end_request(id),
                    (_, Some(id)) => table.close(id),
                }
            }
            ids.into_iter().for_each(|id| table.close(id));
            prop_assert_eq!(table.len(), 0);
        }
    }
}
