//! Handles the calls to the owner task that open, close and demote sessions.
//!
//! An opening waits in `waiters`, by its request id. A demotion waits here, by its session, until
//! the engine's shim has answered or the table has given the demotion up, after seconds.

use contract::id::SessionKey;
use service::{clock::now, refusal::Code};
use tokio::sync::oneshot;

use super::{Error, OpenedSession, Owner, handle::new_rid, waiters::Waiter};
use crate::session::{self, OpenRequest, Table};

/// A caller waits seconds at most. A router sends one call per request of an operator or client.
const DEMOTIONS_WAITING_MAX: usize = 1024;

type DemotionReply = oneshot::Sender<Result<(), Error>>;

#[derive(Default)]
pub(super) struct PendingDemotions(Vec<(SessionKey, DemotionReply)>);

impl PendingDemotions {
    fn add(&mut self, key: SessionKey, reply: DemotionReply) {
        if self.0.len() < DEMOTIONS_WAITING_MAX {
            return self.0.push((key, reply));
        }
        let detail = format!("{DEMOTIONS_WAITING_MAX} demotions wait for the engine; try again");
        let error = session::Error::OutOfRoom { resource: Code::QueuePlaces, detail, wait: None };
        let _ = reply.send(Err(error.into()));
    }

    /// Answers the callers of a session that has changed, unless it is still being demoted.
    pub(super) fn check(&mut self, table: &Table, key: &SessionKey) {
        if !self.0.is_empty()
            && let Some(result) = table.sessions().demotion_result(key)
        {
            self.finish(key, &result);
        }
    }

    pub(super) fn finish(&mut self, key: &SessionKey, result: &Result<(), session::Error>) {
        for (_, reply) in self.0.extract_if(.., |(waiting, _)| waiting == key) {
            let _ = reply.send(result.clone().map_err(Error::from));
        }
    }
}

impl Owner {
    pub(super) fn open(
        &mut self,
        request: OpenRequest,
        reply: oneshot::Sender<Result<OpenedSession, Error>>,
    ) {
        let rid = new_rid();
        let was_open =
            self.table.sessions().get(&request.key).is_some_and(|session| !session.is_gone());
        let opened = self
            .check_usable()
            .and_then(|()| self.table.open_session(now(), &rid, &request).map_err(Error::from));
        match opened {
            Ok(()) => {
                self.waiters.add(rid, Waiter::Open { key: request.key, was_open, reply });
            }
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    /// `reply` gets whether the close waits for a running turn.
    pub(super) fn close(
        &mut self,
        key: &SessionKey,
        only_if_idle: bool,
        reply: oneshot::Sender<Result<bool, Error>>,
    ) {
        let closed = self.table.close_session_if(now(), key, only_if_idle);
        let _ = reply.send(closed.map_err(Error::from));
    }

    /// `reply` gets the result once the session's KV is in the radix tree.
    pub(super) fn demote(&mut self, key: SessionKey, reply: DemotionReply) {
        let demoted = self
            .check_usable()
            .and_then(|()| self.table.demote_session(now(), &key).map_err(Error::from));
        match demoted {
            Ok(true) => drop(reply.send(Ok(()))),
            Ok(false) => self.demotions.add(key, reply),
            Err(error) => drop(reply.send(Err(error))),
        }
    }
}
