//! Runs the owner task: the only task that changes sessions, and the one that admits turns.
//!
//! For each message through [`AgentHandle`], the task updates [`crate::session::Table`], which
//! decides but does no I/O, carries out the effects that the table asks for, and publishes what
//! changed. It never waits for the engine: each call runs in a task of its own, whose result is a
//! message too. Each part of the task owns its own state; this file only passes messages on.

pub mod adapters;
mod audit_desk;
mod bootstrap_probe;
mod drain;
mod engine_calls;
mod engine_control;
pub mod engine_monitor;
mod engine_news;
mod engine_state;
mod handle;
mod prefetch_calls;
mod published;
mod reporter;
mod retentions;
mod role_watch;
mod session_calls;
mod setup;
mod shims;
mod trim;
mod turn_calls;
mod turn_gate;
mod volatile_prefix;
mod waiters;

use std::{pin::pin, sync::Arc, time::Instant};

use service::{clock::now, tasks::Tasks};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::{
    audit_desk::AuditDesk,
    drain::{Drain, DrainStep},
    engine_calls::{EngineCalls, Inspection},
    engine_control::EngineControl,
    engine_state::EngineState,
    handle::{OwnerMessage, TurnEnd},
    prefetch_calls::PrefetchCalls,
    reporter::Reporter,
    session_calls::PendingDemotions,
    shims::{Shims, record_inspection},
    trim::TrimmerLink,
    turn_gate::TurnGate,
    volatile_prefix::PrefixWarnings,
    waiters::Waiters,
};
pub use self::{
    drain::{DrainState, Ending},
    engine_control::{BegunCall, PublishedWeights},
    handle::{
        Admission, AdmissionRequest, AdmittedTurn, AgentHandle, EngineNews, Error, OpenedSession,
        RankPageAudit, RunModeResult, SessionChange, SessionWatch, TurnLease, TurnRun,
    },
    published::{PageEnd, PublishedSession, SessionSnapshot},
    reporter::ReporterSetup,
    setup::{EnginePatience, OwnerSetup},
};
use crate::{
    gpu::tracker::Snapshot,
    ledger::AgentHealth,
    metrics::Metrics,
    session::{Effect, EngineLoad, KvChange, SessionEvent, ShimReport, Table, WeightsReport},
    shim::{Hello, ShimEvent, trim::TrimmerEvent},
};

/// The owner handles each in microseconds. When the mailbox is full, callers wait.
const MESSAGES_QUEUED_MAX: usize = 1024;

#[must_use]
pub fn start(
    setup: OwnerSetup,
    shim_events: mpsc::Receiver<ShimEvent>,
    trimmer_events: mpsc::Receiver<TrimmerEvent>,
    tasks: &Tasks,
) -> AgentHandle {
    let (mailbox, messages) = mpsc::channel(MESSAGES_QUEUED_MAX);
    let turns_max = setup.limits.turns_max_over_ranks() + setup.table_settings.turns_queued_max;
    let (turn_end_sender, turn_ends) = mpsc::channel(turns_max);
    let gpus = setup.gpus.subscribe();
    let inbox = Inbox { trimmer_events, turn_ends, messages, shim_events, gpus };
    let owner = setup.into_owner(mailbox, turn_end_sender, tasks);
    let handle = owner.handle.clone();
    tasks.spawn_essential("owner", owner.run(inbox, tasks.token()));
    handle
}

struct Inbox {
    trimmer_events: mpsc::Receiver<TrimmerEvent>,
    turn_ends: mpsc::Receiver<TurnEnd>,
    messages: mpsc::Receiver<OwnerMessage>,
    shim_events: mpsc::Receiver<ShimEvent>,
    gpus: watch::Receiver<Arc<Snapshot>>,
}

struct Owner {
    table: Table,
    engine: EngineState,
    engine_calls: EngineCalls,
    control: EngineControl,
    shims: Shims,
    trimmer: TrimmerLink,
    handle: AgentHandle,
    waiters: Waiters,
    demotions: PendingDemotions,
    prefetches: PrefetchCalls,
    reporter: Reporter,
    audit_desk: AuditDesk,
    drain: Drain,
    turn_gate: TurnGate,
    prefix_warnings: PrefixWarnings,
    metrics: Metrics,
}

impl Owner {
    async fn run(mut self, mut inbox: Inbox, token: CancellationToken) {
        let mut timer = pin!(tokio::time::sleep_until(self.next_deadline().into()));
        let mut cancelled = pin!(token.cancelled());
        loop {
            let deadline = self.next_deadline().into();
            if timer.deadline() != deadline {
                timer.as_mut().reset(deadline);
            }
            tokio::select! {
                biased;
                // The trimmer's plan for a turn must be handled before the turn's end.
                Some(event) = inbox.trimmer_events.recv() => self.handle_trimmer_event(event),
                // A client may send its next turn as soon as it has its answer: the session must be
                // free.
                Some(end) = inbox.turn_ends.recv() => self.handle_turn_end(&end),
                // The shim's answers have deadlines, and clients could keep the mailbox full.
                Some(event) = inbox.shim_events.recv() => self.handle_shim_event(event),
                message = inbox.messages.recv() => match message {
                    Some(message) => self.handle_message(message),
                    None => return,
                },
                Ok(()) = inbox.gpus.changed() => self.reporter.mark_stale(),
                () = &mut timer => {}
                () = &mut cancelled => return,
            }
            self.after_event(now());
            if self.drain.has_handed_over() {
                // From now on, the sessions are the next process's: nothing may change them.
                return token.cancelled().await;
            }
        }
    }

    fn next_deadline(&self) -> Instant {
        let deadlines = [
            self.table.next_deadline(),
            self.audit_desk.audits().next_due(),
            self.drain.next_deadline(),
            self.engine_calls.next_journal_retry(),
            self.engine.next_silence_check(),
            self.shims.check.next_deadline(),
        ];
        deadlines.into_iter().flatten().fold(self.reporter.next_due(), Instant::min)
    }

    fn after_event(&mut self, now: Instant) {
        self.engine_calls.retry_journal(now);
        self.check_silence(now);
        self.run_shim_check(now);
        self.table.run_deadlines(now);
        self.audit_desk.run_deadlines(now);
        self.publish_weights();
        self.turn_gate.publish(self.check_usable(), &self.engine);
        self.carry_out_effects();
        let turns_running = self.table.queue().turns_inside();
        let pending = match self.drain.ending() {
            Some(Ending::HandOver) => self.table.unfinished().changes,
            Some(Ending::Close) | None => self.table.unfinished().closes,
        };
        match self.drain.advance(now, turns_running, pending, self.engine.info().is_some()) {
            DrainStep::Wait => {}
            DrainStep::AbortTurns => {
                let rids = self.table.queue().rids_inside().map(str::to_owned).collect();
                self.engine_calls.abort_turns(rids);
            }
            DrainStep::Complete(ending) => {
                if ending == Ending::HandOver {
                    self.engine_calls.hand_over(self.table.hand_over(now));
                }
                self.drain.complete();
            }
        }
        if now >= self.reporter.next_due() {
            self.publish_report(now);
        }
    }

    /// Also publishes the description if the ranks' GPUs became known.
    fn publish_report(&mut self, now: Instant) {
        for key in self.prefetches.due(now, &self.table) {
            self.prefetch(&key, None);
        }
        self.prefetches.count(now, &self.metrics);
        let audits = self.audit_desk.audits();
        let restart = self.table.restart_required(now).or_else(|| audits.restart_reason(now));
        let health = AgentHealth {
            unhealthy_reason: self.engine.unhealthy_reason().cloned(),
            is_draining: self.drain.is_reported(),
            restart_reason: restart,
            runs_whole_turns: self.engine.runs_whole_turns(),
            held_reason: self.control.hold_reason().map(str::to_owned),
            weights: self.control.weights(),
        };
        self.reporter.publish_report(now, &self.table, self.audit_desk.audits(), health);
        if !self.reporter.is_description_current(now, &self.shims.abilities(&self.trimmer)) {
            self.publish_description();
        }
    }

    fn publish_description(&self) {
        if let Some(info) = self.engine.info() {
            let abilities = self.shims.abilities(&self.trimmer);
            self.reporter.publish_description(info, self.offer(info), abilities);
        }
    }

    fn handle_turn_end(&mut self, end: &TurnEnd) {
        self.reporter.mark_stale();
        debug!(rid = end.rid, outcome = ?end.outcome, "turn ended");
        self.waiters.remove_turn(&end.rid);
        self.table.end_turn(now(), &end.rid, end.outcome);
    }

    fn handle_message(&mut self, message: OwnerMessage) {
        self.reporter.mark_stale();
        match message {
            OwnerMessage::Claim { request, reply } => {
                drop(reply.send(turn_calls::claim(self, request)));
            }
            // A client that is gone needs no place.
            OwnerMessage::ClaimAndAdmit { reply, .. } if reply.is_closed() => {}
            OwnerMessage::ClaimAndAdmit { claim, request, reply } => {
                drop(reply.send(turn_calls::claim_and_admit(self, claim, request)));
            }
            OwnerMessage::Admit { rid, request, reply } => {
                turn_calls::admit(self, rid, request, reply);
            }
            OwnerMessage::Abandon(rid) => self.table.abandon_turn(now(), &rid),
            OwnerMessage::Open { request, reply } => self.open(request, reply),
            OwnerMessage::Close { key, only_if_idle, reply } => {
                self.close(&key, only_if_idle, reply);
            }
            OwnerMessage::Demote { key, reply } => self.demote(key, reply),
            OwnerMessage::Prefetch { key, reply } => self.prefetch(&key, Some(reply)),
            OwnerMessage::Audit { dp_rank, reply } => self.audit_desk.request(dp_rank, reply),
            OwnerMessage::WatchSessions(reply) => {
                let _ = reply.send(self.reporter.watch_sessions());
            }
            OwnerMessage::BeginControl { effect, reply } => {
                // A caller that is gone sends no call.
                let begun = self.begin_control(effect);
                if let Err(Ok(call)) = reply.send(begun) {
                    self.abandon_control(call);
                }
            }
            OwnerMessage::EndControl(end) => self.end_control(end),
            OwnerMessage::Engine(news) => self.handle_engine_news(news),
            OwnerMessage::OpenResult { incarnation, result } => {
                self.table.handle_open_result(now(), &incarnation, &result);
            }
            OwnerMessage::CloseResult { incarnation, result } => {
                self.table.handle_close_result(now(), &incarnation, result);
            }
            OwnerMessage::Drain { grace_period, ending, reply } => {
                self.begin_drain(grace_period, ending, reply);
            }
            OwnerMessage::SetDrained { wanted, reply } => {
                let _ = reply.send(self.set_drained(wanted));
            }
        }
    }

    fn check_usable(&self) -> Result<(), Error> {
        if self.drain.has_begun() { Err(Error::Stopping) } else { self.engine.check_up() }
    }

    fn handle_trimmer_event(&mut self, event: TrimmerEvent) {
        self.reporter.mark_stale();
        match event {
            TrimmerEvent::Up(trimmer) => self.trimmer.connect(&mut self.table, trimmer),
            TrimmerEvent::Down { reason } => self.trimmer.disconnect(&mut self.table, &reason),
            TrimmerEvent::Planned(report) => {
                return self.trimmer.handle_plan(&mut self.table, &report);
            }
        }
        self.publish_description();
    }

    fn handle_shim_event(&mut self, event: ShimEvent) {
        self.reporter.mark_stale();
        match event {
            ShimEvent::Up(hello) => self.handle_shim_up(hello),
            ShimEvent::Facts(facts) => {
                self.engine.record_shim(facts.dp_rank, facts.read_at);
                let (changes, has_old_kv) = (facts.weight_changes, facts.has_old_kv);
                let weights = WeightsReport { changes, has_old_kv };
                let is_changing = self.control.changes_weights();
                let report = KvChange::WeightsCounted { report: weights, is_changing };
                self.table.handle_kv_change(now(), report);
                self.reporter.ledger.record_facts(facts);
                let (waiting_requests, used_tokens) = (facts.waiting.into(), facts.used_tokens());
                let load = EngineLoad { waiting_requests, used_tokens };
                self.table.handle_load(now(), facts.dp_rank, load);
            }
            ShimEvent::Sessions(sessions) => self.record_sessions(sessions),
            ShimEvent::Closed { dp_rank, id } => {
                self.table.handle_shim_report(now(), dp_rank, ShimReport::SessionGone { id: &id });
            }
            ShimEvent::Demoted { dp_rank, number, id, refusal } => {
                let request = (dp_rank, number);
                self.shims.handle_demotion(&mut self.table, request, id, refusal.as_deref());
            }
            ShimEvent::Prefetched { number, tokens, refusal, .. } => {
                self.prefetches.finish(number, tokens, refusal);
            }
            ShimEvent::Inspected { dp_rank, number, session } => {
                record_inspection(&mut self.table, dp_rank, number, session);
            }
            ShimEvent::Audited { dp_rank, reply } => {
                self.audit_desk.handle_answer(&mut self.table, dp_rank, &reply);
            }
            ShimEvent::Down { dp_rank, reason } => {
                warn!(dp_rank, reason, "the engine's shim has disconnected");
                self.audit_desk.remove_rank(dp_rank);
                self.reporter.ledger.remove_shim(dp_rank);
                self.shims.remove(dp_rank);
                self.prefetches.remove_rank(dp_rank);
                self.table.handle_shim_report(now(), dp_rank, ShimReport::Down);
                self.refresh_retentions();
            }
            ShimEvent::Committed { id, rid, history_tokens, is_retracted, .. } => {
                // In the engine, turns of the Responses API have ids with a prefix.
                let rid = rid.strip_prefix("resp_").unwrap_or(&rid);
                self.table.handle_commit(rid, &id, history_tokens.into(), is_retracted);
            }
            ShimEvent::Aborted { dp_rank, id, was_running: true } => {
                let report = ShimReport::Aborted { incarnation: &id };
                self.table.handle_shim_report(now(), dp_rank, report);
            }
            // The agent asks where it must know what they led to.
            ShimEvent::Opened { .. } | ShimEvent::Aborted { .. } => {}
        }
    }

    fn handle_shim_up(&mut self, hello: Hello) {
        if self.shims.connect(&mut self.table, &hello) {
            self.audit_desk.add_rank(hello.dp_rank, hello.unauditable_reason);
            self.reporter.ledger.add_shim(hello.dp_rank, hello.page_bytes);
        }
        self.refresh_retentions();
    }

    fn carry_out_effects(&mut self) {
        let effects = self.table.take_effects();
        if !effects.is_empty() {
            self.reporter.mark_stale();
        }
        for effect in effects {
            match effect {
                Effect::Admitted { rid, mut turn } => {
                    // A tag must not begin if it isn't in the journal.
                    if self.engine_calls.journal_problem().is_some() {
                        turn.drop_tag();
                    }
                    if let Some(run_mode) =
                        self.waiters.tell_admitted(&rid, turn, &self.table, &self.reporter)
                    {
                        self.metrics.count_run_mode(run_mode.as_str());
                    }
                }
                Effect::Refused { rid, error } => self.waiters.refuse(&rid, error.into()),
                Effect::Journal(record) => self.engine_calls.write_journal(&record),
                // A session must not be opened if it isn't in the journal.
                Effect::Open { incarnation, idle_max } => {
                    match self.engine_calls.journal_problem().map(str::to_owned) {
                        Some(reason) => self.engine_calls.refuse_open(incarnation, reason),
                        None => self.engine_calls.open(incarnation, idle_max),
                    }
                }
                Effect::Close(close_request) => {
                    let rank_count = self.engine.info().map(|info| info.rows.len());
                    let all_shims_connected = rank_count == Some(self.shims.count());
                    self.engine_calls.close(close_request, all_shims_connected);
                }
                Effect::Inspect { dp_rank, number, incarnation, rid, is_repeat } => {
                    let inspection = Inspection { dp_rank, number, incarnation, rid, is_repeat };
                    self.engine_calls.inspect(self.shims.handle(), inspection);
                }
                Effect::Demote { dp_rank, number, incarnation } => {
                    self.shims.demote(dp_rank, number, incarnation);
                }
                Effect::AnswerQuestion { question, incarnation, tokens_max } => {
                    self.trimmer.answer_question(question, incarnation.as_deref(), tokens_max);
                }
                Effect::RunModeKnown { rid, run_mode, growth_tokens_max } => {
                    self.metrics.count_run_mode(run_mode.as_str());
                    self.waiters.tell_run_mode(&rid, Ok(TurnRun { run_mode, growth_tokens_max }));
                }
                Effect::RefusedByShim { rid, error } => {
                    self.waiters.tell_run_mode(&rid, Err(error));
                }
                Effect::SessionChanged(key) => {
                    self.demotions.check(&self.table, &key);
                    self.prefetches.check(&self.table, &key);
                    self.reporter.publish_session(&self.table, &key);
                }
                Effect::Freed(time_to_free) => self.metrics.record_close(time_to_free),
                Effect::VolatilePrefix(key, prefix) => {
                    self.prefix_warnings.report(&key, prefix, &self.metrics);
                }
                Effect::SessionEvent(key, event) => {
                    info!(session = %key.digest(), event = event.as_str(), "session event");
                    self.metrics.count_session_event(event.as_str());
                    if event == SessionEvent::Demoted {
                        self.demotions.finish(&key, &Ok(()));
                    }
                }
            }
        }
    }
}
