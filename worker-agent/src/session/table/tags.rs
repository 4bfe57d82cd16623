//! Keeps tags from staying at the engine without their session.
//!
//! The engine evicts tagged KV after untagged KV, and closes no tag by itself. So the journal lists
//! each tag before its first turn is sent, and its close is repeated until it is answered. A turn
//! that comes after the close begins the tag anew, so the tag is closed again while such a turn is
//! inside. A turn beside its pinned session carries that incarnation as tag; its opening is in the
//! journal.

use std::{collections::BTreeSet, time::Instant};

use super::{Guard, Record, RunMode, Table, Turn, closes::Close};

/// Beyond this, sessions run without a tag. Each takes some 500 bytes. There are that many only if
/// the engine refuses its closes, or after a restart.
const TAGS_CLOSING_MAX: usize = 16_384;

impl Table {
    /// Returns the journal's record of the tag if this is its first turn. If too many tags are
    /// being closed, the turn loses its tag instead.
    pub(super) fn begin_tag(&mut self, turn: &mut Turn) -> Option<Record> {
        let session = turn.session.as_ref()?;
        let tree = self.sessions[&session.key].state.tree()?;
        if turn.run_mode != Some(RunMode::Tagged) || tree.has_tag {
            return None;
        }
        if self.closes.tag_count() >= TAGS_CLOSING_MAX {
            turn.drop_tag();
            return None;
        }
        self.sessions.update(&session.key, |session| session.state.note_tag());
        Some(Record::Tag { incarnation: session.incarnation.clone() })
    }

    /// Closes the tags of an earlier agent process.
    pub(super) fn inherit_tags(&mut self, now: Instant, tags: BTreeSet<String>) {
        if self.settings.guards.is_on(Guard::TakeoverCloses) {
            for tag in tags {
                self.closes.start(&mut self.effects, tag, Close::tag(now));
            }
        }
    }
}
