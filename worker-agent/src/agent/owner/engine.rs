//! The owner's dealings with the engine: what it asks of it, in tasks of their own whose answers
//! come back as messages, and what it learns from the engine's follower.

use std::{sync::Arc, time::Duration};

use tracing::{error, info, warn};

use super::{Owner, now};
use crate::{
    agent::{EngineNews, Message},
    engine::{Engine, Info},
    journal::Record,
    progress::Progress,
    session::{Close, Closed, Load, Opened},
};

/// The engine's own limit on idle sessions is so much longer than the agent's, for the case that no
/// agent ever comes back. The engine counts from a turn's start, so a turn has to fit.
const ENGINE_BACKSTOP: Duration = Duration::from_secs(24 * 3600);

impl Owner {
    pub(super) fn open_at_engine(&self, incarnation: String, idle_max: Duration) {
        let (engine, mailbox) = (self.setup.engine.clone(), self.handle.mailbox.clone());
        self.tasks.spawn(async move {
            let opened = match engine.open_session(&incarnation, idle_max + ENGINE_BACKSTOP).await {
                Ok(()) => Opened::Yes,
                Err(error) if error.is_ambiguous() => Opened::Unknown(error.to_string()),
                Err(error) => Opened::No(error.to_string()),
            };
            let _ = mailbox.send(Message::Opened { incarnation, opened }).await;
        });
    }

    /// Tells the table of an open's fate in the next round.
    pub(super) fn told(&self, incarnation: String, opened: Opened) {
        let mailbox = self.handle.mailbox.clone();
        self.tasks.spawn(async move {
            let _ = mailbox.send(Message::Opened { incarnation, opened }).await;
        });
    }

    pub(super) fn close_at_engine(&self, close: Close) {
        let (engine, mailbox) = (self.setup.engine.clone(), self.handle.mailbox.clone());
        let tells = self.info.as_ref().is_some_and(|info| self.shims.len() == info.rows.len());
        self.tasks.spawn(async move {
            let closed = close_once(&engine, &close, tells).await;
            let incarnation = close.incarnation;
            let _ = mailbox.send(Message::Closed { incarnation, closed }).await;
        });
    }

    pub(super) fn news(&mut self, news: EngineNews) {
        match news {
            EngineNews::Up(info) => self.engine_up(info),
            EngineNews::Sample(sample) => {
                let stuck = self.progress.sampled(&sample, self.setup.stall_max);
                if let (None, Some(reason)) = (&self.stuck, &stuck) {
                    error!(reason, "engine stuck");
                }
                self.stuck = stuck;
                for rank in &sample.ranks {
                    let load =
                        Load { waiting: rank.num_waiting_reqs, used_tokens: rank.num_used_tokens };
                    self.table.sampled(sample.at, rank.dp_rank, load);
                }
                self.ledger.sampled(sample);
            }
            EngineNews::Down { reason, gone } => {
                match &self.down {
                    None => error!(reason, gone, "engine down"),
                    // Asked twice a second, it is down for the same reason most times.
                    Some(before) if *before != reason => warn!(reason, "the engine can't be used"),
                    Some(_) => {}
                }
                self.down = Some(reason);
                if gone {
                    self.engine_gone();
                }
            }
        }
    }

    /// The engine's process has ended, and every session's KV and history with it.
    fn engine_gone(&mut self) {
        let Some(info) = self.info.take() else { return };
        let sessions = self.table.iter().count();
        warn!(sessions, "the engine's process is gone, its sessions are lost");
        self.table.engine_lost(now(), self.ledger.engine(&info));
        self.progress = Progress::default();
        self.stuck = None;
    }

    fn engine_up(&mut self, info: Box<Info>) {
        let known = self.info.as_ref().map(|info| &info.facts.instance);
        if known != Some(&info.facts.instance) {
            self.engine_gone();
            self.table.engine_lost(now(), self.ledger.engine(&info));
            self.take_over(&info);
            self.ask_shims();
            info!(version = info.facts.version, ranks = info.rows.len(), "engine up");
            // Who hears of the new ranks must find them in the newest report.
            self.publish(now());
            self.description.send_replace(Some(Arc::new(self.describe(&info))));
        }
        self.info = Some(info);
        self.down = None;
    }

    /// Closes what an earlier agent left open in this engine process.
    fn take_over(&mut self, info: &Info) {
        let left = self.setup.journal.left(&info.facts.instance);
        let record = Record::Engine { instance: info.facts.instance.clone() };
        if let Err(error) = self.setup.journal.write(&record) {
            error!(%error, "the journal can't be written");
        }
        if !left.is_empty() {
            warn!(sessions = left.len(), "closing what an earlier agent left open");
        }
        for (incarnation, left) in left {
            self.table.inherit(now(), incarnation, left.dp_rank, left.rid);
        }
    }
}

/// One attempt at a close. A tag holds nothing, so its close is done when it was said; a shim tells
/// by itself when a session is really gone, and where it hasn't, the engine is asked.
async fn close_once(engine: &Engine, close: &Close, shim_tells: bool) -> Closed {
    let rid = close.rid.as_deref();
    let word = |gone| if gone { Closed::Confirmed } else { Closed::Kept };
    let closed = match (close.pinned, shim_tells && !close.again) {
        (false, _) => engine.close_session(&close.incarnation).await.map(|()| Closed::Confirmed),
        (true, true) => engine.close(&close.incarnation, rid).await.map(|()| Closed::NotYet),
        (true, false) => engine.close_surely(&close.incarnation, rid).await.map(word),
    };
    closed.unwrap_or_else(|error| {
        warn!(incarnation = close.incarnation, %error, "close did not get through");
        Closed::NotYet
    })
}
