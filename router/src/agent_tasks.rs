//! Starts the tasks that follow each agent when it joins the fleet, and stops them when it ends.
//!
//! `steps` says when. An agent's slot goes to another agent after its tasks have ended and the
//! tables by slot that they wrote are clear. All else names the agent by its key, and so needs no
//! clearing: it is a turn's, which ends, or in a table with a bound, which drops it in time.

mod steps;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use service::{clock::now, log::describe_error, tasks::Tasks};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

use self::steps::{Step, Steps};
use crate::{
    fleet::{
        connect::LoadWatcher,
        control::{ControlClient, ControlClients},
        dial::{AgentCredentials, AgentDialer},
        snapshot::Snapshot,
        state::Update,
        view::{UpdateSender, View},
        worker::AgentKey,
    },
    residency::kv_index::KvWatcher,
    turn::{liveness, shared::Shared},
};

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
    steps: Steps,
    running: BTreeMap<AgentKey, RunningTasks>,
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
        let (steps, running) = (Steps::default(), BTreeMap::new());
        Self { settings, view, shared, control_clients, updates, tasks, steps, running }
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
            let steps = self.steps.next(&view);
            drop(view);
            for step in steps {
                match step {
                    Step::Start { agent, control_url } => self.start(agent, &control_url).await,
                    Step::Stop { agent } => self.stop(agent),
                }
            }
            let is_new = |view: &Snapshot| view.members_version() != version;
            drop(self.view.wait_for(now() + IDLE_CHECK_INTERVAL, is_new).await);
        }
    }

    async fn start(&mut self, agent: AgentKey, control_url: &str) {
        let FollowSettings { connect_max, sessions_max, ref credentials } = self.settings;
        let running =
            RunningTasks { token: self.tasks.token().child_token(), tracker: TaskTracker::new() };
        match AgentDialer::new(control_url, credentials, connect_max) {
            Ok(dialer) => {
                info!(control = control_url, "agent joins");
                self.control_clients.insert(agent, ControlClient::new(&dialer));
                self.shared.upstream.set_signer(agent, dialer.signer().cloned());
                let load_watcher = LoadWatcher {
                    agent,
                    dialer: dialer.clone(),
                    connect_max,
                    sessions_max,
                    updates: self.updates.clone(),
                    view: Arc::clone(&self.view),
                };
                let kv_index = Arc::clone(&self.shared.kv_index);
                let kv_watcher = KvWatcher { agent, dialer, connect_max, kv_index };
                let directory = Arc::clone(&self.shared.directory);
                let upstream = Arc::clone(&self.shared.upstream);
                let liveness = liveness::run(agent, directory, upstream, running.token.clone());
                self.spawn(&running, load_watcher.run(running.token.clone()));
                self.spawn(&running, kv_watcher.run(running.token.clone()));
                self.spawn(&running, liveness);
            }
            // The sources check URLs, so this doesn't happen.
            Err(error) => {
                let why = describe_error(&error);
                warn!(control = control_url, why, "the agent's address can't be used");
                drop(self.updates.send((agent, Update::AgentLost(why), now())).await);
            }
        }
        self.running.insert(agent, running);
    }

    fn spawn(&self, running: &RunningTasks, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(running.tracker.track_future(task));
    }

    /// The view task hears of the end of the tasks after all their updates.
    fn stop(&mut self, agent: AgentKey) {
        self.control_clients.remove(agent);
        let running = self.running.remove(&agent);
        let (updates, shared) = (self.updates.clone(), Arc::clone(&self.shared));
        self.tasks.spawn(async move {
            if let Some(RunningTasks { token, tracker }) = running {
                token.cancel();
                tracker.close();
                tracker.wait().await;
            }
            shared.block_locator.end_agent(agent);
            drop(updates.send((agent, Update::TasksEnded, now())).await);
        });
    }
}

#[cfg(test)]
mod tests;
