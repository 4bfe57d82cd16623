//! Runs one engine to its end: starts it again where the policy says so, and says how it does.

use std::{
    fmt, io, net::SocketAddr, os::unix::process::ExitStatusExt as _, path::PathBuf,
    process::ExitStatus, time::Duration,
};

use cli::{
    args::TargetArgs, commands::init::ask_engine, connect::router::RouterClient, flags, init,
};
use http::StatusCode;
use service::clock::now;
use tokio_util::sync::CancellationToken;

use crate::{
    args::Restart,
    cause::likely_cause,
    engine_command::EngineCommand,
    policy::{Ended, RestartPolicy},
    process::EngineProcess,
    say,
};

/// Weights take minutes; a person wants to see that something goes on.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(15);
const READY_CHECK_INTERVAL: Duration = Duration::from_millis(200);
const SHOWN_LINES: usize = 12;
/// SGLang ends in 5 s if no request runs.
const HURRY_MAX: Duration = Duration::from_secs(6);

/// How an engine is started.
#[derive(Debug)]
pub struct Start {
    pub command: EngineCommand,
    pub restart: Restart,
    pub stop_max: Duration,
    pub shim_socket: PathBuf,
    /// Before each line of its log.
    pub log_prefix: String,
}

#[derive(Debug)]
pub struct Engine {
    /// Such as `engine` or `engine 2`.
    pub name: String,
    pub url: String,
    /// `None` if it runs already, and stays.
    pub start: Option<Start>,
    /// Its agent's, which knows whether the engine answers.
    pub admin: SocketAddr,
}

/// Tells engines to end.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    pub stop: CancellationToken,
    /// They get little time.
    pub hurry: CancellationToken,
}

/// How an engine ended that nobody stopped.
#[derive(Debug)]
pub struct EngineEnd {
    /// The exit status; of one that a signal ended, 128 and the signal's number, as in a shell.
    pub code: u8,
    pub text: String,
}

impl Engine {
    /// Ends after `stop`, or returns how the engine ended before. Must stay on a thread that lives
    /// as long as the process.
    pub async fn run(self, ready: CancellationToken, stop: Stop) -> Option<EngineEnd> {
        let Some(start) = &self.start else {
            tokio::select! {
                biased;
                () = stop.stop.cancelled() => {}
                () = self.wait_until_ready(&ready) => stop.stop.cancelled().await,
            }
            return None;
        };
        let mut policy = RestartPolicy::new(start.restart);
        loop {
            let ended = match self.run_once(start, &ready, &stop).await {
                Ok(Some(ended)) => ended,
                Ok(None) => return None,
                Err(error) => {
                    let text = format!("{}'s process can't be run: {error}", self.name);
                    return Some(EngineEnd { code: 1, text });
                }
            };
            let Some(pause) = policy.next(ended.0) else { return Some(ended.1) };
            say(&format_args!("{}; it starts again in {} s", ended.1.text, pause.as_secs()));
            tokio::select! {
                biased;
                () = stop.stop.cancelled() => return None,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// `None` if it was stopped.
    async fn run_once(
        &self,
        start: &Start,
        ready: &CancellationToken,
        stop: &Stop,
    ) -> io::Result<Option<(Ended, EngineEnd)>> {
        let started_at = now();
        let prefix = start.log_prefix.clone();
        let mut process = EngineProcess::start(&start.command, &start.shim_socket, prefix)?;
        let mut becoming_ready = std::pin::pin!(self.wait_until_ready(ready));
        let mut was_ready = false;
        let status = loop {
            tokio::select! {
                biased;
                () = stop.stop.cancelled() => {
                    let hurry_max = start.stop_max.min(HURRY_MAX);
                    let is_hurry = stop.hurry.is_cancelled();
                    process.stop(if is_hurry { hurry_max } else { start.stop_max }).await?;
                    return Ok(None);
                }
                status = process.wait() => break status?,
                () = &mut becoming_ready, if !was_ready => was_ready = true,
                () = tokio::time::sleep(PROGRESS_INTERVAL), if !was_ready => {
                    let seconds = now().saturating_duration_since(started_at).as_secs();
                    say(&format_args!("{} has been starting for {seconds} s", self.name));
                }
            }
        };
        let ran_for = now().saturating_duration_since(started_at);
        let ended = Ended { is_success: status.success(), was_ready, ran_for };
        let end = self.describe(status, was_ready, &mut process);
        Ok(Some((ended, end)))
    }

    fn describe(
        &self,
        status: ExitStatus,
        was_ready: bool,
        process: &mut EngineProcess,
    ) -> EngineEnd {
        let code = exit_code(status);
        let mut text = format!("{} ended with {}", self.name, Shown(status));
        if was_ready {
            return EngineEnd { code, text };
        }
        text += " before it was ready";
        let lines = Vec::from_iter(process.last_lines.finish().map(str::to_owned));
        if let Some(cause) = likely_cause(lines.iter().map(String::as_str)) {
            text += ": ";
            text += cause;
        }
        if !lines.is_empty() {
            text += "\nits last lines:";
        }
        for line in &lines[lines.len().saturating_sub(SHOWN_LINES)..] {
            text += "\n  | ";
            text += line;
        }
        // It was to serve, and didn't.
        EngineEnd { code: code.max(1), text }
    }

    /// Says when the engine answers, and what it lacks.
    async fn wait_until_ready(&self, ready: &CancellationToken) {
        let target = TargetArgs::default();
        let admin_url = format!("http://{}", self.admin);
        let agent = RouterClient::at(&target, "agent", &admin_url, None);
        let Ok(agent) = agent else { return std::future::pending().await };
        let is_ready = async || {
            let answer = agent.probe("/readyz").await;
            answer.is_ok_and(|answer| answer.status == StatusCode::OK)
        };
        let lacks = loop {
            if is_ready().await {
                // After a restart, the agent may not have noticed the engine's end yet.
                match ask_engine(&target, &self.url).await {
                    Ok(found) => break init::missing_flags(&found, flags::KV_EVENTS_PORT),
                    Err(cli::error::Error::Unreachable { .. }) => {}
                    // The agent has read the same answer, and logs what it thinks of it.
                    Err(_) => break vec![],
                }
            }
            tokio::time::sleep(READY_CHECK_INTERVAL).await;
        };
        say(&format_args!("{} answers at {}", self.name, self.url));
        for init::MissingFlag { flag, without } in lacks {
            say(&format_args!("{} lacks {flag}\n    {without}", self.name));
        }
        ready.cancel();
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| signal.saturating_add(128)));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

struct Shown(ExitStatus);

impl fmt::Display for Shown {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.code(), self.0.signal()) {
            (Some(code), _) => write!(out, "exit status {code}"),
            (None, Some(9)) => out.write_str("signal 9 (killed, perhaps for lack of memory)"),
            (None, signal) => write!(out, "signal {}", signal.unwrap_or_default()),
        }
    }
}
