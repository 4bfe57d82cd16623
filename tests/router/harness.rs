//! A router on free ports, a client, and bounded waits.

use std::{net::SocketAddr, time::Duration};

use axum::body::Body;
use harness::{
    cluster::{self, router_config},
    web::{Headers, Web},
};
use http::Method;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use router::config::Config;

use crate::agent::Agent;

pub(crate) use harness::{cluster::PATIENCE as WAIT_MAX, web::Answer};

/// A router in this process.
pub(crate) struct Router {
    process: cluster::Router,
    web: Web,
}

/// Returns settings under which no agent becomes stale or lost because the machine is slow.
pub(crate) fn config(agents: &[&Agent]) -> Config {
    let workers = agents.iter().map(|agent| format!("http://{}", agent.control)).collect();
    Config { workers, ..router_config(&[]) }
}

impl Router {
    /// Starts a router and waits until it is ready.
    pub(crate) async fn start(agents: &[&Agent]) -> Self {
        let router = Self::start_with(config(agents)).await;
        wait_until("the router is ready", async || router.is_ready().await).await;
        router
    }

    pub(crate) async fn start_with(config: Config) -> Self {
        let process = cluster::Router::start(config).await.unwrap();
        Self { process, web: Web::default() }
    }

    pub(crate) fn data(&self) -> SocketAddr {
        self.process.data
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.process.stop().await
    }

    pub(crate) async fn is_ready(&self) -> bool {
        let answer = self.web.get(&self.process.admin_url("/readyz")).await;
        answer.is_ok_and(|answer| answer.status == 200)
    }

    pub(crate) async fn metrics(&self) -> String {
        self.web.get(&self.process.admin_url("/metrics")).await.unwrap().text()
    }

    /// Sends a request. Returns when the head of the answer has arrived.
    pub(crate) async fn begin(
        &self,
        method: Method,
        path: &str,
        headers: Headers<'_>,
        body: impl Into<Body>,
    ) -> http::Response<Incoming> {
        let url = self.process.url(path);
        let answer = self.web.send(method, &url, headers, body);
        tokio::time::timeout(WAIT_MAX, answer).await.expect("an answer in time").unwrap()
    }

    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        headers: Headers<'_>,
        body: impl Into<Body>,
    ) -> Answer {
        collect(self.begin(method, path, headers, body).await).await
    }

    pub(crate) async fn chat(&self, headers: Headers<'_>, body: &str) -> Answer {
        self.call(Method::POST, "/v1/chat/completions", headers, body.to_owned()).await
    }
}

pub(crate) async fn collect(response: http::Response<Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = tokio::time::timeout(WAIT_MAX, body.collect()).await.expect("an end in time");
    let body = body.unwrap().to_bytes();
    Answer { status: parts.status, headers: parts.headers, body }
}

/// Polls until the state holds. Panics after [`WAIT_MAX`].
pub(crate) async fn wait_until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let looks = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(WAIT_MAX, looks).await.is_ok(), "never: {what}");
}
