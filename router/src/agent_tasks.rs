//! Starts the tasks that follow each agent when it joins the fleet, and stops them when it ends.
//!
//! The fleet's `slot_keeper` says when. A slot goes to another agent only when no table of the
//! router refers to it any more.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use service::{clock::now, log::describe_error, tasks::Tasks};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

use crate::{
    fleet::{
        connect::LoadWatcher,
        control::{ControlClient, ControlClients},
        dial::{AgentCredentials, AgentDialer},
        slot_keeper::{SlotKeeper, Step},
        snapshot::Snapshot,
        state::Update,
        view::{UpdateSender, View},
    },
    residency::kv_index::KvWatcher,
    turn::{liveness, shared::Shared},
};

/// How often slots are looked at to which something still refers. A turn may run for minutes, and
/// no other agent waits for the slot unless a thousand slots are in use.
const REFERENCES_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Any long time will do: every change of members wakes the loop.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(3600);

#[derive(Debug)]
pub(crate) struct FollowSettings {
    /// The longest time to connect and to begin a stream.
    pub(crate) connect_max: Duration,
    /// Of each agent.
    pub(crate) sessions_max: usize,
    pub(crate) credentials: AgentCredentials,
}

#[derive(Debug)]
pub(crate) struct AgentTasks {
    settings: FollowSettings,
    view: Arc<View>,
    shared: Arc<Shared>,
    control_clients: Arc<ControlClients>,
    updates: UpdateSender,
    tasks: Tasks,
    keeper: SlotKeeper,
    /// The tasks by slot.
    running: BTreeMap<usize, RunningTasks>,
}

#[derive(Debug)]
struct RunningTasks {
    token: CancellationToken,
    tracker: TaskTracker,
}

impl AgentTasks {
    pub(crate) fn new(
        settings: FollowSettings,
        view: Arc<View>,
        shared: Arc<Shared>,
        control_clients: Arc<ControlClients>,
        updates: UpdateSender,
        tasks: Tasks,
    ) -> Self {
        let (keeper, running) = (SlotKeeper::default(), BTreeMap::new());
        Self { settings, view, shared, control_clients, updates, tasks, keeper, running }
    }

    pub(crate) async fn run(mut self) {
        let token = self.tasks.token();
        tokio::select! {
            biased;
            () = token.cancelled() => {}
            () = self.run_forever() => {}
        }
    }

    async fn run_forever(&mut self) {
        loop {
            let view = self.view.load();
            let version = view.members_version();
            let steps = self.keeper.next_steps(&view);
            // The snapshot counts as a reference to the slots of its agents.
            drop(view);
            for step in steps {
                match step {
                    Step::Start { slot, control_url } => self.start(slot, &control_url).await,
                    Step::Stop { slot } => self.stop(slot),
                    Step::RemoveReferences { slot } => self.remove_references(slot).await,
                }
            }
            let interval = match self.keeper.has_ended_slots() {
                true => REFERENCES_CHECK_INTERVAL,
                false => IDLE_CHECK_INTERVAL,
            };
            let is_new = |view: &Snapshot| view.members_version() != version;
            drop(self.view.wait_for(now() + interval, is_new).await);
        }
    }

    async fn start(&mut self, slot: usize, control_url: &str) {
        let FollowSettings { connect_max, sessions_max, ref credentials } = self.settings;
        let running =
            RunningTasks { token: self.tasks.token().child_token(), tracker: TaskTracker::new() };
        match AgentDialer::new(control_url, credentials, connect_max) {
            Ok(dialer) => {
                info!(control = control_url, "agent joins");
                self.control_clients.insert(slot, ControlClient::new(&dialer));
                self.shared.upstream.set_signer(slot, dialer.signer().cloned());
                let load_watcher = LoadWatcher {
                    agent_index: slot,
                    dialer: dialer.clone(),
                    connect_max,
                    sessions_max,
                    updates: self.updates.clone(),
                    view: Arc::clone(&self.view),
                };
                let kv_index = Arc::clone(&self.shared.kv_index);
                let kv_watcher = KvWatcher { agent: slot, dialer, connect_max, kv_index };
                let directory = Arc::clone(&self.shared.directory);
                let upstream = Arc::clone(&self.shared.upstream);
                let liveness = liveness::run(slot, directory, upstream, running.token.clone());
                self.spawn(&running, load_watcher.run(running.token.clone()));
                self.spawn(&running, kv_watcher.run(running.token.clone()));
                self.spawn(&running, liveness);
            }
            // The sources check URLs, so this doesn't happen.
            Err(error) => {
                let why = describe_error(&error);
                warn!(control = control_url, why, "the agent's address can't be used");
                drop(self.updates.send((slot, Update::AgentLost(why), now())).await);
            }
        }
        self.running.insert(slot, running);
    }

    fn spawn(&self, running: &RunningTasks, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(running.tracker.track_future(task));
    }

    /// The view task hears of the end of the tasks after all their updates.
    fn stop(&mut self, slot: usize) {
        self.control_clients.remove(slot);
        let running = self.running.remove(&slot);
        let updates = self.updates.clone();
        self.tasks.spawn(async move {
            if let Some(RunningTasks { token, tracker }) = running {
                token.cancel();
                tracker.close();
                tracker.wait().await;
            }
            drop(updates.send((slot, Update::TasksEnded, now())).await);
        });
    }

    async fn remove_references(&mut self, slot: usize) {
        self.shared.kv_index.forget_agent(slot);
        self.shared.upstream.pulses().set_silent(slot, false);
        self.shared.upstream.set_signer(slot, None);
        let is_unbound = self.shared.directory.forget_agent(slot);
        if self.shared.placer.forget_agent(slot) && is_unbound {
            self.keeper.release(slot);
            drop(self.updates.send((slot, Update::Unreferenced, now())).await);
        }
    }
}

#[cfg(test)]
mod tests;
