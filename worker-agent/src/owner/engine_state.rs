//! Keeps what the owner task knows of the engine: its description, and whether it can take turns.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use contract::load::EngineRole;
use service::clock::now;
use tracing::{error, info, warn};

use super::Error;
use crate::engine::{
    BodyFacts, EngineInfo, LoadSample, answer_signs::AnswerSigns, silence::SilenceDetector,
    stall_detector::StallDetector,
};

pub(super) struct EngineState {
    /// `None` if no engine process is known. Stays set while a known process can't take turns.
    info: Option<Box<EngineInfo>>,
    /// Those of the process that was known last.
    body_facts: Arc<BodyFacts>,
    down_reason: Option<String>,
    down_since: Instant,
    /// Why a prefill engine can hand over no KV.
    bootstrap_reason: Option<String>,
    /// Why the engine makes no progress.
    stuck_reason: Option<String>,
    stall_detector: StallDetector,
    silence: SilenceDetector,
    answer_signs: AnswerSigns,
    /// The number of engine processes that were known so far.
    process: u64,
    /// The engine counts as stuck if turns wait and it runs nothing for this long.
    stall_max: Duration,
}

impl EngineState {
    pub(super) fn new(stall_max: Duration, silent_max: Duration) -> Self {
        Self {
            info: None,
            body_facts: Arc::default(),
            down_reason: Some("the engine has not answered yet".to_owned()),
            down_since: now(),
            bootstrap_reason: None,
            stuck_reason: None,
            stall_detector: StallDetector::default(),
            silence: SilenceDetector::new(silent_max),
            answer_signs: AnswerSigns::default(),
            process: 0,
            stall_max,
        }
    }

    pub(super) fn info(&self) -> Option<&EngineInfo> {
        self.info.as_deref()
    }

    pub(super) fn is_new_process(&self, info: &EngineInfo) -> bool {
        self.info().is_none_or(|known_info| known_info.facts.instance != info.facts.instance)
    }

    pub(super) fn unhealthy_reason(&self) -> Option<&String> {
        let reasons = self.down_reason.as_ref().or(self.silence.reason());
        reasons.or(self.stuck_reason.as_ref()).or(self.bootstrap_reason.as_ref())
    }

    /// `None` also while the engine is down.
    pub(super) fn silent_reason(&self) -> Option<&String> {
        self.silence.reason()
    }

    pub(super) fn process(&self) -> u64 {
        self.process
    }

    /// A turn may learn late that its process has ended, when the successor is known already.
    pub(super) fn is_present(&self, process: u64) -> bool {
        process == self.process
    }

    pub(super) fn check_up(&self) -> Result<(), Error> {
        let error = |reason| Error::EngineDown { reason, since: self.down_since };
        self.down_reason.clone().map_or(Ok(()), |reason| Err(error(reason)))
    }

    pub(super) fn set_up(&mut self, info: Box<EngineInfo>) {
        if self.is_new_process(&info) {
            self.process += 1;
            let has_bootstrap = info.facts.role() == EngineRole::Prefill;
            self.bootstrap_reason =
                has_bootstrap.then(|| "its bootstrap server was not tried yet".to_owned());
        }
        let body_facts = info.body_facts();
        if *self.body_facts != body_facts {
            self.body_facts = Arc::new(body_facts);
        }
        self.info = Some(info);
        self.down_reason = None;
    }

    pub(super) fn set_bootstrap(&mut self, result: Result<(), String>) {
        match &result {
            Ok(()) => info!("the engine's bootstrap server takes connections"),
            Err(reason) => error!(reason, "the engine's bootstrap server takes no connections"),
        }
        self.bootstrap_reason = result.err();
    }

    pub(super) fn runs_whole_turns(&self) -> bool {
        self.info().is_none_or(|info| info.facts.role() == EngineRole::Aggregated)
    }

    pub(super) fn body_facts(&self) -> &Arc<BodyFacts> {
        &self.body_facts
    }

    /// Returns whether the engine has other adapters than before.
    pub(super) fn set_adapters(&mut self, adapters: Vec<String>) -> bool {
        let Some(info) = &mut self.info else { return false };
        let adapters = Some(adapters);
        let has_changed = info.facts.adapters != adapters;
        info.facts.adapters = adapters;
        has_changed
    }

    pub(super) fn set_down(&mut self, reason: String, has_process_ended: bool) {
        match &self.down_reason {
            None => {
                error!(reason, gone = has_process_ended, "engine down");
                self.down_since = now();
            }
            // The engine is polled twice a second, mostly with the same failure.
            Some(last_reason) if *last_reason != reason => {
                warn!(reason, "the engine can't be used")
            }
            Some(_) => {}
        }
        self.down_reason = Some(reason);
        self.silence.reset();
    }

    pub(super) fn remove_process(&mut self) -> Option<Box<EngineInfo>> {
        self.silence.reset();
        let info = self.info.take()?;
        self.stall_detector = StallDetector::default();
        self.stuck_reason = None;
        Some(info)
    }

    pub(super) fn answer_signs(&self) -> &AnswerSigns {
        &self.answer_signs
    }

    pub(super) fn record_shim(&mut self, dp_rank: u32, at: Instant) {
        self.silence.record_shim(dp_rank, at);
    }

    /// `step_time` estimates how long a rank's scheduler is in a step that began at a time. Returns
    /// true if the engine has become silent, or speaks again.
    pub(super) fn check_silence(
        &mut self,
        now: Instant,
        step_time: impl Fn(u32, Instant) -> Duration,
    ) -> bool {
        if self.silence.next_check().is_none_or(|due| due <= now) {
            self.record_answers(now);
        }
        let has_changed = self.silence.check(now, step_time);
        match self.silence.reason() {
            Some(reason) if has_changed => error!(reason, "engine silent"),
            None if has_changed => info!("the engine speaks again"),
            _ => {}
        }
        has_changed
    }

    pub(super) fn next_silence_check(&self) -> Option<Instant> {
        self.silence.next_check()
    }

    pub(super) fn check_sample(&mut self, sample: &LoadSample) {
        self.silence.record_sample(sample);
        self.record_answers(sample.at);
        let stuck_reason = self.stall_detector.check_sample(sample, self.stall_max);
        if let (None, Some(reason)) = (&self.stuck_reason, &stuck_reason) {
            error!(reason, "engine stuck");
        }
        self.stuck_reason = stuck_reason;
    }

    fn record_answers(&mut self, at: Instant) {
        self.silence.record_answers(at, |dp_rank| self.answer_signs.count(dp_rank));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::RankSample;

    fn info(instance: &str) -> Box<EngineInfo> {
        Box::new(EngineInfo::example(instance))
    }

    fn state() -> EngineState {
        EngineState::new(Duration::from_secs(10), Duration::from_secs(10))
    }

    #[test]
    fn late_news_of_a_dead_process_does_not_concern_its_successor() {
        let mut engine = state();
        engine.set_up(info("first"));
        let first = engine.process();
        engine.set_up(info("first"));
        assert!(engine.is_present(first), "the same process, described again");
        engine.set_down("the engine accepts no connections".to_owned(), true);
        engine.remove_process();
        assert!(engine.is_present(first), "no other is known");
        engine.set_up(info("second"));
        assert!(!engine.is_present(first), "a turn learns late that its process has ended");
        assert!(engine.is_present(engine.process()));
    }

    #[test]
    fn an_engine_that_is_down_or_new_is_not_silent() {
        let mut engine = state();
        let start = service::clock::now();
        let rank = RankSample {
            dp_rank: 0,
            num_running_reqs: 0,
            num_waiting_reqs: 0,
            num_used_tokens: 0,
            max_total_num_tokens: 1,
            total_prefill_uncached_tokens: 0,
            total_prefill_busy_us: None,
            num_waiting_uncached_tokens: None,
            timestamp: 1.0,
        };
        let later = start + Duration::from_secs(20);
        let sample =
            LoadSample { at: start, ranks: vec![rank], connection: None, is_paused: false };
        engine.set_up(info("first"));
        engine.check_sample(&sample);
        assert!(engine.check_silence(later, |_, _| Duration::ZERO));
        assert!(engine.silent_reason().is_some() && engine.unhealthy_reason().is_some());
        engine.set_down("the engine did not answer".to_owned(), false);
        assert!(!engine.check_silence(later, |_, _| Duration::ZERO));
        assert_eq!(engine.silent_reason(), None, "down is the better reason");
        engine.set_up(info("second"));
        assert!(!engine.check_silence(later, |_, _| Duration::ZERO));
        assert_eq!(engine.unhealthy_reason(), None);
    }
}
