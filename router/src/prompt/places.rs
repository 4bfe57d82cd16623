//! Gives places for work that keeps a processor busy: one to each client, and some to all together.
//!
//! A client's next work waits for its earlier work, and only then for a place among all clients. So
//! nobody waits for more than one piece of work of each other client. `models` counts prompts that
//! look too long in such places.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Number of remembered clients at which those that wait for nothing are first removed.
const CLIENTS_MIN: usize = 64;

/// The places, and the clients that hold or want one.
#[derive(Debug)]
pub(super) struct Places {
    all: Arc<Semaphore>,
    clients: Mutex<Clients>,
}

#[derive(Debug, Default)]
struct Clients {
    /// The one place of each client. It is gone when nobody holds it or waits for it.
    places: HashMap<Arc<str>, Weak<Semaphore>>,
    /// The number of clients at which those whose place is gone are removed next.
    cleanup_at: usize,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    _of_client: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Places {
    /// Makes places of which `all` are the permits that the clients share.
    pub(super) fn new(all: Arc<Semaphore>) -> Self {
        Self { all, clients: Mutex::default() }
    }

    /// Waits for a place of this client. Dropping the future gives up the wait.
    pub(super) async fn take(&self, client: &Arc<str>) -> Place {
        const NEVER_CLOSED: &str = "these semaphores are never closed";
        let own = self.clients.lock().place(client);
        let of_client = own.acquire_owned().await.expect(NEVER_CLOSED);
        let of_all = Arc::clone(&self.all).acquire_owned().await.expect(NEVER_CLOSED);
        Place { _of_client: of_client, _of_all: of_all }
    }
}

impl Clients {
    fn place(&mut self, client: &Arc<str>) -> Arc<Semaphore> {
        if let Some(place) = self.places.get(client).and_then(Weak::upgrade) {
            return place;
        }
        if self.places.len() >= self.cleanup_at.max(CLIENTS_MIN) {
            self.places.retain(|_, place| place.strong_count() > 0);
            self.cleanup_at = 2 * self.places.len();
        }
        let place = Arc::new(Semaphore::new(1));
        self.places.insert(Arc::clone(client), Arc::downgrade(&place));
        place
    }
}

#[cfg(test)]
mod tests {
    use std::{
        pin::{Pin, pin},
        task::{Context, Poll, Waker},
    };

    use super::*;

    /// Returns the place if there is one now.
    fn place(taking: Pin<&mut impl Future<Output = Place>>) -> Option<Place> {
        match taking.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(place) => Some(place),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_client_that_wants_many_places_leaves_the_next_one_to_another() {
        let places = Places::new(Arc::new(Semaphore::new(1)));
        let (hog, other): (Arc<str>, Arc<str>) = ("hog".into(), "other".into());
        let first = place(pin!(places.take(&hog)));
        let (mut second, mut of_other) = (pin!(places.take(&hog)), pin!(places.take(&other)));
        assert!(first.is_some() && place(second.as_mut()).is_none());
        assert!(place(of_other.as_mut()).is_none());
        drop(first);
        // The other one asked later, but the client that has had its turn is behind it.
        assert!(place(second.as_mut()).is_none());
        let of_other = place(of_other);
        assert!(of_other.is_some());
        drop(of_other);
        assert!(place(second).is_some());
    }

    #[test]
    fn clients_without_a_place_are_forgotten() {
        let places = Places::new(Arc::new(Semaphore::new(1)));
        for number in 0..1_000 {
            assert!(place(pin!(places.take(&format!("c{number}").into()))).is_some());
        }
        assert!(places.clients.lock().places.len() <= CLIENTS_MIN);
    }
}
