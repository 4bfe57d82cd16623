//! Closes incarnations and tags at the engine, and repeats a close until the engine confirms it.
//!
//! What a pinned incarnation holds stays counted until then. The engine evicts tagged KV after
//! untagged KV, and closes no tag by itself. So the journal lists each tag before its first turn is
//! sent, and its close is repeated until it is answered. A turn that comes after the close begins
//! the tag anew, so the tag is closed again while such a turn is inside. A turn beside its pinned
//! session carries that incarnation as tag; its opening is in the journal.

use std::collections::BTreeSet;

use contract::id::SessionKey;

use crate::session::table::{
    CloseResult, Effect, Guard, Pins, PlannedTurn, Record, RunMode, Step, pins::closes::Close,
};

/// Beyond this, sessions run without a tag. Each takes some 500 bytes. There are that many only if
/// the engine refuses its closes, or after a restart.
const TAGS_CLOSING_MAX: usize = 16_384;

impl Pins {
    /// The engine has answered, or the shim has reported that the session is closed.
    /// `is_tagged_again`: a turn inside may put the tag there after this close. Returns whether the
    /// engine has freed a row and KV.
    pub(crate) fn apply_close_result(
        &mut self,
        step: &mut Step,
        incarnation: &str,
        result: CloseResult,
        is_tagged_again: bool,
    ) -> bool {
        let is_repeated = self.settings.guards.is_on(Guard::CloseRepeated);
        let answered = self.closes.answer(step, incarnation, result, is_repeated, is_tagged_again);
        let Some(answered) = answered else { return false };
        if answered.is_done {
            step.write_journal(Record::Closed { incarnation: incarnation.to_owned() });
        }
        if let Some(waited) = answered.freed_after {
            step.push(Effect::Freed(waited));
        }
        answered.freed_after.is_some()
    }

    /// The open failed, or the session was closed meanwhile.
    pub(crate) fn forget_open(&mut self, step: &mut Step, incarnation: &str, may_be_open: bool) {
        if may_be_open && self.settings.guards.is_on(Guard::UnknownOpenClosed) {
            let close = Close::new(step.now, 0, None);
            self.closes.start(step, incarnation.to_owned(), close);
        } else {
            step.write_journal(Record::Closed { incarnation: incarnation.to_owned() });
        }
    }

    /// Returns the journal's record of the tag if this is its first turn. If too many tags are
    /// being closed, the turn loses its tag instead.
    pub(crate) fn begin_tag(&mut self, turn: &mut PlannedTurn) -> Option<Record> {
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
    pub(crate) fn inherit_tags(&mut self, step: &mut Step, tags: BTreeSet<String>) {
        if self.settings.guards.is_on(Guard::TakeoverCloses) {
            for tag in tags {
                self.closes.start(step, tag, Close::tag(step.now));
            }
        }
    }

    /// Closes an incarnation that an earlier agent process left open, and counts its row until the
    /// close is confirmed.
    pub(crate) fn inherit_incarnation(
        &mut self,
        step: &mut Step,
        incarnation: String,
        dp_rank: u32,
        rid: Option<String>,
    ) {
        if self.settings.guards.is_on(Guard::TakeoverCloses) {
            let dp_rank = if (dp_rank as usize) < self.ranks.len() { dp_rank } else { 0 };
            let close = Close::inherited(step.now, dp_rank, rid);
            self.closes.start(step, incarnation, close);
        }
    }

    /// An incarnation without a pin and a tag is not open at the engine.
    pub(crate) fn close_at_engine(&mut self, step: &mut Step, key: &SessionKey) {
        let now = step.now;
        let session = &self.sessions[key];
        let incarnation = session.incarnation.clone();
        match session.state.tree() {
            None => {
                let close = Close::new(now, session.dp_rank, session.state.row().cloned());
                self.closes.start(step, incarnation, close);
            }
            Some(tree) if tree.has_tag => {
                self.closes.start(step, incarnation, Close::tag(now));
            }
            Some(_) => {}
        }
    }
}
