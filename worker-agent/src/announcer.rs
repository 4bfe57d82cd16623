//! Announces the agent to routers, again and again, and withdraws the announcements at its end.
//!
//! Each router has a task of its own, so that one that doesn't answer delays no other. An
//! announcement is repeated three times within the time for which a router lists the agent. A
//! router that can't be reached is tried again after a pause that grows; one that refuses, with the
//! next announcement, because an operator may change its keys.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use contract::{api, proof};
use http::{HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use serde_json::Value;
use service::{
    backoff::Backoff,
    log::describe_error,
    metrics::Registrar,
    proof::agent::AgentProofs,
    reload::{self, Reloaded},
    tasks::Tasks,
    tls::{Protocol, client::Connector},
};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::{
    config::{Config, ms},
    data_port::PortAccess,
};

/// A router answers in milliseconds.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(2);
/// Two attempts at a slow router.
const WITHDRAWAL_TIME_MAX: Duration = Duration::from_secs(5);
/// A refusal has some hundred bytes.
const ANSWER_BYTES_MAX: usize = 8 << 10;

/// Dropping it ends the announcements.
#[derive(Debug)]
pub(crate) struct Announcer {
    is_leaving: watch::Sender<bool>,
}

impl Announcer {
    /// Returns when all routers have answered, or after some seconds.
    pub(crate) async fn withdraw(&self) {
        self.is_leaving.send_replace(true);
        // Each task ends, and with it its receiver, when its router has answered.
        let all = tokio::time::timeout(WITHDRAWAL_TIME_MAX, self.is_leaving.closed());
        if all.await.is_err() {
            warn!("some routers have not heard that the agent ends; they notice it themselves");
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    router: String,
    result: &'static str,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouterLabel {
    router: String,
}

service::metrics! {
    pub(crate) struct Metrics {
        /// Announcements to routers, by what came of them
        announcements: Family<ResultLabels, Counter> = "announcements";
        /// 1 while the router has accepted the newest announcement of this agent
        announced: Family<RouterLabel, Gauge> = "announced";
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Failure {
    Refused(String),
    Unreachable(String),
}

struct Announcement {
    client: Client<Connector, Full<Bytes>>,
    key: Reloaded<HeaderValue>,
    router: String,
    agent_id: String,
    control_url: String,
    /// `None` if the agent has no token.
    proofs: Option<Arc<AgentProofs>>,
    interval: Duration,
    ttl_ms: u64,
    metrics: Metrics,
    failure: Option<Failure>,
}

pub(crate) fn start(
    config: &Config,
    control: SocketAddr,
    access: &PortAccess,
    file_metrics: &reload::Metrics,
    registry: &mut Registrar<'_>,
    tasks: &Tasks,
) -> Result<Announcer, reload::Error> {
    let announcer = Announcer { is_leaving: watch::Sender::new(false) };
    let table = &config.announce;
    let Some(key) = table.key_source() else { return Ok(announcer) };
    let key = reload::start(key, file_metrics, tasks)?;
    let tls = table.client_files().map(|files| files.start(file_metrics, tasks)).transpose()?;
    let connector = Connector::new(HttpConnector::new(), tls, Protocol::Http1, ANSWER_TIME_MAX);
    let client =
        Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
    let metrics = Metrics::new(registry);
    let has_tls = config.tls.server_files().is_some();
    for router in &table.routers {
        let announcement = Announcement {
            client: client.clone(),
            key: key.clone(),
            router: router.trim_end_matches('/').to_owned(),
            agent_id: config.agent_id(control),
            control_url: config.advertise.control_url(control, has_tls),
            proofs: access.router_auth.proofs.clone(),
            interval: ms(table.interval_ms),
            ttl_ms: table.ttl_ms(),
            metrics: metrics.clone(),
            failure: None,
        };
        let (token, leaving) = (tasks.token(), announcer.is_leaving.subscribe());
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = announcement.run(leaving) => {}
            }
        });
    }
    Ok(announcer)
}

impl Announcement {
    async fn run(mut self, mut leaving: watch::Receiver<bool>) {
        let mut backoff = Backoff::default();
        loop {
            let is_leaving = *leaving.borrow_and_update();
            let result = self.announce(is_leaving).await;
            let is_answered = !matches!(result, Err(Failure::Unreachable(_)));
            self.record(result, is_leaving);
            if is_leaving && is_answered {
                return;
            }
            let pause = async {
                if is_answered {
                    backoff.reset();
                    tokio::time::sleep(self.interval).await;
                } else {
                    backoff.pause().await;
                }
            };
            tokio::select! {
                biased;
                changed = leaving.changed() => if changed.is_err() { return },
                () = pause => {}
            }
        }
    }

    async fn announce(&self, is_leaving: bool) -> Result<(), Failure> {
        let body = api::Announcement {
            agent_id: self.agent_id.clone(),
            control: self.control_url.clone(),
            ttl_ms: self.ttl_ms,
            leaving: is_leaving,
        };
        let body = serde_json::to_vec(&body).expect("plain fields always serialise");
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}/v1/agents", self.router))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::AUTHORIZATION, HeaderValue::clone(&self.key.load()))
            .body(Full::new(Bytes::from(body)))
            .expect("the settings were checked");
        if let Some(proofs) = &self.proofs {
            let proof = proofs.sign_announcement(&self.control_url);
            request.headers_mut().insert(proof::AGENT, proof);
        }
        let exchange = async {
            let answer = self.client.request(request).await;
            let (head, body) = answer.map_err(|error| describe_error(&error))?.into_parts();
            let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            // Without its body, a refusal still has its status.
            Ok((head.status, body.map(|body| body.to_bytes()).unwrap_or_default()))
        };
        match tokio::time::timeout(ANSWER_TIME_MAX, exchange).await {
            Ok(Ok((StatusCode::OK, _))) => Ok(()),
            Ok(Ok((status, body))) => Err(Failure::Refused(refusal_text(status, &body))),
            Ok(Err(why)) => Err(Failure::Unreachable(why)),
            Err(_) => {
                let why = format!("no answer within {} ms", ANSWER_TIME_MAX.as_millis());
                Err(Failure::Unreachable(why))
            }
        }
    }

    /// Logs a failure only when it begins or changes, and its end.
    fn record(&mut self, result: Result<(), Failure>, is_leaving: bool) {
        let router = &self.router;
        let name = match &result {
            Ok(()) => "ok",
            Err(Failure::Refused(_)) => "refused",
            Err(Failure::Unreachable(_)) => "unreachable",
        };
        let labels = ResultLabels { router: router.clone(), result: name };
        self.metrics.announcements.get_or_create(&labels).inc();
        let is_announced = result.is_ok() && !is_leaving;
        let label = RouterLabel { router: router.clone() };
        self.metrics.announced.get_or_create(&label).set(is_announced.into());
        let failure = result.err();
        match &failure {
            _ if self.failure == failure => {}
            None => info!(router, "router takes the announcements again"),
            Some(Failure::Refused(why)) => {
                warn!(router, why, "router refuses the announcement of this agent");
            }
            Some(Failure::Unreachable(why)) => {
                warn!(router, why, "agent can't announce itself to a router");
            }
        }
        self.failure = failure;
    }
}

fn refusal_text(status: StatusCode, body: &[u8]) -> String {
    let body: Option<Value> = serde_json::from_slice(body).ok();
    let message = body.as_ref().and_then(|body| body.pointer("/error/message")?.as_str());
    match message {
        Some(message) => format!("{}: {message}", status.as_u16()),
        None => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_told_with_the_routers_reason() {
        let body = br#"{"error": {"message": "not here", "code": "announce_forbidden"}}"#;
        assert_eq!(refusal_text(StatusCode::FORBIDDEN, body), "403: not here");
        assert_eq!(refusal_text(StatusCode::NOT_FOUND, b"<html>"), "404 Not Found");
    }
}
