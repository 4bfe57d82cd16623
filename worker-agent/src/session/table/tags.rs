//! Keeps tags from staying at the engine without their session.
//!
//! The engine evicts tagged KV after untagged KV, for as long as the tag is open. It closes no tag
//! by itself. A tag begins with the first turn that is sent with it, and its id is the session's
//! incarnation id. The journal lists each tag before that turn is sent, so that the next agent
//! process can close it. The tag's close is repeated until the engine has answered it (`closes`).
//!
//! The engine begins a closed tag anew if a turn with it comes after the close. So a tag is closed
//! again while a turn is inside that may do this. Turns that run beside their pinned session carry
//! the pinned incarnation as their tag, which is in the journal since its opening.

use std::{collections::BTreeSet, time::Instant};

use super::{Guard, Record, RunMode, Table, Turn, closes::Close};

/// While more closes of tags than this are not confirmed, sessions run without a tag. Each takes
/// some 500 bytes. There are that many only if the engine refuses its closes, or after a restart.
const TAGS_CLOSING_MAX: usize = 16_384;

impl Table {
    /// Notes the tag that a turn on the radix tree is sent with. Returns the journal's record of
    /// the tag, if this is the tag's first turn. Takes the tag from the turn if too many tags are
    /// being closed.
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

    /// Closes the tags that an earlier agent process left open.
    pub(super) fn inherit_tags(&mut self, now: Instant, tags: BTreeSet<String>) {
        if self.settings.guards.is_on(Guard::TakeoverCloses) {
            for tag in tags {
                self.closes.start(&mut self.effects, tag, Close::tag(now));
            }
        }
    }
}
