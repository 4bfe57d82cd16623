//! Remembers which numbers the routers' requests had, so that an agent takes no proof twice. Pure.
//!
//! The requests of one router reach an agent out of order: each may wait for a connection. So it is
//! kept which of the last [`NUMBERS`] of each router were seen; older ones are refused. If there
//! are too many routers, the one that was silent for longest is forgotten, and with it every
//! unknown router that said hello no later: it must say hello again. Only proofs that are not
//! forged get here.

use std::collections::HashMap;

use super::{Error, ROUTER_BYTES};

/// The numbers before the highest one that are remembered of each router. A request that waits a
/// second for its connection is overtaken by no more than a few thousand.
const NUMBERS: u64 = 8192;
/// The most routers that are remembered; 1 KiB each. A command of `berth` counts as a router.
const ROUTERS_MAX: usize = 256;

const WORD_BITS: u64 = u64::BITS as u64;

#[derive(Debug)]
struct Window {
    /// The lowest number of a hello whose challenge counts. What has an earlier one was signed
    /// before a router was forgotten, and may have been seen then.
    first_hello: u64,
    /// The highest number of a hello whose challenge a request had.
    last_hello: u64,
    highest: u64,
    /// One bit for each of the last [`NUMBERS`] numbers, by its remainder.
    seen: Box<[u64]>,
    /// When the router was last heard, as a count of all requests.
    heard_at: u64,
}

#[derive(Debug, Default)]
pub(super) struct Windows {
    routers: HashMap<[u8; ROUTER_BYTES], Window>,
    /// Unknown routers count only if they said hello later than this.
    forgotten_hello: Option<u64>,
    requests: u64,
}

impl Window {
    fn new(first_hello: u64, number: u64) -> Self {
        let words = usize::try_from(NUMBERS / WORD_BITS).expect("some hundred");
        let seen = vec![0; words].into();
        Self { first_hello, last_hello: first_hello, highest: number, seen, heard_at: 0 }
    }

    fn bit(&mut self, number: u64) -> (&mut u64, u64) {
        let index = number % NUMBERS;
        let word = usize::try_from(index / WORD_BITS).expect("some hundred");
        (&mut self.seen[word], 1 << (index % WORD_BITS))
    }

    fn take(&mut self, number: u64) -> Result<(), Error> {
        if self.highest.saturating_sub(number) >= NUMBERS {
            return Err(Error::Outdated);
        }
        if number > self.highest {
            if number - self.highest >= NUMBERS {
                self.seen.fill(0);
            } else {
                for skipped in self.highest + 1..number {
                    let (word, bit) = self.bit(skipped);
                    *word &= !bit;
                }
                let (word, bit) = self.bit(number);
                *word &= !bit;
            }
            self.highest = number;
        }
        let (word, bit) = self.bit(number);
        if *word & bit != 0 {
            return Err(Error::Replayed);
        }
        *word |= bit;
        Ok(())
    }
}

impl Windows {
    /// `hello` is the number of the hello whose challenge the request answers.
    pub(super) fn take(
        &mut self,
        router: [u8; ROUTER_BYTES],
        hello: u64,
        number: u64,
    ) -> Result<(), Error> {
        self.requests += 1;
        let requests = self.requests;
        if !self.routers.contains_key(&router) {
            if self.forgotten_hello.is_some_and(|forgotten| hello <= forgotten) {
                return Err(Error::Outdated);
            }
            if self.routers.len() >= ROUTERS_MAX {
                self.forget_one();
            }
        }
        // Not the first one that arrives: another request may have been signed before.
        let first_hello = self.forgotten_hello.map_or(0, |forgotten| forgotten + 1);
        let new = || Window::new(first_hello, number);
        let window = self.routers.entry(router).or_insert_with(new);
        if hello < window.first_hello {
            return Err(Error::Outdated);
        }
        // The numbers of a router go on when it says hello again.
        window.last_hello = window.last_hello.max(hello);
        window.heard_at = requests;
        let taken = window.take(number);
        #[cfg(debug_assertions)]
        self.check_invariants();
        taken
    }

    fn forget_one(&mut self) {
        let oldest = self.routers.iter().min_by_key(|(_, window)| window.heard_at);
        let Some((router, hello)) = oldest.map(|(router, window)| (*router, window.last_hello))
        else {
            return;
        };
        self.routers.remove(&router);
        self.forgotten_hello = self.forgotten_hello.max(Some(hello));
    }

    #[cfg(debug_assertions)]
    fn check_invariants(&self) {
        assert!(self.routers.len() <= ROUTERS_MAX, "{} routers", self.routers.len());
        for window in self.routers.values() {
            assert!(window.heard_at <= self.requests);
            assert!(window.first_hello <= window.last_hello);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const ROUTER: [u8; ROUTER_BYTES] = [1; ROUTER_BYTES];

    #[test]
    fn numbers_in_any_order_are_taken_once() {
        for seed in 0..20 {
            let (mut random, mut windows) = (fastrand::Rng::with_seed(seed), Windows::default());
            let (mut taken, mut highest) = (BTreeSet::new(), 0_u64);
            for step in 0..20_000_u64 {
                let jump = if random.u8(..) == 0 { 3 * NUMBERS } else { 200 };
                let from = (highest + 1).saturating_sub(NUMBERS + 100);
                let number = match random.u8(..4) {
                    0 => random.u64(from..=highest + jump),
                    _ => highest.saturating_sub(random.u64(..50)) + step % 3,
                };
                let want = if highest.saturating_sub(number) >= NUMBERS {
                    Err(Error::Outdated)
                } else if taken.insert(number) {
                    Ok(())
                } else {
                    Err(Error::Replayed)
                };
                assert_eq!(windows.take(ROUTER, 0, number), want, "seed {seed}, {number}");
                highest = highest.max(number);
            }
        }
    }

    #[test]
    fn a_forgotten_router_must_say_hello_again() {
        let mut windows = Windows::default();
        let name = |number: u64| {
            let mut name = [0; ROUTER_BYTES];
            name[..8].copy_from_slice(&number.to_le_bytes());
            name
        };
        for number in 0..ROUTERS_MAX as u64 {
            windows.take(name(number), number, 0).unwrap();
        }
        // The first is heard again, so the second is the one that was silent for longest.
        windows.take(name(0), 0, 1).unwrap();
        windows.take(name(1000), 1000, 0).unwrap();
        assert_eq!(windows.take(name(1), 1, 0), Err(Error::Outdated), "a proof was taken twice");
        assert_eq!(windows.take(name(0), 0, 1), Err(Error::Replayed));
        windows.take(name(0), 0, 2).unwrap();
        windows.take(name(1), 1001, 1).unwrap();
        assert_eq!(windows.take(name(1), 1, 0), Err(Error::Outdated), "a proof was taken twice");
        // What it signs with the challenges of two hellos at once counts in any order.
        windows.take(name(1), 1003, 3).unwrap();
        windows.take(name(1), 1001, 2).unwrap();
        windows.take(name(1), 1000, 4).unwrap();
    }
}
