//! Runs agents and a router as parts of this process.
//!
//! They are the same code as in `berth-agent` and `berth-router`, and speak by the same ports; but
//! turns go from the router to an agent without a connection.

use std::{net::SocketAddr, path::PathBuf};

use anyhow::Context as _;
use http::uri::Authority;
use service::{
    server::{self, LocalPort, LocalPorts},
    tasks::Tasks,
};
use tokio::sync::oneshot;
use worker_agent::{Listeners, config::Config as AgentConfig, owner::Ending};

/// An agent whose ports are bound.
#[derive(Debug)]
pub struct BoundAgent {
    config: AgentConfig,
    listeners: Listeners,
    pub control: SocketAddr,
    pub admin: SocketAddr,
    pub shim_socket: PathBuf,
    data: SocketAddr,
    local: LocalPort,
}

impl BoundAgent {
    /// If the ports are taken, free ones do as well for a router in this process.
    ///
    /// # Errors
    /// A port can't be bound.
    pub fn bind(mut config: AgentConfig, takes_free_ports: bool) -> anyhow::Result<Self> {
        let listeners = match Listeners::bind(&config) {
            Err(_) if takes_free_ports => {
                let listen = &mut config.listen;
                for address in
                    [&mut listen.data_addr, &mut listen.control_addr, &mut listen.admin_addr]
                {
                    address.set_port(0);
                }
                Listeners::bind(&config)?
            }
            bound => bound.context("name other addresses in the file of --agent-config")?,
        };
        Ok(Self {
            control: listeners.control.local_addr()?,
            admin: listeners.admin.local_addr()?,
            data: listeners.data.local_addr()?,
            local: listeners.local.clone(),
            shim_socket: config.shim_socket(),
            config,
            listeners,
        })
    }
}

/// A router whose ports are bound.
#[derive(Debug)]
pub struct BoundRouter {
    config: router::config::Config,
    listeners: router::Listeners,
    pub data: SocketAddr,
    pub admin: SocketAddr,
}

impl BoundRouter {
    /// # Errors
    /// A port can't be bound.
    pub fn bind(config: router::config::Config, agents: &[BoundAgent]) -> anyhow::Result<Self> {
        let bind = |flag, address| {
            let bound = server::bind(address);
            bound.with_context(|| {
                format!("can't listen at {address}; give another address with --{flag}")
            })
        };
        let data = bind("data-addr", config.listen.data_addr)?;
        let admin = bind("admin-addr", config.listen.admin_addr)?;
        data.set_nonblocking(true)?;
        let (data_addr, admin_addr) = (data.local_addr()?, admin.local_addr()?);
        let data = tokio::net::TcpListener::from_std(data)?;
        let authority = |agent: &BoundAgent| agent.data.to_string().parse::<Authority>();
        let ports = agents.iter().map(|agent| Ok((authority(agent)?, agent.local.clone())));
        let agents = LocalPorts::new(ports.collect::<anyhow::Result<Vec<_>>>()?);
        let listeners = router::Listeners { data, admin, agents };
        Ok(Self { config, listeners, data: data_addr, admin: admin_addr })
    }
}

/// A part that runs as a task, and how it ended.
type Ended = oneshot::Receiver<anyhow::Result<()>>;

#[derive(Debug)]
struct RunningAgent {
    stop: oneshot::Sender<Ending>,
    ended: Ended,
}

#[derive(Debug)]
pub struct Fleet {
    agents: Vec<RunningAgent>,
    /// `None` if a router elsewhere serves.
    router: Option<(Tasks, Ended)>,
}

impl Fleet {
    #[must_use]
    pub fn start(agents: Vec<BoundAgent>, router: Option<BoundRouter>, tasks: &Tasks) -> Self {
        let agents = agents.into_iter().map(|agent| start_agent(agent, tasks)).collect();
        let router = router.map(|BoundRouter { config, listeners, .. }| {
            let own_tasks = Tasks::default();
            let running = router::run(config, listeners, own_tasks.clone());
            let ended = start(tasks, async move { Ok(running.await?) });
            (own_tasks, ended)
        });
        Self { agents, router }
    }

    /// Ends the turns that run. [`Self::stop`] waits for them.
    #[must_use]
    pub fn turns(&self) -> Option<Tasks> {
        self.router.as_ref().map(|(tasks, _)| tasks.clone())
    }

    /// Returns why a part ended that nobody stopped. Not to call again after that.
    pub async fn fail(&mut self) -> anyhow::Error {
        let router = async {
            match &mut self.router {
                Some((_, ended)) => join(ended).await.context("the router ended"),
                None => std::future::pending().await,
            }
        };
        let agents = async {
            let mut agents: Vec<_> = self.agents.iter_mut().map(|it| &mut it.ended).collect();
            first_of(&mut agents).await.context("an agent ended")
        };
        let ended = tokio::select! {
            biased;
            ended = router => ended,
            ended = agents => ended,
        };
        ended.err().unwrap_or_else(|| anyhow::anyhow!("a part ended"))
    }

    /// Lets turns end, and closes the sessions at the engines. With `leaves`, serves on first for
    /// as long as balancers need.
    pub async fn stop(self, leaves: bool) {
        if let Some((tasks, mut ended)) = self.router {
            if leaves {
                tasks.leave()
            } else {
                tasks.cancel()
            }
            if let Err(error) = join(&mut ended).await {
                tracing::error!(error = format!("{error:#}"), "router ended");
            }
        }
        // All of them first, so that they drain together.
        let stopped = self.agents.into_iter().map(|RunningAgent { stop, ended }| {
            let _ = stop.send(Ending::Close);
            ended
        });
        for mut ended in Vec::from_iter(stopped) {
            if let Err(error) = join(&mut ended).await {
                tracing::error!(error = format!("{error:#}"), "agent ended");
            }
        }
    }
}

fn start_agent(agent: BoundAgent, tasks: &Tasks) -> RunningAgent {
    let (stop, stopped) = oneshot::channel();
    let stopped = async {
        match stopped.await {
            Ok(ending) => ending,
            // The whole process ends.
            Err(_) => Ending::Close,
        }
    };
    let epoch = service::clock::unix_ns();
    let running = worker_agent::run(agent.config, agent.listeners, epoch, stopped);
    RunningAgent { stop, ended: start(tasks, async move { Ok(running.await?) }) }
}

fn start(tasks: &Tasks, part: impl Future<Output = anyhow::Result<()>> + Send + 'static) -> Ended {
    let (sender, ended) = oneshot::channel();
    tasks.spawn(async move {
        let _ = sender.send(part.await);
    });
    ended
}

async fn join(ended: &mut Ended) -> anyhow::Result<()> {
    // Why it ended has been told.
    if ended.is_terminated() {
        return Ok(());
    }
    ended.await.unwrap_or_else(|_| Err(anyhow::anyhow!("its task panicked")))
}

/// Ends with the first of them.
async fn first_of(all: &mut [&mut Ended]) -> anyhow::Result<()> {
    std::future::poll_fn(|context| {
        for each in &mut *all {
            if let std::task::Poll::Ready(ended) = std::pin::Pin::new(&mut **each).poll(context) {
                let panicked = |_| Err(anyhow::anyhow!("its task panicked"));
                return std::task::Poll::Ready(ended.unwrap_or_else(panicked));
            }
        }
        std::task::Poll::Pending
    })
    .await
}
