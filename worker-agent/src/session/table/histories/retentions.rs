//! Chooses how the engine keeps a session's KV, from what the engine offers.

use contract::load::{Retention, RetentionOff};

use crate::session::table::{Error, RunMode, Session};

#[derive(Debug, Default)]
pub(crate) struct Retentions {
    /// Best first.
    offered: Vec<Retention>,
    /// Why the engine doesn't offer the others.
    off: Vec<RetentionOff>,
}

impl Retentions {
    /// Returns whether anything has changed.
    pub(crate) fn set(&mut self, offered: Vec<Retention>, off: Vec<RetentionOff>) -> bool {
        let has_changed = self.offered != offered || self.off != off;
        *self = Self { offered, off };
        has_changed
    }

    pub(super) fn set_offered(&mut self, offered: Vec<Retention>) {
        self.offered = offered;
    }

    pub(super) fn offer(&self, retention: Retention) -> bool {
        self.offered.contains(&retention)
    }

    pub(crate) fn unpinned(&self, session: &Session) -> Retention {
        match session.retention() {
            Retention::Pinned if self.offer(Retention::Tagged) => Retention::Tagged,
            Retention::Pinned => Retention::None,
            other => other,
        }
    }

    pub(crate) fn unpinned_run_mode(&self, session: &Session) -> RunMode {
        match self.unpinned(session) {
            Retention::Tagged => RunMode::Tagged,
            _ => RunMode::Untagged,
        }
    }

    /// If none is wanted, returns the best retention without a pin.
    pub(crate) fn choose(&self, wanted: Option<Retention>) -> Result<Retention, Error> {
        let Some(wanted) = wanted else {
            let offers_tagged = self.offer(Retention::Tagged);
            return Ok(if offers_tagged { Retention::Tagged } else { Retention::None });
        };
        if wanted == Retention::None || self.offer(wanted) {
            return Ok(wanted);
        }
        let offered: Vec<&str> = self.offered.iter().map(|retention| retention.as_str()).collect();
        let off = self.off.iter().find(|off| off.retention == wanted);
        let reason = off.map_or_else(String::new, |off| off.reason.clone());
        Err(Error::RetentionUnavailable { wanted, offered: offered.join(", "), reason })
    }
}
