//! Keeps what operators and trainers have done to the engine: pauses, released memory, weights.
//!
//! While the engine is paused, lacks its memory or gets other weights, the session table holds
//! turns back, and the engine counts neither as silent nor as stuck. The owner task hears of each
//! control call before it is sent, and after its answer.

use std::{collections::BTreeSet, time::Instant};

use contract::{control::Effect, load::Weights};
use service::clock::now;
use tokio::sync::watch;
use tracing::{info, warn};

use super::{Error, Owner};
use crate::engine::control::{ControlOutcome, ControlRequest, WeightsLabel};

const MEMORY_TAGS: [&str; 3] = ["kv_cache", "weights", "cuda_graph"];

#[derive(Debug)]
pub(super) struct ControlEnd {
    pub(super) effect: Effect,
    pub(super) request: ControlRequest,
    pub(super) outcome: ControlOutcome,
    /// `None` if the label was not read.
    pub(super) label: Option<WeightsLabel>,
}

#[derive(Debug, Default)]
pub(super) struct EngineControl {
    /// A pause through this agent.
    is_paused: bool,
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
    weights: watch::Sender<Weights>,
}

impl EngineControl {
    pub(super) fn subscribe(&self) -> watch::Receiver<Weights> {
        self.weights.subscribe()
    }

    pub(super) fn weights(&self) -> Weights {
        self.weights.borrow().clone()
    }

    /// `None` if the engine runs turns.
    pub(super) fn hold_reason(&self) -> Option<&'static str> {
        if self.updates_running > 0 || self.is_update_open {
            Some("its weights are being changed")
        } else if self.releases_running > 0 || !self.released.is_empty() {
            Some("its memory is released")
        } else if self.is_paused {
            Some("it is paused")
        } else if self.is_seen_paused {
            // An engine that starts says no more than one that others have paused.
            Some("it says that it is not ready: it starts, or is paused")
        } else {
            None
        }
    }

    pub(super) fn reset(&mut self) {
        let Self { updates_running, releases_running, .. } = *self;
        let weights = std::mem::take(&mut self.weights);
        // Calls to the old process still end.
        *self = Self { updates_running, releases_running, weights, ..Self::default() };
    }

    pub(super) fn set_seen_paused(&mut self, is_paused: bool) {
        self.is_seen_paused = is_paused;
    }

    fn begin(&mut self, effect: Effect) {
        match effect {
            Effect::Pause => self.is_paused = true,
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
    }

    fn end(&mut self, end: &ControlEnd) {
        let is_done = matches!(end.outcome, ControlOutcome::Done { .. });
        let may_be_done = end.outcome != ControlOutcome::NotDone;
        match end.effect {
            Effect::BeginUpdate | Effect::EndUpdate | Effect::Update | Effect::Label => {
                self.updates_running -= 1;
            }
            Effect::ReleaseMemory => self.releases_running -= 1,
            _ => {}
        }
        let tags = MEMORY_TAGS.into_iter().filter(|tag| end.request.has_tag(tag));
        match end.effect {
            // If the answer was lost, the load samples show whether the engine is paused.
            Effect::Pause => self.is_paused = is_done,
            Effect::Continue if is_done => {
                (self.is_paused, self.is_seen_paused) = (false, false);
            }
            Effect::BeginUpdate => self.is_update_open |= may_be_done,
            Effect::EndUpdate => self.is_update_open = false,
            Effect::ReleaseMemory if may_be_done => self.released.extend(tags),
            Effect::ResumeMemory if is_done => tags.for_each(|tag| {
                self.released.remove(tag);
            }),
            _ => {}
        }
    }

    /// Takes the label that a control call has left.
    fn set_label(&mut self, label: WeightsLabel, set_at: Instant) {
        self.label_set_at = Some(set_at);
        self.label = Some(label);
    }

    /// Returns whether others than this agent have changed the label, by what the engine said at
    /// `asked_at`.
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
    pub(super) fn begin_control(&mut self, effect: Effect) -> Result<(), Error> {
        self.check_usable()?;
        let runs_turns = self.table.rids_inside().next().is_some();
        // The engine dies if its memory is released while a request runs.
        if effect == Effect::ReleaseMemory && runs_turns && !self.control.is_paused {
            return Err(Error::EngineBusy);
        }
        self.control.begin(effect);
        self.apply_hold();
        Ok(())
    }

    pub(super) fn abandon_control(&mut self, effect: Effect) {
        let (request, outcome) = (ControlRequest::default(), ControlOutcome::NotDone);
        self.end_control(ControlEnd { effect, request, outcome, label: None });
    }

    pub(super) fn end_control(&mut self, end: ControlEnd) {
        self.control.end(&end);
        let ControlEnd { effect, request, outcome, label } = end;
        info!(?effect, ?outcome, "control call");
        if let Some(label) = label {
            self.control.set_label(label, now());
        }
        self.apply_effect(effect, &request, outcome);
        self.apply_hold();
    }

    fn apply_effect(&mut self, effect: Effect, request: &ControlRequest, outcome: ControlOutcome) {
        let (is_done, was_flushed) = match outcome {
            ControlOutcome::Done { was_flushed } => (true, was_flushed),
            ControlOutcome::Unknown => (false, false),
            ControlOutcome::NotDone => return,
        };
        match effect {
            Effect::Flush if is_done => self.table.handle_flush(now()),
            Effect::Update | Effect::EndUpdate => {
                self.table.handle_weights_changed(now(), is_done, was_flushed);
            }
            Effect::Label => self.table.handle_weights_changed(now(), false, false),
            Effect::ReleaseMemory if request.has_tag("kv_cache") => self.table.handle_flush(now()),
            // Memory that comes back has no weights until they are loaded again.
            Effect::ResumeMemory if request.has_tag("weights") => {
                self.table.handle_weights_changed(now(), false, false);
            }
            Effect::Adapters => {
                self.table.handle_adapter_changed(now(), request.lora_name.as_deref());
            }
            _ => {}
        }
    }

    pub(super) fn handle_weights_label(&mut self, label: WeightsLabel, asked_at: Instant) {
        if self.control.see_label(label, asked_at) {
            warn!("the engine's weights were changed by others");
            self.table.handle_weights_changed(now(), false, false);
        }
    }

    pub(super) fn apply_hold(&mut self) {
        let reason = self.control.hold_reason();
        if self.table.hold_reason().map(String::as_str) != reason {
            info!(reason, "the engine runs turns again, or holds them back");
            self.table.set_hold(now(), reason.map(str::to_owned));
        }
    }

    pub(super) fn publish_weights(&mut self) {
        let epoch = self.table.weights_epoch();
        let version = self.control.label.as_ref().map_or("", |label| label.version.as_str());
        let is_current = {
            let published = self.control.weights.borrow();
            published.epoch == epoch && published.label == version
        };
        if !is_current {
            let weights = Weights::new(epoch, version);
            self.control.weights.send_if_modified(|published| {
                let is_new = *published != weights;
                *published = weights;
                is_new
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn ended(effect: Effect, outcome: ControlOutcome, body: &str) -> ControlEnd {
        let request = ControlRequest::read(body.as_bytes());
        ControlEnd { effect, request, outcome, label: None }
    }

    const DONE: ControlOutcome = ControlOutcome::Done { was_flushed: false };

    #[test]
    fn turns_are_held_back_from_the_call_on_and_until_the_engine_runs_them_again() {
        let mut control = EngineControl::default();
        control.begin(Effect::Pause);
        assert_eq!(control.hold_reason(), Some("it is paused"), "before the call is sent");
        control.end(&ended(Effect::Pause, DONE, "{}"));
        control.begin(Effect::Update);
        assert_eq!(control.hold_reason(), Some("its weights are being changed"));
        control.end(&ended(Effect::Update, ControlOutcome::NotDone, "{}"));
        assert_eq!(control.hold_reason(), Some("it is paused"));
        control.end(&ended(Effect::Continue, DONE, "{}"));
        assert_eq!(control.hold_reason(), None);
        control.begin(Effect::Pause);
        control.end(&ended(Effect::Pause, ControlOutcome::NotDone, "{}"));
        assert_eq!(control.hold_reason(), None, "the engine refused the pause");
    }

    #[test]
    fn memory_is_released_until_each_kind_is_back() {
        let mut control = EngineControl::default();
        control.begin(Effect::ReleaseMemory);
        control.end(&ended(Effect::ReleaseMemory, DONE, "{}"));
        control.end(&ended(Effect::ResumeMemory, DONE, r#"{"tags":["weights"]}"#));
        assert_eq!(control.hold_reason(), Some("its memory is released"));
        let rest = r#"{"tags":["kv_cache","cuda_graph"]}"#;
        control.end(&ended(Effect::ResumeMemory, DONE, rest));
        assert_eq!(control.hold_reason(), None);
    }

    #[test]
    fn an_update_that_has_begun_holds_turns_back_until_it_ends() {
        let mut control = EngineControl::default();
        for effect in [Effect::BeginUpdate, Effect::Update] {
            control.begin(effect);
            control.end(&ended(effect, DONE, "{}"));
            assert!(control.hold_reason().is_some());
        }
        control.begin(Effect::EndUpdate);
        control.end(&ended(Effect::EndUpdate, DONE, "{}"));
        assert_eq!(control.hold_reason(), None);
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
        control.end(&ended(Effect::Update, DONE, "{}"));
        control.set_label(label("2"), at(2));
        assert!(!control.see_label(label("1"), at(1)), "it was read before");
        assert!(!control.see_label(label("2"), at(3)));
        assert!(control.see_label(label("3"), at(4)));
    }
}
