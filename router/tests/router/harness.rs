//! A router on free ports, a client, and bounded waits.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use router::{Listeners, config::Config};
use service::tasks::Tasks;
use tokio::sync::oneshot;

use crate::agent::Agent;

/// Far longer than any wait in these tests, even on a slow machine.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(60);

/// A router in this process.
pub(crate) struct Router {
    pub(crate) data: SocketAddr,
    pub(crate) admin: SocketAddr,
    client: Client<HttpConnector, Full<Bytes>>,
    tasks: Tasks,
    ended: Option<oneshot::Receiver<Result<(), router::Error>>>,
}

/// An answer with its whole body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or("").to_owned()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

/// Returns settings under which no agent becomes stale or lost because the machine is slow.
pub(crate) fn config(agents: &[&Agent]) -> Config {
    Config {
        workers: agents.iter().map(|agent| format!("http://{}", agent.control)).collect(),
        load_report_age_ms_max: 60_000,
        // How long a turn of a pinned session waits for a lost agent to come back.
        connect_ms_max: 5_000,
        ..Config::default()
    }
}

impl Router {
    /// Starts a router and waits until it is ready.
    pub(crate) async fn start(agents: &[&Agent]) -> Self {
        let router = Self::start_with(config(agents)).await;
        wait_until("the router is ready", async || router.is_ready().await).await;
        router
    }

    pub(crate) async fn start_with(config: Config) -> Self {
        let data = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let admin = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (data_addr, admin_addr) = (data.local_addr().unwrap(), admin.local_addr().unwrap());
        let tasks = Tasks::default();
        let (tell, ended) = oneshot::channel();
        let (inside, listeners) = (tasks.clone(), Listeners { data, admin });
        // Spawned outside the router's own tasks, as the router waits for those when it stops.
        Tasks::default().spawn(async move {
            drop(tell.send(router::run(config, listeners, inside).await));
        });
        Self {
            data: data_addr,
            admin: admin_addr,
            client: Client::builder(TokioExecutor::new()).build_http(),
            tasks,
            ended: Some(ended),
        }
    }

    pub(crate) async fn stop(mut self) -> Result<(), router::Error> {
        self.tasks.cancel();
        let ended = self.ended.take().unwrap();
        tokio::time::timeout(WAIT_MAX, ended).await.expect("the router drains").unwrap()
    }

    pub(crate) async fn is_ready(&self) -> bool {
        let request = Request::get(format!("http://{}/readyz", self.admin));
        let answer = self.client.request(request.body(Full::default()).unwrap()).await;
        answer.is_ok_and(|answer| answer.status() == 200)
    }

    pub(crate) async fn metrics(&self) -> String {
        let request = Request::get(format!("http://{}/metrics", self.admin));
        let answer = self.client.request(request.body(Full::default()).unwrap()).await.unwrap();
        String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    /// Sends a request. Returns when the head of the answer has arrived.
    pub(crate) async fn begin(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> http::Response<Incoming> {
        let mut request =
            Request::builder().method(method).uri(format!("http://{}{path}", self.data));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).unwrap();
        let answer = self.client.request(request);
        tokio::time::timeout(WAIT_MAX, answer).await.expect("an answer in time").unwrap()
    }

    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        collect(self.begin(method, path, headers, body).await).await
    }

    pub(crate) async fn chat(&self, headers: &[(&str, &str)], body: &str) -> Answer {
        self.call(Method::POST, "/v1/chat/completions", headers, body.to_owned()).await
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.tasks.cancel();
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
