//! The journal's content without its file: what survives when an agent is killed.

use std::collections::{BTreeMap, BTreeSet};

use worker_agent::session::{
    handover::{HandedSession, Handover, Moment},
    journal::{OpenIncarnation, Record},
};

#[derive(Debug, Default)]
pub(super) struct Journal {
    instance: Option<String>,
    open: BTreeMap<String, OpenIncarnation>,
    tags: BTreeSet<String>,
    /// What an agent handed over, as the lines of its file.
    handover: Option<(u64, Vec<String>)>,
}

impl Journal {
    pub(super) fn write(&mut self, record: Record) {
        self.handover = None;
        match record {
            Record::Engine { instance } => {
                if self.instance.as_ref() != Some(&instance) {
                    self.open.clear();
                    self.tags.clear();
                    self.instance = Some(instance);
                }
            }
            Record::Opening { incarnation, dp_rank } => {
                self.open.insert(incarnation, OpenIncarnation { dp_rank, rid: None });
            }
            Record::Turn { incarnation, rid } => {
                if let Some(left) = self.open.get_mut(&incarnation) {
                    left.rid = Some(rid);
                }
            }
            Record::Tag { incarnation } => {
                self.tags.insert(incarnation);
            }
            Record::Closed { incarnation } => {
                self.open.remove(&incarnation);
                self.tags.remove(&incarnation);
            }
        }
    }

    pub(super) fn hand_over(&mut self, handover: &Handover) {
        let line = |session| serde_json::to_string(session).expect("it can be written");
        let lines = handover.sessions.iter().map(line);
        self.handover = Some((handover.at.unix_ms, lines.collect()));
    }

    pub(super) fn take_handover(&mut self) -> Option<Handover> {
        let (unix_ms, lines) = self.handover.take()?;
        let session = |line: String| -> HandedSession {
            serde_json::from_str(&line).expect("what was written can be read")
        };
        let at = Moment { unix_ms, boot: None };
        Some(Handover { at, sessions: lines.into_iter().map(session).collect() })
    }

    /// Whether the journal is about this engine process.
    pub(super) fn is_about(&self, instance: &str) -> bool {
        self.instance.as_deref() == Some(instance)
    }

    /// Returns what is open in this engine process.
    pub(super) fn left(&self, instance: &str) -> BTreeMap<String, OpenIncarnation> {
        let same = self.instance.as_deref() == Some(instance);
        if same { self.open.clone() } else { BTreeMap::new() }
    }

    /// Returns the tags that this engine process may have.
    pub(super) fn tags(&self, instance: &str) -> BTreeSet<String> {
        if self.is_about(instance) { self.tags.clone() } else { BTreeSet::new() }
    }
}
