//! Keeps what operators and trainers have done to the engine: pauses, released memory, weights.
//!
//! While the engine is paused, lacks its memory or gets other weights, the session table holds
//! turns back, and the engine counts neither as silent nor as stuck. The owner task hears of each
//! control call before it is sent, and after its answer.

use std::{collections::BTreeSet, time::Instant};

use contract::{control::Effect, load::Weights};
use http::HeaderValue;
use service::clock::now;
use tokio::sync::watch;
use tracing::{info, warn};

use super::{Error, Owner};
use crate::{
    engine::control::{ControlOutcome, ControlRequest, WeightsLabel},
    session::KvChange,
};

const MEMORY_TAGS: [&str; 3] = ["kv_cache", "weights", "cuda_graph"];

/// A call that the engine gets. Must be given to the end of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BegunCall {
    effect: Effect,
    /// Which of the engine's processes gets it.
    engine_number: u64,
}

impl BegunCall {
    #[must_use]
    pub fn effect(self) -> Effect {
        self.effect
    }
}

#[derive(Debug)]
pub(super) struct ControlEnd {
    pub(super) call: BegunCall,
    pub(super) request: ControlRequest,
    pub(super) outcome: ControlOutcome,
    /// `None` if the label was not read.
    pub(super) label: Option<WeightsLabel>,
}

#[derive(Debug, Default)]
pub(super) struct EngineControl {
    /// Counts the engine's processes.
    engine_number: u64,
    pauses_running: u32,
    /// A pause through this agent.
    is_paused: bool,
    /// That pause leaves running requests inside the engine.
    is_paused_in_place: bool,
    /// A pause that a load sample shows.
    is_seen_paused: bool,
    /// An update has begun that must be ended before turns can run.
    is_update_open: bool,
    updates_running: u32,
    releases_running: u32,
    released: BTreeSet<&'static str>,
    label: Option<WeightsLabel>,
    /// When a control call set the label.
    label_set_at: Option<Instant>,
    weights: watch::Sender<PublishedWeights>,
}

/// Each answer names them, and they change rarely.
#[derive(Debug, Clone)]
pub struct PublishedWeights {
    weights: Weights,
    /// Names `weights`. A label has only what a header may have.
    header: Option<HeaderValue>,
}

impl Default for PublishedWeights {
    fn default() -> Self {
        Self::new(Weights::default())
    }
}

impl PublishedWeights {
    fn new(weights: Weights) -> Self {
        let header = HeaderValue::from_str(&weights.to_string()).ok();
        Self { weights, header }
    }

    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.weights.epoch
    }

    /// Names the weights of a turn that was admitted in this epoch.
    #[must_use]
    pub fn header(&self, epoch: u64) -> Option<HeaderValue> {
        if epoch == self.weights.epoch {
            return self.header.clone();
        }
        Self::new(Weights { epoch, ..self.weights.clone() }).header
    }
}

impl EngineControl {
    pub(super) fn subscribe(&self) -> watch::Receiver<PublishedWeights> {
        self.weights.subscribe()
    }

    pub(super) fn weights(&self) -> Weights {
        self.weights.borrow().weights.clone()
    }

    /// `None` if the engine runs turns.
    pub(super) fn hold_reason(&self) -> Option<&'static str> {
        if self.changes_weights() {
            Some("its weights are being changed")
        } else if self.releases_running > 0 || !self.released.is_empty() {
            Some("its memory is released")
        } else if self.pauses_running > 0 || self.is_paused {
            Some("it is paused")
        } else if self.is_seen_paused {
            // A starting engine and one that others have paused report the same.
            Some("it says that it is not ready: it starts, or is paused")
        } else {
            None
        }
    }

    pub(super) fn reset(&mut self) {
        let weights = std::mem::take(&mut self.weights);
        // Calls to the old process still end; they say nothing of the new one.
        let engine_number = self.engine_number + 1;
        *self = Self { engine_number, weights, ..Self::default() };
    }

    pub(super) fn set_seen_paused(&mut self, is_paused: bool) {
        self.is_seen_paused = is_paused;
    }

    pub(super) fn changes_weights(&self) -> bool {
        self.updates_running > 0 || self.is_update_open
    }

    /// Whether the call may end what holds turns back. An agent that stops waits for that end, so
    /// it lets such calls through.
    fn may_end_hold(&self, effect: Effect) -> bool {
        match effect {
            Effect::Continue | Effect::EndUpdate | Effect::ResumeMemory => {
                self.hold_reason().is_some()
            }
            Effect::Update | Effect::Label => self.is_update_open,
            _ => false,
        }
    }

    fn begin(&mut self, effect: Effect) -> BegunCall {
        match effect {
            Effect::Pause => self.pauses_running += 1,
            Effect::BeginUpdate | Effect::EndUpdate | Effect::Update | Effect::Label => {
                self.updates_running += 1;
            }
            Effect::ReleaseMemory => self.releases_running += 1,
            Effect::Nothing
            | Effect::Flush
            | Effect::Continue
            | Effect::ResumeMemory
            | Effect::Adapters => {}
        }
        BegunCall { effect, engine_number: self.engine_number }
    }

    /// Keeps what the call has done. Returns false if that was to an earlier process of the engine,
    /// with which it is gone.
    fn end(&mut self, end: &ControlEnd) -> bool {
        let BegunCall { effect, engine_number } = end.call;
        if engine_number != self.engine_number {
            return false;
        }
        let is_done = matches!(end.outcome, ControlOutcome::Done { .. });
        let may_be_done = is_done || end.outcome == ControlOutcome::Unknown;
        match effect {
            Effect::Pause => self.pauses_running -= 1,
            Effect::BeginUpdate | Effect::EndUpdate | Effect::Update | Effect::Label => {
                self.updates_running -= 1;
            }
            Effect::ReleaseMemory => self.releases_running -= 1,
            _ => {}
        }
        let tags = MEMORY_TAGS.into_iter().filter(|tag| end.request.has_tag(tag));
        match effect {
            // If the answer was lost, it may be paused, and not all modes show in load samples.
            Effect::Pause if may_be_done => {
                (self.is_paused, self.is_paused_in_place) = (true, end.request.pauses_in_place());
            }
            Effect::Continue if is_done => {
                (self.is_paused, self.is_paused_in_place, self.is_seen_paused) =
                    (false, false, false);
            }
            Effect::BeginUpdate => self.is_update_open |= may_be_done,
            // After a refusal for another reason, half of the weights may be the new ones.
            Effect::EndUpdate if end.outcome != ControlOutcome::NotDone => {
                self.is_update_open = false;
            }
            Effect::ReleaseMemory if may_be_done => self.released.extend(tags),
            Effect::ResumeMemory if is_done => tags.for_each(|tag| {
                self.released.remove(tag);
            }),
            _ => {}
        }
        true
    }

    /// Takes the label that a control call has left.
    fn set_label(&mut self, label: WeightsLabel, set_at: Instant) {
        self.label_set_at = Some(set_at);
        self.label = Some(label);
    }

    /// Returns whether others than this agent have changed the label. `asked_at`: when the engine
    /// was asked for it.
    fn see_label(&mut self, label: WeightsLabel, asked_at: Instant) -> bool {
        let is_late = self.label_set_at.is_some_and(|set_at| asked_at <= set_at);
        if self.updates_running > 0 || is_late {
            return false;
        }
        let known = self.label.replace(label);
        known.is_some() && known != self.label
    }
}

impl Owner {
    pub(super) fn begin_control(&mut self, effect: Effect) -> Result<BegunCall, Error> {
        if self.control.may_end_hold(effect) {
            self.engine.check_up()?
        } else {
            self.check_usable()?
        }
        let runs_turns = self.table.queue().turns_inside() > 0;
        // The engine dies if its memory is released while a request runs.
        let has_none_running = self.control.is_paused && !self.control.is_paused_in_place;
        if effect == Effect::ReleaseMemory && runs_turns && !has_none_running {
            return Err(Error::EngineBusy);
        }
        // So does one that loads KV ahead of a turn, and a flush fails. Paused, it loads for ever.
        if !self.control.may_end_hold(effect) {
            // Also where the call goes on: a load would begin before the engine has it.
            self.prefetches.pause(now());
            if self.prefetches.may_be_loading(now()) {
                return Err(Error::EngineBusy);
            }
        }
        let call = self.control.begin(effect);
        self.apply_hold();
        Ok(call)
    }

    pub(super) fn abandon_control(&mut self, call: BegunCall) {
        let (request, outcome) = (ControlRequest::default(), ControlOutcome::NotDone);
        self.end_control(ControlEnd { call, request, outcome, label: None });
    }

    pub(super) fn end_control(&mut self, end: ControlEnd) {
        let is_of_this_engine = self.control.end(&end);
        let ControlEnd { call: BegunCall { effect, .. }, request, outcome, label } = end;
        info!(?effect, ?outcome, is_of_this_engine, "control call");
        if !is_of_this_engine {
            // The next process has its own weights and KV, and its shim counts from 0.
            return;
        }
        if let Some(label) = label {
            self.control.set_label(label, now());
        }
        self.apply_effect(effect, &request, outcome);
        if !self.control.changes_weights() {
            self.table.handle_kv_change(now(), KvChange::WeightsSettled);
        }
        self.apply_hold();
    }

    fn apply_effect(&mut self, effect: Effect, request: &ControlRequest, outcome: ControlOutcome) {
        let (is_done, was_flushed) = match outcome {
            ControlOutcome::Done { was_flushed } => (true, was_flushed),
            ControlOutcome::Unknown => (false, false),
            ControlOutcome::NotDone | ControlOutcome::NoUpdateOpen => return,
        };
        match effect {
            Effect::Flush if is_done => self.table.handle_kv_change(now(), KvChange::Flushed),
            Effect::Update | Effect::EndUpdate => {
                self.table.handle_kv_change(
                    now(),
                    KvChange::Weights { is_counted: is_done, was_flushed },
                );
            }
            Effect::Label => self.table.handle_kv_change(
                now(),
                KvChange::Weights { is_counted: false, was_flushed: false },
            ),
            Effect::ReleaseMemory if request.has_tag("kv_cache") => {
                self.table.handle_kv_change(now(), KvChange::Flushed)
            }
            // Memory that comes back has no weights until they are loaded again.
            Effect::ResumeMemory if request.has_tag("weights") => {
                self.table.handle_kv_change(
                    now(),
                    KvChange::Weights { is_counted: false, was_flushed: false },
                );
            }
            Effect::Adapters => {
                self.table.handle_kv_change(now(), KvChange::Adapter(request.lora_name.as_deref()));
            }
            _ => {}
        }
    }

    pub(super) fn handle_weights_label(&mut self, label: WeightsLabel, asked_at: Instant) {
        if self.control.see_label(label, asked_at) {
            warn!("the engine's weights were changed by others");
            self.table.handle_kv_change(
                now(),
                KvChange::Weights { is_counted: false, was_flushed: false },
            );
        }
    }

    pub(super) fn apply_hold(&mut self) {
        let reason = self.control.hold_reason();
        if self.table.queue().hold_reason().map(String::as_str) != reason {
            info!(reason, "the engine runs turns again, or holds them back");
            self.table.set_hold(now(), reason.map(str::to_owned));
        }
    }

    pub(super) fn publish_weights(&mut self) {
        let epoch = self.table.weights_epoch();
        let version = self.control.label.as_ref().map_or("", |label| label.version.as_str());
        let is_current = {
            let published = self.control.weights.borrow();
            published.weights.epoch == epoch && published.weights.label == version
        };
        if !is_current {
            let weights = Weights::new(epoch, version);
            self.control.weights.send_if_modified(|published| {
                let is_new = published.weights != weights;
                *published = PublishedWeights::new(weights);
                is_new
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Ends the call as if it had gone to the process that the engine is now.
    fn end(control: &mut EngineControl, effect: Effect, outcome: ControlOutcome, body: &str) {
        let call = BegunCall { effect, engine_number: control.engine_number };
        assert!(end_call(control, call, outcome, body));
    }

    fn end_call(
        control: &mut EngineControl,
        call: BegunCall,
        outcome: ControlOutcome,
        body: &str,
    ) -> bool {
        let request = ControlRequest::read(body.as_bytes());
        control.end(&ControlEnd { call, request, outcome, label: None })
    }

    const DONE: ControlOutcome = ControlOutcome::Done { was_flushed: false };

    #[test]
    fn turns_are_held_back_from_the_call_on_and_until_the_engine_runs_them_again() {
        let mut control = EngineControl::default();
        control.begin(Effect::Pause);
        assert_eq!(control.hold_reason(), Some("it is paused"), "before the call is sent");
        end(&mut control, Effect::Pause, DONE, "{}");
        control.begin(Effect::Update);
        assert_eq!(control.hold_reason(), Some("its weights are being changed"));
        end(&mut control, Effect::Update, ControlOutcome::NotDone, "{}");
        assert_eq!(control.hold_reason(), Some("it is paused"));
        end(&mut control, Effect::Continue, DONE, "{}");
        assert_eq!(control.hold_reason(), None);
        control.begin(Effect::Pause);
        end(&mut control, Effect::Pause, ControlOutcome::NotDone, "{}");
        assert_eq!(control.hold_reason(), None, "the engine refused the pause");
    }

    #[test]
    fn memory_is_released_until_each_kind_is_back() {
        let mut control = EngineControl::default();
        control.begin(Effect::ReleaseMemory);
        end(&mut control, Effect::ReleaseMemory, DONE, "{}");
        end(&mut control, Effect::ResumeMemory, DONE, r#"{"tags":["weights"]}"#);
        assert_eq!(control.hold_reason(), Some("its memory is released"));
        let rest = r#"{"tags":["kv_cache","cuda_graph"]}"#;
        end(&mut control, Effect::ResumeMemory, DONE, rest);
        assert_eq!(control.hold_reason(), None);
    }

    #[test]
    fn an_update_that_has_begun_holds_turns_back_until_it_ends() {
        let mut control = EngineControl::default();
        for effect in [Effect::BeginUpdate, Effect::Update] {
            control.begin(effect);
            end(&mut control, effect, DONE, "{}");
            assert!(control.hold_reason().is_some());
        }
        for outcome in [ControlOutcome::NotDone, DONE] {
            assert!(control.hold_reason().is_some(), "half of the weights may be the new ones");
            control.begin(Effect::EndUpdate);
            end(&mut control, Effect::EndUpdate, outcome, "{}");
        }
        assert_eq!(control.hold_reason(), None);
    }

    #[test]
    fn a_pause_whose_answer_was_lost_may_be_one() {
        let mut control = EngineControl::default();
        control.begin(Effect::Pause);
        end(&mut control, Effect::Pause, ControlOutcome::Unknown, "{}");
        assert_eq!(control.hold_reason(), Some("it is paused"));
    }

    #[test]
    fn a_pause_in_place_leaves_requests_running() {
        let mut control = EngineControl::default();
        for (body, in_place) in [(r#"{"mode":"in_place"}"#, true), (r#"{"mode":"abort"}"#, false)] {
            control.begin(Effect::Pause);
            end(&mut control, Effect::Pause, DONE, body);
            assert_eq!((control.is_paused, control.is_paused_in_place), (true, in_place));
        }
        control.begin(Effect::Continue);
        end(&mut control, Effect::Continue, DONE, "{}");
        assert!(!control.is_paused && !control.is_paused_in_place);
    }

    #[test]
    fn calls_that_end_a_hold_are_for_an_engine_that_is_held_back() {
        let mut control = EngineControl::default();
        let ends = [Effect::Continue, Effect::EndUpdate, Effect::ResumeMemory, Effect::Update];
        assert!(!ends.into_iter().any(|effect| control.may_end_hold(effect)));
        control.begin(Effect::BeginUpdate);
        end(&mut control, Effect::BeginUpdate, DONE, "{}");
        assert!(ends.into_iter().all(|effect| control.may_end_hold(effect)));
        assert!(!control.may_end_hold(Effect::Pause) && !control.may_end_hold(Effect::Flush));
    }

    #[test]
    fn a_refused_pause_ends_no_earlier_one() {
        let mut control = EngineControl::default();
        for outcome in [DONE, ControlOutcome::NotDone] {
            control.begin(Effect::Pause);
            end(&mut control, Effect::Pause, outcome, "{}");
        }
        assert_eq!(control.hold_reason(), Some("it is paused"));
    }

    #[test]
    fn what_was_done_to_an_engine_that_is_gone_does_not_hold_the_next_one_back() {
        for effect in [Effect::Pause, Effect::BeginUpdate, Effect::ReleaseMemory] {
            for outcome in [DONE, ControlOutcome::Unknown] {
                let mut control = EngineControl::default();
                let call = control.begin(effect);
                control.reset();
                assert_eq!(control.hold_reason(), None, "{effect:?}");
                assert!(!end_call(&mut control, call, outcome, "{}"), "of another engine");
                assert_eq!(control.hold_reason(), None, "{effect:?}");
            }
        }
    }

    #[test]
    fn only_a_label_that_others_changed_is_news() {
        let mut control = EngineControl::default();
        let label = |version: &str| WeightsLabel {
            version: version.to_owned(),
            model_path: "m".to_owned(),
        };
        let start = now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!control.see_label(label("1"), at(0)), "the first is no change");
        control.begin(Effect::Update);
        assert!(!control.see_label(label("2"), at(1)), "the update under way changed it");
        end(&mut control, Effect::Update, DONE, "{}");
        control.set_label(label("2"), at(2));
        assert!(!control.see_label(label("1"), at(1)), "it was read before");
        assert!(!control.see_label(label("2"), at(3)));
        assert!(control.see_label(label("3"), at(4)));
    }
}
