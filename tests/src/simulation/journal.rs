//! The journal's content without its file: what survives when an agent is killed.

use std::collections::BTreeMap;

use worker_agent::session::journal::{OpenIncarnation, Record};

#[derive(Debug, Default)]
pub(super) struct Journal {
    instance: Option<String>,
    open: BTreeMap<String, OpenIncarnation>,
}

impl Journal {
    pub(super) fn write(&mut self, record: Record) {
        match record {
            Record::Engine { instance } => {
                if self.instance.as_ref() != Some(&instance) {
                    self.open.clear();
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
            Record::Closed { incarnation } => drop(self.open.remove(&incarnation)),
        }
    }

    /// Returns what is open in this engine process.
    pub(super) fn left(&self, instance: &str) -> BTreeMap<String, OpenIncarnation> {
        let same = self.instance.as_deref() == Some(instance);
        if same { self.open.clone() } else { BTreeMap::new() }
    }
}
