//! Handles the owner task's messages from and to the shims, Berth's Python parts in the engine.
//!
//! Without its shim, a rank's figures come from the engine's HTTP interface, later and less
//! exactly.

mod check;

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use contract::load::FunctionOff;
use service::{clock::now, tasks::Tasks};
use tracing::{debug, info, warn};

use self::check::ShimCheck;
use super::{Owner, reporter::ShimAbilities, retentions::ShimWords, trim::TrimmerLink};
use crate::{
    gpu::{Gpus, process::Scheduler},
    session::{SessionReport, ShimReport, Table, TablePart},
    shim::{Hello, SessionChanges, SessionFacts, ShimHandle},
};

/// The shim refuses a demotion while the session's last turn is still in a queue of the engine.
const DEMOTE_RETRY_PAUSE: Duration = Duration::from_millis(20);
/// The shim cuts its texts to 512 bytes.
const REASON_CHARS_MAX: usize = 512;

pub(super) struct Shims {
    handle: ShimHandle,
    gpus: Gpus,
    tasks: Tasks,
    /// The ranks whose shim works, and whether it can demote sessions.
    connected: HashMap<u32, bool>,
    /// Has every rank with a connected shim, also an inert one.
    functions_off: BTreeMap<u32, Vec<FunctionOff>>,
    pub(super) words: ShimWords,
    pub(super) check: ShimCheck,
}

impl Shims {
    pub(super) fn new(handle: ShimHandle, gpus: Gpus, tasks: Tasks) -> Self {
        let (connected, functions_off) = (HashMap::new(), BTreeMap::new());
        let (words, check) = (ShimWords::default(), ShimCheck::default());
        Self { handle, gpus, tasks, connected, functions_off, words, check }
    }

    /// Returns whether the shim works.
    pub(super) fn connect(&mut self, table: &mut Table, hello: &Hello) -> bool {
        let Hello { pid, dp_rank, sglang, shim, undemotable_reason: undemotable, .. } = hello;
        self.gpus.set_scheduler(Scheduler {
            dp_rank: *dp_rank,
            pid: hello.pid_in_agent_namespace,
            pid_in_own_namespace: *pid,
            device: hello.device.clone(),
        });
        self.functions_off.insert(*dp_rank, functions_off(hello));
        self.words.hear(hello);
        // For example, the engine lacks what the shim's reports need.
        if let Some(reason) = &hello.inert_reason {
            warn!(dp_rank, pid, sglang, reason, "the engine's shim is inert");
            return false;
        }
        info!(dp_rank, pid, sglang, shim, undemotable, "the engine's shim is there");
        self.connected.insert(*dp_rank, undemotable.is_none());
        table.handle_shim_report(
            now(),
            *dp_rank,
            ShimReport::Up { can_demote: undemotable.is_none() },
        );
        if let Some(reason) = &hello.unauditable_reason {
            info!(dp_rank, reason, "the engine's pages can't be audited");
        }
        true
    }

    pub(super) fn remove(&mut self, dp_rank: u32) {
        self.connected.remove(&dp_rank);
        self.functions_off.remove(&dp_rank);
        self.words.disconnect(dp_rank);
    }

    pub(super) fn begin_process(&mut self) {
        let Self { functions_off, words, check, .. } = self;
        words.begin_process(|dp_rank| functions_off.contains_key(&dp_rank));
        check.begin(now());
    }

    /// A function that is off for one reason on several ranks is listed once.
    pub(super) fn abilities(&self, trimmer: &TrimmerLink) -> ShimAbilities {
        let mut functions_off: Vec<FunctionOff> =
            self.functions_off.values().flatten().cloned().collect();
        functions_off.extend(trimmer.off_reason().map(|reason| function_off("trimming", reason)));
        functions_off.sort_unstable();
        functions_off.dedup();
        let trim_sglang_version = trimmer.sglang_version().map(str::to_owned);
        ShimAbilities { trim_sglang_version, functions_off }
    }

    /// Returns whether it was time for the check.
    pub(super) fn run_check(&mut self, now: Instant, ranks: usize) -> bool {
        let was_waiting = self.check.next_deadline().is_some();
        self.check.run_deadline(now, self.connected.len(), ranks);
        was_waiting && self.check.next_deadline().is_none()
    }

    pub(super) fn count(&self) -> usize {
        self.connected.len()
    }

    /// The table forgets shims with the old engine, but one may connect before the new one is
    /// reached.
    pub(super) fn register_again(&self, table: &mut Table) {
        for (&dp_rank, &can_demote) in &self.connected {
            table.handle_shim_report(now(), dp_rank, ShimReport::Up { can_demote });
            // Fails only if this shim has disconnected. `ShimEvent::Down` follows.
            let _ = self.handle.sample_now(dp_rank);
        }
    }

    pub(super) fn handle(&self) -> ShimHandle {
        self.handle.clone()
    }

    pub(super) fn demote(&self, dp_rank: u32, number: u64, incarnation: String) {
        self.demote_after(Duration::ZERO, dp_rank, number, incarnation);
    }

    /// Fails only if the shim has disconnected, and
    /// [`ShimEvent::Down`](crate::shim::ShimEvent::Down) follows.
    fn demote_after(&self, pause: Duration, dp_rank: u32, number: u64, incarnation: String) {
        let handle = self.handle.clone();
        self.tasks.spawn(async move {
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            if let Err(error) = handle.demote(dp_rank, number, incarnation).await {
                debug!(dp_rank, %error, "can't ask the shim to demote a session");
            }
        });
    }

    pub(super) fn handle_demotion(
        &self,
        table: &mut Table,
        (dp_rank, number): (u32, u64),
        id: String,
        refusal: Option<&str>,
    ) {
        match refusal {
            // The session's first turn may have been aborted and have left no KV.
            None | Some("no_kv") => table.handle_shim_report(
                now(),
                dp_rank,
                ShimReport::Demotion { number, is_demoted: true },
            ),
            // The client has its last answer, but the turn is still in a queue of the engine. If
            // that lasts, the demotion ends when the session's deadline passes.
            Some("busy" | "in_flight") => {
                self.demote_after(DEMOTE_RETRY_PAUSE, dp_rank, number, id);
            }
            Some(reason) => {
                warn!(incarnation = id, reason, "the engine's shim did not demote a session");
                table.handle_shim_report(
                    now(),
                    dp_rank,
                    ShimReport::Demotion { number, is_demoted: false },
                );
            }
        }
    }
}

fn functions_off(hello: &Hello) -> Vec<FunctionOff> {
    [
        ("reports", &hello.inert_reason),
        ("demotion", &hello.undemotable_reason),
        ("audit", &hello.unauditable_reason),
        ("republishing", &hello.unpublishable_reason),
        ("guarding", &hello.pin_safety.unguarded_reason),
    ]
    .into_iter()
    .filter_map(|(function, reason)| Some(function_off(function, reason.as_deref()?)))
    .collect()
}

fn function_off(function: &str, reason: &str) -> FunctionOff {
    let reason = reason.chars().take(REASON_CHARS_MAX).collect();
    FunctionOff { function: function.to_owned(), reason }
}

impl Owner {
    pub(super) fn record_sessions(&mut self, sessions: SessionChanges) {
        let SessionChanges { dp_rank, begins_table, ends_table, changed, gone_ids } = sessions;
        // The shim sends no figures before a full table is complete, so this is its sign of life.
        self.engine.record_shim(dp_rank, now());
        let part = TablePart { begins_table, ends_table };
        let reports: Vec<SessionReport> = changed.into_iter().map(session_report).collect();
        self.table.handle_shim_report(
            now(),
            dp_rank,
            ShimReport::Sessions { part, reports: &reports },
        );
        for id in gone_ids {
            self.table.handle_shim_report(now(), dp_rank, ShimReport::SessionGone { id: &id });
        }
    }
}

pub(super) fn record_inspection(
    table: &mut Table,
    dp_rank: u32,
    number: u64,
    session: Option<SessionFacts>,
) {
    let report = session.map(session_report);
    table.handle_shim_report(
        now(),
        dp_rank,
        ShimReport::Inspection { number, report: report.as_ref() },
    );
}

fn session_report(session: SessionFacts) -> SessionReport {
    SessionReport {
        id: session.id,
        holds_row: session.holds_row,
        allocated_tokens: u64::from(session.allocated_tokens),
        history_tokens: u64::from(session.history_tokens),
        in_flight: session.in_flight,
    }
}
