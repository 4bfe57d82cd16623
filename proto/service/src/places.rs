//! Shares out places for work that keeps a processor busy.
//!
//! A long body takes from milliseconds to seconds to read. On a thread that serves requests, all
//! other requests would wait for it. So such work runs on blocking threads, in a place. A client
//! that has as many places as it may waits for its earlier work, and only then for a place among
//! all clients. So nobody waits for more than a client's places of each other client.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The largest body on which a thread that serves requests works itself, in bytes. The slowest
/// kinds take 15 ms for so much, and the prompts of coding agents a millisecond.
pub const INLINE_BYTES_MAX: usize = 256 << 10;
/// Number of remembered clients at which those that wait for nothing are first removed.
const CLIENTS_MIN: usize = 64;

#[derive(Debug)]
pub struct Places {
    all: Arc<Semaphore>,
    per_client: usize,
    clients: Mutex<Clients>,
}

#[derive(Debug, Default)]
struct Clients {
    /// The places of each client. They are gone when nobody holds one or waits for one.
    places: HashMap<Arc<str>, Weak<Semaphore>>,
    /// The number of clients at which those whose place is gone are removed next.
    cleanup_at: usize,
}

#[derive(Debug)]
struct Place {
    _of_client: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Default for Places {
    /// Makes places for half of the processors, at least two. One client takes all but one of them.
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let places = (processors / 2).max(2);
        Self { per_client: places - 1, ..Self::new(Arc::new(Semaphore::new(places))) }
    }
}

impl Places {
    /// Makes places of which `all` are the permits that the clients share. Each client gets one.
    #[must_use]
    pub fn new(all: Arc<Semaphore>) -> Self {
        Self { all, per_client: 1, clients: Mutex::default() }
    }

    /// Dropping the future gives up the wait for a place; work that has begun goes on to its end.
    pub async fn run<T: Send + 'static>(
        &self,
        client: &Arc<str>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let place = self.take(client).await;
        let task = tokio::task::spawn_blocking(move || {
            let _place = place;
            work()
        });
        task.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    async fn take(&self, client: &Arc<str>) -> Place {
        const NEVER_CLOSED: &str = "these semaphores are never closed";
        let own = self.clients.lock().place(client, self.per_client);
        let of_client = own.acquire_owned().await.expect(NEVER_CLOSED);
        let of_all = Arc::clone(&self.all).acquire_owned().await.expect(NEVER_CLOSED);
        Place { _of_client: of_client, _of_all: of_all }
    }
}

impl Clients {
    fn place(&mut self, client: &Arc<str>, per_client: usize) -> Arc<Semaphore> {
        if let Some(place) = self.places.get(client).and_then(Weak::upgrade) {
            return place;
        }
        if self.places.len() >= self.cleanup_at.max(CLIENTS_MIN) {
            self.places.retain(|_, place| place.strong_count() > 0);
            self.cleanup_at = 2 * self.places.len();
        }
        let place = Arc::new(Semaphore::new(per_client));
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
    fn a_client_alone_takes_all_places_but_one() {
        let (places, other) = (Places::default(), "other".into());
        let hog: Arc<str> = "hog".into();
        let all = places.all.available_permits();
        let held: Vec<_> = (1..all).filter_map(|_| place(pin!(places.take(&hog)))).collect();
        assert_eq!(held.len(), all - 1);
        assert!(place(pin!(places.take(&hog))).is_none(), "the last one is another's");
        assert!(place(pin!(places.take(&other))).is_some());
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
