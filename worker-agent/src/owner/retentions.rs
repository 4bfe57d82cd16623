//! Keeps what the engine offers as retentions current, and logs what it doesn't offer.
//!
//! Only new sessions follow the offer. Open ones keep what they have: they were opened in this
//! engine process, under a word that holds until the process ends.

use std::{collections::BTreeMap, time::Instant};

use contract::load::RetentionOff;
use tracing::{info, warn};

use super::Owner;
use crate::{
    engine::{
        EngineInfo,
        retentions::{self, Offer, ShimWord},
    },
    shim::{Hello, PinSafety},
};

#[derive(Debug, Default)]
pub(super) struct ShimWords {
    said: BTreeMap<u32, Word>,
    /// Refusals logged for the present engine process.
    logged: Vec<RetentionOff>,
}

#[derive(Debug)]
struct Word {
    safety: PinSafety,
    /// The shim has connected since the present engine process was found. Otherwise it may be of
    /// the process before.
    is_of_process: bool,
}

impl ShimWords {
    pub(super) fn hear(&mut self, hello: &Hello) {
        let word = Word { safety: hello.pin_safety.clone(), is_of_process: true };
        self.said.insert(hello.dp_rank, word);
    }

    /// The word of a shim of this process still holds, because its hooks stay in the engine.
    pub(super) fn disconnect(&mut self, dp_rank: u32) {
        if self.said.get(&dp_rank).is_some_and(|word| !word.is_of_process) {
            self.said.remove(&dp_rank);
        }
    }

    /// Connected shims may be of the new process: a shim connects while its engine starts.
    pub(super) fn begin_process(&mut self, is_connected: impl Fn(u32) -> bool) {
        self.said.retain(|&dp_rank, _| is_connected(dp_rank));
        self.said.values_mut().for_each(|word| word.is_of_process = false);
        self.logged.clear();
    }

    pub(super) fn sum_up(&self, ranks: usize) -> ShimWord {
        let safeties = || self.said.values().map(|word| &word.safety);
        let off = safeties().find_map(|safety| safety.unguarded_reason.as_ref());
        let has_said = |rank: usize| self.said.keys().any(|&known| known as usize == rank);
        let absent = (0..ranks).find(|&rank| !has_said(rank));
        let unguarded_reason = match (off, absent) {
            (Some(reason), _) => Some(format!("its function `guarding` is off: {reason:.512}")),
            (None, Some(_)) if self.said.is_empty() => ShimWord::none_yet().unguarded_reason,
            (None, Some(rank)) => Some(format!("the shim of rank {rank} has not connected")),
            (None, None) => None,
        };
        // A shim that knows of none says an empty text.
        let pools = safeties().filter_map(|safety| safety.second_pool.as_deref());
        let second_pool = pools
            .max_by_key(|kept| kept.len())
            .map(|kept| Some(format!("{kept:.512}")).filter(|kept| !kept.is_empty()));
        ShimWord { unguarded_reason, second_pool }
    }
}

impl Owner {
    pub(super) fn offer(&self, info: &EngineInfo) -> Offer {
        retentions::offer(info, &self.shims.words.sum_up(info.rows.len()))
    }

    /// Called after the flags or a shim's word may have changed.
    pub(super) fn refresh_retentions(&mut self) {
        let Some(info) = self.engine.info() else { return };
        let offer = self.offer(info);
        if self.table.set_retentions(offer.offered, offer.refused) {
            self.publish_description();
        }
        // At an engine's start, its shims have time to come.
        if self.shims.check.next_deadline().is_none() {
            self.log_retentions();
        }
    }

    pub(super) fn run_shim_check(&mut self, now: Instant) {
        let ranks = self.engine.info().map_or(0, |info| info.rows.len());
        if self.shims.run_check(now, ranks) {
            self.log_retentions();
        }
    }

    /// Leaves out those whose flag is not set: that was logged when the engine was found.
    fn log_retentions(&mut self) {
        let Some(info) = self.engine.info() else { return };
        let has_flag = |off: &RetentionOff| {
            !info.missing_flags.iter().any(|it| Some(it.flag) == off.retention.engine_flag())
        };
        let refused: Vec<RetentionOff> =
            self.offer(info).refused.into_iter().filter(has_flag).collect();
        for off in refused.iter().filter(|off| !self.shims.words.logged.contains(off)) {
            let retention = off.retention.as_str();
            warn!(retention, reason = off.reason, "the engine doesn't offer a retention");
        }
        for off in &self.shims.words.logged {
            if refused.iter().all(|other| other.retention != off.retention) {
                info!(retention = off.retention.as_str(), "the engine offers a retention again");
            }
        }
        self.shims.words.logged = refused;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(dp_rank: u32, unguarded_reason: Option<&str>, second_pool: Option<&str>) -> Hello {
        Hello {
            pid: 1,
            pid_in_agent_namespace: None,
            dp_rank,
            page_size_tokens: 16,
            pool_tokens: 1024,
            rows_total: 8,
            instance: [0; 16],
            sglang: "0.5.23".into(),
            shim: "0.1.0".into(),
            inert_reason: None,
            undemotable_reason: None,
            unauditable_reason: None,
            unpublishable_reason: None,
            device: "cpu".into(),
            page_bytes: None,
            pin_safety: PinSafety {
                unguarded_reason: unguarded_reason.map(str::to_owned),
                second_pool: second_pool.map(str::to_owned),
            },
        }
    }

    #[test]
    fn an_engine_is_guarded_only_if_the_shims_of_all_ranks_guard_it() {
        let mut words = ShimWords::default();
        let reason = |words: &ShimWords| words.sum_up(2).unguarded_reason;
        assert_eq!(words.sum_up(2), ShimWord::none_yet());
        words.hear(&hello(1, None, Some("")));
        assert_eq!(reason(&words).unwrap(), "the shim of rank 0 has not connected");
        words.hear(&hello(0, Some("a seam is missing"), Some("")));
        assert!(reason(&words).unwrap().ends_with("is off: a seam is missing"));
        words.hear(&hello(0, None, None));
        assert_eq!(words.sum_up(2), ShimWord { unguarded_reason: None, second_pool: Some(None) });
    }

    #[test]
    fn a_second_pool_is_known_as_soon_as_one_shim_names_it() {
        let mut words = ShimWords::default();
        words.hear(&hello(0, None, None));
        assert_eq!(words.sum_up(2).second_pool, None);
        words.hear(&hello(0, None, Some("")));
        assert_eq!(words.sum_up(2).second_pool, Some(None));
        words.hear(&hello(1, None, Some("state")));
        assert_eq!(words.sum_up(2).second_pool, Some(Some("state".to_owned())));
    }

    #[test]
    fn a_word_outlives_its_connection_but_not_its_engine_process() {
        let is_guarded = |words: &ShimWords| words.sum_up(1).unguarded_reason.is_none();
        let mut words = ShimWords::default();
        words.begin_process(|_| false);
        words.hear(&hello(0, None, Some("")));
        words.disconnect(0);
        assert!(is_guarded(&words), "the hook is still in the engine");
        words.begin_process(|_| false);
        assert!(!is_guarded(&words), "the next process may run without the shim");
        // This shim has connected before its engine was found. Or else it is the last process's,
        // and the agent has not noticed yet that the connection is closed.
        words.hear(&hello(0, None, Some("")));
        words.begin_process(|_| true);
        assert!(is_guarded(&words));
        words.disconnect(0);
        assert!(!is_guarded(&words));
    }
}
