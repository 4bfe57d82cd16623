//! Shares out what the router has little of: turns in flight, memory, processors for long bodies.
//!
//! A *sharer* is the client that a limit counts against: the name of a caller's key, or without
//! keys the client's address. A [`Share`] gives its units back on drop, however the request ends.

pub(crate) mod collector;
mod pool;
mod rates;

use std::{net::IpAddr, num::NonZeroU32, sync::Arc, time::Duration};

use parking_lot::Mutex;
use service::{
    auth::keys::{KeyLimits, PriorityClass},
    clock::now,
    places::Places,
};

pub(crate) use self::pool::{Ask, Refused, check};
use self::{
    pool::Pool,
    rates::{Rated, Rates},
};
use crate::{auth::Caller, config::tables::LimitsTable};

#[derive(Debug, Clone)]
pub(crate) struct Sharer {
    pub(crate) name: Arc<str>,
    pub(crate) class: PriorityClass,
    pub(crate) limits: Arc<KeyLimits>,
}

impl Sharer {
    /// Callers without a key have one principal, so each of them is known by its address, `peer`.
    /// Of an IPv6 address, the first 64 bits count, because one client can use all addresses in
    /// them.
    pub(crate) fn new(caller: &Caller, peer: Option<IpAddr>) -> Self {
        let name = match peer.filter(|_| &*caller.principal == contract::id::ANONYMOUS) {
            None => Arc::clone(&caller.principal),
            Some(IpAddr::V4(address)) => format!("@{address}").into(),
            Some(IpAddr::V6(address)) => match address.to_ipv4_mapped() {
                Some(address) => format!("@{address}").into(),
                None => format!("@{:x}", address.to_bits() >> 64).into(),
            },
        };
        let class = caller.limits.priority.class;
        Self { name, class, limits: Arc::clone(&caller.limits) }
    }
}

#[derive(Debug)]
pub(crate) struct SharedPool {
    /// Labels the pool's metrics.
    name: &'static str,
    /// Locked for nanoseconds.
    pool: Mutex<Pool>,
}

impl SharedPool {
    fn new(name: &'static str, units: usize) -> Arc<Self> {
        Arc::new(Self { name, pool: Mutex::new(Pool::new(units as u64)) })
    }

    /// The sharer may hold at most `key_max` by its own key's limit.
    pub(crate) fn take(
        self: &Arc<Self>,
        sharer: &Sharer,
        units: u64,
        key_max: Option<NonZeroU32>,
    ) -> Result<Share, Refused> {
        let key_max = key_max.map(|key_max| key_max.get().into());
        let mut share = self.empty_share(sharer);
        share.key_max = key_max;
        share.grow(units)?;
        Ok(share)
    }

    /// The most that one sharer gets of the whole pool, at least 1.
    pub(crate) fn most_of_one(&self, sharer: &Sharer, key_max: Option<NonZeroU32>) -> u32 {
        let most = self.pool.lock().most_of_one(sharer.class);
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        key_max.map_or(most, |key_max| most.min(key_max.get())).max(1)
    }

    pub(crate) fn empty_share(self: &Arc<Self>, sharer: &Sharer) -> Share {
        Share {
            pool: Arc::clone(self),
            sharer: Arc::clone(&sharer.name),
            class: sharer.class,
            key_max: None,
            units: 0,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Share {
    pool: Arc<SharedPool>,
    sharer: Arc<str>,
    class: PriorityClass,
    key_max: Option<u64>,
    units: u64,
}

impl Share {
    /// At an error, the sharer keeps the units that it has.
    pub(crate) fn grow(&mut self, units: u64) -> Result<(), Refused> {
        let ask = Ask { units, class: self.class, key_max: self.key_max };
        self.pool.pool.lock().take(&self.sharer, ask)?;
        self.units += units;
        Ok(())
    }

    /// Gives back the units above `units`.
    pub(crate) fn shrink(&mut self, units: u64) {
        let surplus = self.units.saturating_sub(units);
        self.pool.pool.lock().give_back(&self.sharer, surplus);
        self.units -= surplus;
    }

    pub(crate) fn units(&self) -> u64 {
        self.units
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.pool.pool.lock().give_back(&self.sharer, self.units);
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolSizes {
    pub(crate) requests: usize,
    pub(crate) turns: usize,
    pub(crate) body_bytes: usize,
    pub(crate) tokenizer_bytes: usize,
}

impl PoolSizes {
    /// The router serves at most `requests` at once.
    pub(crate) fn new(limits: &LimitsTable, requests: usize) -> Self {
        Self {
            requests,
            turns: limits.turns_in_flight_max,
            body_bytes: limits.body_bytes_in_flight_max,
            tokenizer_bytes: limits.tokenizer_bytes_max,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Shares {
    /// Requests that are served, each on a connection of its own.
    pub(crate) requests: Arc<SharedPool>,
    pub(crate) turns: Arc<SharedPool>,
    pub(crate) body_bytes: Arc<SharedPool>,
    pub(crate) tokenizer_bytes: Arc<SharedPool>,
    /// Reading a long body takes one.
    pub(crate) reading: Arc<Places>,
    /// Locked for nanoseconds, or milliseconds if the table is full.
    rates: Mutex<Rates>,
}

impl Shares {
    pub(crate) fn new(sizes: PoolSizes) -> Arc<Self> {
        Arc::new(Self {
            requests: SharedPool::new("requests", sizes.requests),
            turns: SharedPool::new("turns", sizes.turns),
            body_bytes: SharedPool::new("body_bytes", sizes.body_bytes),
            tokenizer_bytes: SharedPool::new("tokenizer_bytes", sizes.tokenizer_bytes),
            reading: Arc::default(),
            rates: Mutex::default(),
        })
    }

    /// The error is the time after which the key may send a request.
    pub(crate) fn take_request(&self, caller: &Caller) -> Result<(), Duration> {
        let Some(per_minute) = caller.limits.requests_per_minute else { return Ok(()) };
        let mut rates = self.rates.lock();
        rates.take(&caller.principal, Rated::Requests, per_minute, 1, now())
    }

    /// `estimate` is for the prompt. `None` if the key has no such limit. The error is the time
    /// after which the key has so many tokens.
    pub(crate) fn take_tokens(
        self: &Arc<Self>,
        sharer: &Sharer,
        estimate: u64,
    ) -> Result<Option<TokenShare>, Duration> {
        let Some(per_minute) = sharer.limits.tokens_per_minute else { return Ok(None) };
        let mut rates = self.rates.lock();
        rates.take(&sharer.name, Rated::Tokens, per_minute, estimate, now())?;
        Ok(Some(TokenShare {
            shares: Arc::clone(self),
            sharer: Arc::clone(&sharer.name),
            per_minute,
            estimate,
            used: 0,
        }))
    }
}

/// On drop, corrects the estimate by what the turn has used.
#[derive(Debug)]
pub(crate) struct TokenShare {
    shares: Arc<Shares>,
    sharer: Arc<str>,
    per_minute: NonZeroU32,
    estimate: u64,
    /// 0 until the turn is sent.
    used: u64,
}

impl TokenShare {
    pub(crate) fn estimate(&self) -> u64 {
        self.estimate
    }

    /// Counts prompt and answer together.
    pub(crate) fn set_used(&mut self, used: u64) {
        self.used = used;
    }
}

impl Drop for TokenShare {
    fn drop(&mut self) {
        let tokens = (self.estimate, self.used);
        let mut rates = self.shares.rates.lock();
        rates.settle(&self.sharer, Rated::Tokens, self.per_minute, tokens, now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(principal: &str) -> Caller {
        Caller {
            principal: principal.into(),
            is_admin: false,
            limits: Arc::default(),
            announce: Arc::default(),
        }
    }

    #[test]
    fn a_key_is_one_sharer_and_without_keys_an_address_is() {
        let name = |principal: &str, peer: &str| {
            Sharer::new(&caller(principal), peer.parse().ok()).name.to_string()
        };
        assert_eq!(name("team", "10.0.0.1"), "team");
        assert_eq!(name("anonymous", ""), "anonymous", "the peer is unknown");
        assert_eq!(name("anonymous", "10.0.0.1"), "@10.0.0.1");
        assert_eq!(name("anonymous", "::ffff:10.0.0.1"), "@10.0.0.1");
        assert_eq!(name("anonymous", "fd00:1:2:3::9"), name("anonymous", "fd00:1:2:3:ffff::1"));
        assert_ne!(name("anonymous", "fd00:1:2:3::9"), name("anonymous", "fd00:1:2:4::9"));
    }

    #[test]
    fn a_dropped_share_returns() {
        let sizes = PoolSizes { requests: 1, turns: 2, body_bytes: 1, tokenizer_bytes: 1 };
        let shares = Shares::new(sizes);
        let sharer = Sharer::new(&caller("a"), None);
        let mut one = shares.turns.take(&sharer, 1, None).unwrap();
        one.grow(1).unwrap();
        assert_eq!((one.units(), one.grow(1)), (2, Err(Refused::Full)));
        assert_eq!(shares.turns.take(&sharer, 1, None).unwrap_err(), Refused::Full);
        drop(one);
        assert!(shares.turns.take(&sharer, 1, NonZeroU32::new(1)).is_ok());
    }
}
