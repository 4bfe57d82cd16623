//! Defines what the owner task needs to start, and makes the parts of the task from that.

use std::time::Duration;

use service::tasks::Tasks;
use tokio::sync::mpsc;

use super::{
    Owner,
    audit_desk::AuditDesk,
    drain::Drain,
    engine_calls::EngineCalls,
    engine_control::EngineControl,
    engine_state::EngineState,
    handle::{OwnerMessage, TurnEnd},
    prefetch_calls::PrefetchCalls,
    reporter::{Reporter, ReporterSetup},
    session_calls::PendingDemotions,
    shims::Shims,
    trim::TrimmerLink,
    turn_gate::TurnGate,
    volatile_prefix::PrefixWarnings,
    waiters::Waiters,
};
use crate::{
    engine::EngineClient,
    gpu::Gpus,
    ledger::{Ledger, Limits},
    metrics::Metrics,
    session::{EngineCapacity, Table, TableSettings, journal::Journal},
    shim::{ShimHandle, trim::TrimHandle},
};

#[derive(Debug)]
pub struct OwnerSetup {
    pub reporter: ReporterSetup,
    pub engine: EngineClient,
    pub gpus: Gpus,
    /// On admission.
    pub limits: Limits,
    pub table_settings: TableSettings,
    /// Lists the open sessions, so that the next agent process can close them.
    pub journal: Journal,
    pub shim: ShimHandle,
    pub trimmer: TrimHandle,
    pub metrics: Metrics,
    /// `None`: audits are made only on demand.
    pub audit_interval: Option<Duration>,
    pub engine_patience: EnginePatience,
}

/// How long the engine may do or say nothing.
#[derive(Debug, Clone, Copy)]
pub struct EnginePatience {
    /// The engine counts as stuck if turns wait in it and it runs nothing for this long.
    pub stall_max: Duration,
    pub silent_max: Duration,
}

impl OwnerSetup {
    pub(super) fn into_owner(
        self,
        mailbox: mpsc::Sender<OwnerMessage>,
        turn_ends: mpsc::Sender<TurnEnd>,
        tasks: &Tasks,
    ) -> Owner {
        let Self { gpus, shim, metrics, table_settings, .. } = self;
        let engine =
            EngineState::new(self.engine_patience.stall_max, self.engine_patience.silent_max);
        let reporter = Reporter::new(
            self.reporter,
            table_settings.turns_queued_per_session_max,
            gpus.clone(),
            metrics.clone(),
            Ledger::new(self.limits),
            engine.unhealthy_reason().cloned(),
        );
        // Until the engine is reached no ranks are known, so no turn can be admitted.
        let capacity =
            EngineCapacity { ranks: vec![], page_tokens: 1, context_tokens: 0, retentions: vec![] };
        let audit_desk = AuditDesk::new(self.audit_interval, shim.clone(), metrics.clone());
        let control = EngineControl::default();
        let turn_gate = TurnGate::new(&engine);
        Owner {
            table: Table::new(table_settings, capacity),
            handle: reporter.agent_handle(
                mailbox.clone(),
                turn_ends,
                turn_gate.subscribe(),
                control.subscribe(),
                engine.answer_signs().clone(),
            ),
            engine,
            control,
            shims: Shims::new(shim, gpus, tasks.clone()),
            engine_calls: EngineCalls::new(
                self.engine,
                self.journal,
                metrics.clone(),
                mailbox,
                tasks.clone(),
            ),
            trimmer: TrimmerLink::new(self.trimmer, metrics.clone(), tasks.clone()),
            waiters: Waiters::default(),
            demotions: PendingDemotions::default(),
            prefetches: PrefetchCalls::default(),
            reporter,
            audit_desk,
            drain: Drain::Serving { is_drained: false },
            turn_gate,
            prefix_warnings: PrefixWarnings::default(),
            metrics,
        }
    }
}
