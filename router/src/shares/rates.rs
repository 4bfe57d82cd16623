//! Limits what each sharer uses per minute: requests and tokens. Pure.
//!
//! The limit is a bucket that holds a minute's worth (the generic cell rate algorithm, with one
//! time per bucket as its state). Tokens are only estimated when a request begins, and are settled
//! later: the bucket may go into debt, and gets back what was taken in excess. The crate `governor`
//! has neither debt nor refunds, and reads a clock.

use std::{
    collections::HashMap,
    num::NonZeroU32,
    sync::Arc,
    time::{Duration, Instant},
};

/// Beyond that, the one that is nearest to a full bucket is forgotten. An entry takes about 150
/// bytes, so this many take 2.5 MiB.
pub(crate) const SHARERS_MAX: usize = 16_384;
/// An empty bucket fills up in this time.
const MINUTE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    /// When the bucket is full again. `None`: it is full.
    full_at: Option<Instant>,
}

impl Bucket {
    /// A request for more than a full bucket has takes all of a full one, and leaves a debt. The
    /// error is the time after which the bucket has the units.
    fn take(&mut self, per_minute: NonZeroU32, units: u64, now: Instant) -> Result<(), Duration> {
        let missing = self.missing(now);
        let needed = flow_time(per_minute, units.min(u64::from(per_minute.get())));
        let after = missing + needed;
        if after > MINUTE {
            return Err(after - MINUTE);
        }
        self.add(per_minute, units, now);
        Ok(())
    }

    /// Takes `units` unconditionally.
    fn add(&mut self, per_minute: NonZeroU32, units: u64, now: Instant) {
        self.full_at = now.checked_add(self.missing(now) + flow_time(per_minute, units));
    }

    fn put_back(&mut self, per_minute: NonZeroU32, units: u64, now: Instant) {
        let missing = self.missing(now).saturating_sub(flow_time(per_minute, units));
        self.full_at = now.checked_add(missing).filter(|_| !missing.is_zero());
    }

    /// How long the bucket takes to be full.
    fn missing(&self, now: Instant) -> Duration {
        self.full_at.map_or(Duration::ZERO, |full_at| full_at.saturating_duration_since(now))
    }
}

/// At most ten years, so that it fits clocks.
fn flow_time(per_minute: NonZeroU32, units: u64) -> Duration {
    const YEARS_NS: u128 = 10 * 366 * 24 * 3600 * 1_000_000_000;
    // Rounded up, so that after a refusal's time there are enough units.
    let nanos = (MINUTE.as_nanos() * u128::from(units)).div_ceil(u128::from(per_minute.get()));
    Duration::from_nanos(u64::try_from(nanos.min(YEARS_NS)).expect("ten years fit"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rated {
    Requests,
    /// Counts prompts and answers.
    Tokens,
}

#[derive(Debug, Default)]
struct Buckets {
    requests: Bucket,
    tokens: Bucket,
}

impl Buckets {
    fn bucket(&mut self, rated: Rated) -> &mut Bucket {
        match rated {
            Rated::Requests => &mut self.requests,
            Rated::Tokens => &mut self.tokens,
        }
    }

    fn missing(&self, now: Instant) -> Duration {
        self.requests.missing(now).max(self.tokens.missing(now))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Rates {
    buckets: HashMap<Arc<str>, Buckets>,
}

impl Rates {
    /// The error is the time after which the sharer has the units.
    pub(crate) fn take(
        &mut self,
        sharer: &Arc<str>,
        rated: Rated,
        per_minute: NonZeroU32,
        units: u64,
        now: Instant,
    ) -> Result<(), Duration> {
        let taken = self.buckets_of(sharer, now).bucket(rated).take(per_minute, units, now);
        self.check_invariants();
        taken
    }

    pub(crate) fn settle(
        &mut self,
        sharer: &Arc<str>,
        rated: Rated,
        per_minute: NonZeroU32,
        (estimated, used): (u64, u64),
        now: Instant,
    ) {
        let bucket = self.buckets_of(sharer, now).bucket(rated);
        if used >= estimated {
            bucket.add(per_minute, used - estimated, now);
        } else {
            bucket.put_back(per_minute, estimated - used, now);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.buckets.len()
    }

    fn buckets_of(&mut self, sharer: &Arc<str>, now: Instant) -> &mut Buckets {
        if self.buckets.len() >= SHARERS_MAX && !self.buckets.contains_key(sharer) {
            self.buckets.retain(|_, buckets| !buckets.missing(now).is_zero());
            if self.buckets.len() >= SHARERS_MAX {
                let nearest = self.buckets.iter().min_by_key(|(_, buckets)| buckets.missing(now));
                if let Some(name) = nearest.map(|(name, _)| Arc::clone(name)) {
                    self.buckets.remove(&name);
                }
            }
        }
        self.buckets.entry(Arc::clone(sharer)).or_default()
    }

    pub(crate) fn check_invariants(&self) {
        assert!(self.buckets.len() <= SHARERS_MAX, "over the bound");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[expect(
        clippy::disallowed_methods,
        reason = "tests of pure code need one instant to start from"
    )]
    fn start() -> Instant {
        Instant::now()
    }

    const SIXTY: NonZeroU32 = NonZeroU32::new(60).unwrap();

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_refusal_says_truly_when_to_come_back() {
        let (mut rates, me, t0) = (Rates::default(), Arc::from("me"), start());
        let mut take = |units, at| rates.take(&me, Rated::Requests, SIXTY, units, at);
        assert_eq!(take(60, t0), Ok(()), "a minute's worth at once");
        assert_eq!(take(1, t0), Err(seconds(1)));
        assert_eq!(take(10, t0 + seconds(4)), Err(seconds(6)));
        assert_eq!(take(10, t0 + seconds(10)), Ok(()));
    }

    #[test]
    fn tokens_are_settled_up_and_down() {
        let (mut rates, me, t0) = (Rates::default(), Arc::from("me"), start());
        assert_eq!(rates.take(&me, Rated::Tokens, SIXTY, 1000, t0), Ok(()), "from a full bucket");
        rates.settle(&me, Rated::Tokens, SIXTY, (1000, 30), t0);
        assert_eq!(rates.take(&me, Rated::Tokens, SIXTY, 30, t0), Ok(()));
        rates.settle(&me, Rated::Tokens, SIXTY, (30, 90), t0);
        assert_eq!(rates.take(&me, Rated::Tokens, SIXTY, 1, t0), Err(seconds(61)), "a debt");
        assert_eq!(rates.take(&me, Rated::Requests, SIXTY, 1, t0), Ok(()), "another bucket");
        let other = Arc::from("other");
        assert_eq!(rates.take(&other, Rated::Tokens, SIXTY, 60, t0), Ok(()), "another sharer");
    }

    #[test]
    fn the_table_is_bounded_and_remembers_who_is_in_debt() {
        let (mut rates, debtor, t0) = (Rates::default(), Arc::from("debtor"), start());
        assert_eq!(rates.take(&debtor, Rated::Requests, SIXTY, 60, t0), Ok(()));
        for number in 0..SHARERS_MAX + 10 {
            let other = Arc::from(number.to_string());
            assert_eq!(rates.take(&other, Rated::Requests, SIXTY, 1, t0), Ok(()));
        }
        assert_eq!(rates.len(), SHARERS_MAX);
        assert!(rates.take(&debtor, Rated::Requests, SIXTY, 1, t0).is_err());
    }

    proptest! {
        /// Whoever waits as long as each refusal says gets at most a minute's worth and the flow.
        #[test]
        fn nobody_gets_more_than_the_limit(
            per_minute in 1_u32..2000,
            asks in prop::collection::vec((1_u64..300, 0_u64..3000), 1..80),
        ) {
            let per_minute = NonZeroU32::new(per_minute).unwrap();
            let (mut rates, me, t0) = (Rates::default(), Arc::from("me"), start());
            let (mut now, mut taken) = (t0, 0);
            for (units, pause_ms) in asks {
                now += Duration::from_millis(pause_ms);
                let units = units.min(u64::from(per_minute.get()));
                if let Err(wait) = rates.take(&me, Rated::Requests, per_minute, units, now) {
                    now += wait;
                    let again = rates.take(&me, Rated::Requests, per_minute, units, now);
                    prop_assert_eq!(again, Ok(()));
                }
                taken += units;
                let flowed = (now - t0).as_secs_f64() / 60.0 * f64::from(per_minute.get());
                prop_assert!(taken as f64 <= f64::from(per_minute.get()) + flowed + 1e-3);
            }
        }
    }
}
