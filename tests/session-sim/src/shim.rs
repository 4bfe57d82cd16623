//! The shim in the engine's scheduler: reports its sessions in frames, and carries out requests.
//!
//! As on a real engine, what the shim says arrives in order, but later than it was true. A full
//! table takes several frames, and a request waits for a pass of the scheduler. The shim takes a
//! limited number of requests before the scheduler has carried some out.

use std::{
    collections::{BTreeSet, VecDeque},
    time::Duration,
};

use worker_agent::session::{SessionReport, ShimReport, TablePart};

use super::{
    calls::Task,
    world::{Event, World},
};
use engine_sim::core::SessionFacts;

/// The time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);
/// The most sessions in a frame.
const FRAME_SESSIONS_MAX: usize = 2;
/// The most requests that one pass of the scheduler carries out.
const PASS_REQUESTS_MAX: usize = 2;
/// The pause of the agent before it asks again about a session whose turn has not ended.
const PAUSE: Duration = Duration::from_millis(20);

/// The shims of all ranks, as far as the agent's process and the engine's have a connection.
#[derive(Debug, Default)]
pub(super) struct Shim {
    /// What is on its way to the agent, oldest first.
    frames: VecDeque<Frame>,
    /// When the newest frame arrives.
    last_arrival: Duration,
    /// By rank: the requests that the scheduler has not carried out.
    requests: Vec<VecDeque<ShimRequest>>,
    /// The sessions that were reported last, by rank.
    seen: BTreeSet<(u32, String)>,
}

/// A message of a shim.
#[derive(Debug)]
enum Frame {
    Sessions { dp_rank: u32, part: TablePart, reports: Vec<SessionReport>, gone: Vec<String> },
    Demoted { dp_rank: u32, number: u64, is_demoted: bool },
    Inspected { dp_rank: u32, number: u64, report: Option<SessionReport> },
}

/// A request of the agent about one session.
#[derive(Debug, Clone)]
pub(super) struct ShimRequest {
    pub(super) dp_rank: u32,
    pub(super) number: u64,
    pub(super) incarnation: String,
    pub(super) is_demotion: bool,
}

fn report(session: SessionFacts) -> SessionReport {
    SessionReport {
        id: session.id,
        holds_row: session.row.is_some(),
        allocated_tokens: session.alloc_tokens as u64,
        history_tokens: session.history_tokens as u64,
        in_flight: session.inflight,
    }
}

impl World {
    /// The shim connects to the agent.
    pub(super) fn shim_connects(&mut self) {
        self.shim = Shim { last_arrival: self.now, ..Shim::default() };
        self.shim.requests.resize_with(self.plan.ranks as usize, VecDeque::new);
    }

    /// Reports regularly. Now and then the shim has lost events, and sends a full table.
    pub(super) fn shim_reports(&mut self, epoch: u64) {
        if !self.is_epoch(epoch) {
            return;
        }
        self.schedule(REPORT_INTERVAL, Event::ShimReports(epoch));
        let is_full = self.rng.u32(..8) == 0;
        self.report_sessions(is_full);
    }

    /// Reports every session in the engine, and sessions that have gone, in frames.
    fn report_sessions(&mut self, is_full: bool) {
        let (Some(agent), Some(engine)) = (&self.agent, &self.engine) else { return };
        if agent.instance != Some(engine.instance) || !self.plan.shim {
            return;
        }
        let mut frames = vec![];
        let mut seen = BTreeSet::new();
        for (dp_rank, rank) in (0..).zip(&engine.ranks) {
            let sessions = rank.core.facts().sessions;
            seen.extend(sessions.iter().map(|session| (dp_rank, session.id.clone())));
            let before = self.shim.seen.iter().filter(|(rank, _)| *rank == dp_rank);
            let gone = before.filter(|session| !seen.contains(session));
            let gone: Vec<String> = gone.map(|(_, id)| id.clone()).collect();
            let mut reports: Vec<SessionReport> = sessions.into_iter().map(report).collect();
            let mut part = TablePart { begins_table: is_full, ends_table: false };
            let first = (part, vec![], gone);
            let mut parts = vec![first];
            while !reports.is_empty() {
                let rest = reports.split_off(reports.len().min(FRAME_SESSIONS_MAX));
                part.begins_table = false;
                parts.push((part, std::mem::replace(&mut reports, rest), vec![]));
            }
            if let Some((last, ..)) = parts.last_mut() {
                last.ends_table = is_full;
            }
            let frame = |(part, reports, gone)| Frame::Sessions { dp_rank, part, reports, gone };
            frames.extend(parts.into_iter().map(frame));
        }
        self.shim.seen = seen;
        frames.into_iter().for_each(|frame| self.send_frame(frame));
    }

    /// Reports what the shim sees at this moment, and lets all that it has said arrive at once.
    /// Before the agent has heard of a foreign session, it can't count it.
    pub(super) fn report_at_once(&mut self, is_full: bool) {
        self.report_sessions(is_full);
        while self.frame_arrives() {}
    }

    fn send_frame(&mut self, frame: Frame) {
        let Some(epoch) = self.agent.as_ref().map(|agent| agent.epoch) else { return };
        let delay = if self.rng.bool() { self.between(0, 5) } else { self.between(0, 120) };
        let arrival = self.shim.last_arrival.max(self.now + delay);
        self.shim.last_arrival = arrival;
        self.shim.frames.push_back(frame);
        self.schedule(arrival - self.now, Event::FrameArrives(epoch));
    }

    /// Lets the oldest frame arrive at the agent. Returns whether there was one.
    pub(super) fn frame_arrives(&mut self) -> bool {
        let Some(frame) = self.shim.frames.pop_front() else { return false };
        match frame {
            Frame::Sessions { dp_rank, part, reports, gone } => {
                self.call_table(|table, now| {
                    table.handle_shim_report(
                        now,
                        dp_rank,
                        ShimReport::Sessions { part, reports: &reports },
                    );
                });
                for id in gone {
                    self.closing.remove(&id);
                    self.call_table(|table, now| {
                        table.handle_shim_report(now, dp_rank, ShimReport::SessionGone { id: &id })
                    });
                }
            }
            Frame::Demoted { dp_rank, number, is_demoted } => {
                self.call_table(|table, now| {
                    table.handle_shim_report(
                        now,
                        dp_rank,
                        ShimReport::Demotion { number, is_demoted },
                    );
                });
            }
            Frame::Inspected { dp_rank, number, report } => {
                self.note(|| format!("shim answers {number}: {report:?}"));
                self.call_table(|table, now| {
                    table.handle_shim_report(
                        now,
                        dp_rank,
                        ShimReport::Inspection { number, report: report.as_ref() },
                    );
                });
            }
        }
        true
    }

    /// The agent asks the shim for a session's history, after it has aborted the turn `rid`.
    pub(super) fn inspect(&mut self, request: ShimRequest, rid: Option<String>, is_repeat: bool) {
        match rid {
            Some(rid) => self.call(Task::AbortAndInspect { rid, request }),
            None => {
                let pause = if is_repeat { PAUSE } else { Duration::ZERO };
                self.send_request(pause, request);
            }
        }
    }

    /// Sends a request to the shim.
    pub(super) fn send_request(&mut self, pause: Duration, request: ShimRequest) {
        let Some(agent) = &self.agent else { return };
        let (epoch, latency) = (agent.epoch, self.between(0, 8));
        self.schedule(pause + latency, Event::RequestArrives { epoch, request });
    }

    pub(super) fn request_arrives(&mut self, epoch: u64, request: ShimRequest) {
        let instance = self.engine.as_ref().map(|engine| engine.instance);
        let knows = |agent: &super::shell::AgentProcess| agent.instance == instance;
        if !self.is_epoch(epoch) || !self.agent.as_ref().is_some_and(knows) {
            return;
        }
        let dp_rank = request.dp_rank;
        let Some(requests) = self.shim.requests.get_mut(dp_rank as usize) else { return };
        requests.push_back(request);
        let (count, max) = (requests.len(), self.plan.table_settings.shim_requests_max);
        assert!(count <= max, "{count} requests are with a shim that takes {max}");
        if count == 1 {
            let pass = self.between(1, 60);
            self.schedule(pass, Event::ShimPass { epoch, dp_rank });
        }
    }

    /// Carries out requests between two steps of a rank's scheduler.
    pub(super) fn shim_pass(&mut self, epoch: u64, dp_rank: u32) {
        if !self.is_epoch(epoch) {
            return;
        }
        for _ in 0..PASS_REQUESTS_MAX {
            let Some(engine) = &mut self.engine else { return };
            let rank = &mut engine.ranks[dp_rank as usize];
            let Some(requests) = self.shim.requests.get_mut(dp_rank as usize) else { return };
            // An inspection comes after everything that the engine got before.
            if requests.front().is_some_and(|first| !first.is_demotion && rank.has_inbox()) {
                break;
            }
            let Some(ShimRequest { number, incarnation, is_demotion, .. }) = requests.pop_front()
            else {
                return;
            };
            let frame = if is_demotion {
                let is_demoted = rank.core.demote(&incarnation);
                self.note(|| format!("shim demotes {incarnation}: {is_demoted}"));
                Frame::Demoted { dp_rank, number, is_demoted }
            } else {
                let mut sessions = rank.core.facts().sessions.into_iter();
                let found = sessions.find(|session| session.id == incarnation);
                Frame::Inspected { dp_rank, number, report: found.map(report) }
            };
            self.send_frame(frame);
        }
        if self.shim.requests.get(dp_rank as usize).is_some_and(|requests| !requests.is_empty()) {
            let pass = self.between(1, 60);
            self.schedule(pass, Event::ShimPass { epoch, dp_rank });
        }
    }
}
