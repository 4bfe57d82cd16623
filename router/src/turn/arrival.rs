//! A request for a turn whose body has not been read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use contract::route::Kind;
use http::{Extensions, request::Parts};
use service::{clock::now, server::PeerAddress, traces::span::Trace};

use super::{access_log::AccessEntry, shared::Shared};
use crate::{auth::Caller, shares::Sharer};

#[derive(Debug)]
pub(crate) struct Arrival {
    pub(super) kind: Kind,
    pub(super) head: Parts,
    pub(super) caller: Caller,
    /// Who shares the router's and its workers' capacity; the class is the turn's own once it is
    /// read.
    pub(super) sharer: Sharer,
    pub(super) arrived_at: Instant,
    pub(super) deadline: Instant,
    pub(super) observers: Observers,
    pub(super) flags: TurnFlags,
}

impl Arrival {
    /// `flags` are set as soon as the turn is read.
    pub(crate) fn new(
        shared: &Shared,
        kind: Kind,
        caller: Caller,
        mut head: Parts,
        flags: TurnFlags,
    ) -> Self {
        let (observers, arrived_at) = (Observers::take_from(&mut head.extensions), now());
        let sharer = sharer(&caller, &head.extensions);
        let deadline = arrived_at + shared.turn_max;
        Self { kind, head, caller, sharer, arrived_at, deadline, observers, flags }
    }

    pub(super) fn path(&self) -> &str {
        self.head.uri.path()
    }
}

pub(crate) fn sharer(caller: &Caller, extensions: &Extensions) -> Sharer {
    Sharer::new(caller, extensions.get::<PeerAddress>().map(|peer| peer.0))
}

#[derive(Debug, Clone, Default)]
pub(super) struct Observers {
    /// `None` without a log.
    pub(super) access_entry: Option<Arc<AccessEntry>>,
    pub(super) trace: Trace,
}

impl Observers {
    fn take_from(extensions: &mut Extensions) -> Self {
        let trace = extensions.remove().unwrap_or_default();
        Self { access_entry: extensions.remove(), trace }
    }
}

/// Known once the turn's body was read. Clones share the flags.
#[derive(Debug, Clone, Default)]
pub(crate) struct TurnFlags(Arc<[AtomicBool; 2]>);

impl TurnFlags {
    pub(crate) fn set(&self, wants_stream: bool, is_idempotent: bool) {
        let [stream, idempotent] = &*self.0;
        stream.store(wants_stream, Ordering::Relaxed);
        idempotent.store(is_idempotent, Ordering::Relaxed);
    }

    pub(crate) fn wants_stream(&self) -> bool {
        self.0[0].load(Ordering::Relaxed)
    }

    pub(crate) fn is_idempotent(&self) -> bool {
        self.0[1].load(Ordering::Relaxed)
    }
}
