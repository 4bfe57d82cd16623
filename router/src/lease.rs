//! A turn's claim on a worker's capacity: a count that goes up when the lease is made and down when
//! it is dropped, whatever ends the turn. It is not Clone and rides in the response body.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// What this router has begun on one worker; the same counts in every snapshot of the view.
#[derive(Debug, Default)]
pub struct InFlight {
    turns: AtomicU32,
    opens: AtomicU32,
}

impl InFlight {
    /// Turns in flight.
    pub fn turns(&self) -> u32 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Sessions it has asked the worker to open, ever; wraps.
    pub fn opens(&self) -> u32 {
        self.opens.load(Ordering::Relaxed)
    }

    /// Counts one more.
    pub fn note_open(&self) {
        self.opens.fetch_add(1, Ordering::Relaxed);
    }
}

/// One turn in flight.
#[derive(Debug)]
pub struct Lease(Arc<InFlight>);

impl Lease {
    /// Counts one turn until it is dropped.
    #[must_use]
    pub fn acquire(count: &Arc<InFlight>) -> Self {
        count.turns.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let before = self.0.turns.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(before > 0, "a lease was given back twice");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_counts_until_it_is_dropped() {
        let count = Arc::new(InFlight::default());
        let first = Lease::acquire(&count);
        let second = Lease::acquire(&count);
        assert_eq!(count.turns(), 2);
        drop(first);
        assert_eq!(count.turns(), 1);
        drop(second);
        assert_eq!(count.turns(), 0);
    }
}
