//! Serves until a signal or an engine ends it: turns first, then sessions, then engines.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use cli::{args::TargetArgs, connect::router::RouterClient};
use http::StatusCode;
use router::config::{Args as RouterArgs, Config as RouterConfig};
use service::{
    clock::now,
    signal::{StopSignal, StopSignals},
    tasks::Tasks,
};
use tokio_util::sync::CancellationToken;

use crate::{
    args::Args,
    engine::{Engine, EngineEnd, Start, Stop},
    fleet::{BoundAgent, BoundRouter, Fleet},
    plan::{self, EnginePlan},
    say,
};

const READY_CHECK_INTERVAL: std::time::Duration = std::time::Duration::from_millis(100);

/// Returns the exit status.
///
/// # Errors
/// Wrong arguments, or something can't start or has failed.
pub async fn serve(args: &Args) -> anyhow::Result<u8> {
    let plans = plan::plan(args)?;
    let takes_free_ports = args.join.is_none() && args.agent_config.is_none();
    let bind = |plan: &EnginePlan| BoundAgent::bind(plan.agent.clone(), takes_free_ports);
    let agents = plans.iter().map(bind).collect::<anyhow::Result<Vec<_>>>()?;
    let router = match args.join {
        Some(_) => None,
        None => Some(BoundRouter::bind(router_config(args, &agents)?, &agents)?),
    };
    let mut signals = StopSignals::new()?;
    let addresses = router.as_ref().map(|it| (it.data, it.admin));
    let (stop, mut ready) = (Stop::default(), vec![]);
    let starting = plans.into_iter().zip(&agents).map(|(plan, agent)| {
        let engine = engine(args, plan, agent);
        let is_ready = CancellationToken::new();
        ready.push(is_ready.clone());
        Box::pin(engine.run(is_ready, stop.clone())) as RunningEngine
    });
    let mut engines = Engines(starting.collect());
    let tasks = Tasks::default();
    let mut fleet = Fleet::start(agents, router, &tasks);
    let mut telling = std::pin::pin!(tell_when_ready(args, ready, addresses));
    let mut is_told = false;
    let why = loop {
        tokio::select! {
            biased;
            signal = signals.next() => break End::Signal(signal),
            end = engines.next_end() => break End::Engine(end),
            error = fleet.fail() => break End::Failed(error),
            () = &mut telling, if !is_told => is_told = true,
        }
    };
    let code = report(&why);
    let leaves = matches!(why, End::Signal(StopSignal::Terminate));
    if !end_turns(fleet, leaves, &mut engines, &mut signals).await {
        stop.hurry.cancel();
    }
    stop.stop.cancel();
    tokio::select! {
        biased;
        () = engines.join() => {}
        _ = signals.next() => say(&"not waiting for the engines: they are killed"),
    }
    Ok(code)
}

enum End {
    Signal(StopSignal),
    Engine(EngineEnd),
    Failed(anyhow::Error),
}

/// Returns the exit status.
fn report(why: &End) -> u8 {
    match why {
        End::Signal(_) => {
            say(&"ending: turns may end; a second signal ends them at once");
            0
        }
        End::Engine(end) => {
            say(&end.text);
            end.code
        }
        End::Failed(error) => {
            say(&format_args!("{error:#}"));
            1
        }
    }
}

/// Engines go on meanwhile. Returns false if the user doesn't want to wait.
async fn end_turns(
    fleet: Fleet,
    leaves: bool,
    engines: &mut Engines,
    signals: &mut StopSignals,
) -> bool {
    let turns = fleet.turns();
    let mut stopping = std::pin::pin!(fleet.stop(leaves));
    loop {
        tokio::select! {
            biased;
            () = &mut stopping => return true,
            end = engines.next_end() => say(&end.text),
            _ = signals.next() => {
                say(&"not waiting for turns any more");
                if let Some(tasks) = turns {
                    tasks.cancel();
                }
                return false;
            }
        }
    }
}

fn router_config(args: &Args, agents: &[BoundAgent]) -> Result<RouterConfig, plan::Error> {
    let workers = agents.iter().map(|agent| format!("http://{}", agent.control));
    let router_args = RouterArgs {
        config: args.router_config.clone(),
        workers: workers.collect(),
        data_addr: args.data_addr.clone(),
        admin_addr: args.admin_addr.clone(),
        keys_file: args.keys_file.clone(),
        no_auth: args.no_auth,
        check_config: false,
    };
    Ok(RouterConfig::load(&router_args)?)
}

fn engine(args: &Args, plan: EnginePlan, agent: &BoundAgent) -> Engine {
    let EnginePlan { name, url, command, .. } = plan;
    let is_one_of_several = name != "engine";
    let start = command.map(|command| {
        say(&format_args!("starting {name}: {}", command.shown()));
        for flag in &command.added {
            say(&format_args!("added {}; without it: {}", flag.name, flag.why));
        }
        Start {
            command,
            restart: args.restart,
            stop_max: plan::stop_max(args),
            shim_socket: agent.shim_socket.clone(),
            log_prefix: if is_one_of_several { format!("{name} | ") } else { String::new() },
        }
    });
    if start.is_none() {
        say(&format_args!(
            "{name} at {url}; its agent takes the shim at {}",
            agent.shim_socket.display()
        ));
    }
    Engine { name, url, start, admin: agent.admin }
}

type RunningEngine = Pin<Box<dyn Future<Output = Option<EngineEnd>>>>;

/// Run on the thread that polls them.
struct Engines(Vec<RunningEngine>);

impl Engines {
    /// Waits for ever if none ends by itself.
    async fn next_end(&mut self) -> EngineEnd {
        std::future::poll_fn(|context| match self.poll(context) {
            Some(end) => Poll::Ready(end),
            None => Poll::Pending,
        })
        .await
    }

    async fn join(&mut self) {
        std::future::poll_fn(|context| {
            while let Some(end) = self.poll(context) {
                say(&end.text);
            }
            if self.0.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Option<EngineEnd> {
        let mut first = None;
        self.0.retain_mut(|engine| match first.is_none().then(|| engine.as_mut().poll(context)) {
            Some(Poll::Ready(end)) => {
                first = end;
                false
            }
            _ => true,
        });
        first
    }
}

/// Tells where clients are served, once they are.
async fn tell_when_ready(
    args: &Args,
    engines: Vec<CancellationToken>,
    addresses: Option<(std::net::SocketAddr, std::net::SocketAddr)>,
) {
    let began_at = now();
    for engine in engines {
        engine.cancelled().await;
    }
    let seconds = || now().saturating_duration_since(began_at).as_secs_f64();
    let Some((data, admin)) = addresses else {
        let router = args.join.as_deref().unwrap_or_default();
        return say(&format_args!("ready after {:.1} s; announced to {router}", seconds()));
    };
    let router =
        RouterClient::at(&TargetArgs::default(), "router", &format!("http://{admin}"), None);
    let Ok(router) = router else { return };
    let is_ready =
        async || router.probe("/readyz").await.is_ok_and(|answer| answer.status == StatusCode::OK);
    while !is_ready().await {
        tokio::time::sleep(READY_CHECK_INTERVAL).await;
    }
    say(&format_args!(
        "ready after {:.1} s: http://{data} serves clients, http://{admin} operators (dashboard, \
         metrics)",
        seconds()
    ));
}
