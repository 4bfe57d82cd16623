//! Serves the admin port for operators: `/metrics`, `/healthz`, `/readyz` and `/config`.
//!
//! The port has its own thread and runtime, so it answers while the rest of the process is busy.
//! `/healthz` always answers; `/readyz` says whether the process can do its work.

use std::{net::TcpListener, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use http::{HeaderMap, StatusCode, header};
use prometheus_client::{
    encoding::{prometheus_protobuf, text},
    registry::Registry,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    auth::{admin_only_refusal, gate::Gate, origin},
    refusal::{Code, Refusal},
    server::{self, PortLimits},
    tasks::Tasks,
};

const OPENMETRICS_TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROTOBUF: &str =
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited";
/// Time for running requests to end when the port stops. Each takes milliseconds.
const STOP_TIME_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub struct AdminData {
    pub registry: Arc<Registry>,
    /// `Ok` while the process can do its work, otherwise the reason why it can't.
    pub ready: watch::Receiver<Result<(), String>>,
    /// The effective settings, as TOML. They hold paths of secrets, never a secret.
    pub config: String,
    pub gate: Gate,
    /// Routes that only this process has. What changes something has other methods than GET.
    pub actions: Router,
}

/// The thread ends when `stop_token` is cancelled.
pub fn start(
    data: AdminData,
    listener: TcpListener,
    limits: PortLimits,
    stop_token: CancellationToken,
) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let routes = app(data);
    std::thread::Builder::new().name("admin".into()).spawn(move || {
        runtime.block_on(async move {
            let listener =
                tokio::net::TcpListener::from_std(listener).expect("it was made nonblocking");
            let tasks = Tasks::default();
            tokio::select! {
                biased;
                () = stop_token.cancelled() => {}
                () = server::serve(listener, routes, limits, None, tasks.clone()) => {}
            }
            tasks.stop(STOP_TIME_MAX).await;
        });
    })?;
    Ok(())
}

pub fn app(data: AdminData) -> Router {
    let (gate, actions) = (data.gate.clone(), data.actions.clone());
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/config", get(|State(data): State<AdminData>| async move { data.config }))
        .fallback(|| async { Refusal::new(Code::RouteUnknown, "the admin port has no such route") })
        .method_not_allowed_fallback(|| async {
            Refusal::new(Code::MethodNotAllowed, "this route doesn't take the request's method")
        })
        .with_state(data)
        .merge(actions)
        .layer(middleware::from_fn_with_state(gate, guard))
}

async fn guard(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    let (path, headers) = (request.uri().path(), request.headers());
    let checked = if matches!(path, "/healthz" | "/readyz") {
        Ok(())
    } else {
        // Without keys, any page that an operator of this host opens could send the request.
        origin::check(headers, gate.is_open(), &origin::Allowed::default())
            .map_err(admin_only_refusal)
    };
    let checked = checked.and_then(|()| gate.let_pass(request.method(), path, headers));
    match checked {
        Ok(pass) => {
            request.extensions_mut().insert(pass);
            next.run(request).await
        }
        Err(refusal) => {
            tracing::debug!(code = refusal.code.as_str(), "refused on the admin port");
            refusal.into_response()
        }
    }
}

async fn readyz(State(data): State<AdminData>) -> Response {
    match &*data.ready.borrow() {
        Ok(()) => "ready\n".into_response(),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

/// Prometheus prefers protobuf where native histograms are on.
async fn metrics(State(data): State<AdminData>, headers: HeaderMap) -> Response {
    if prefers_protobuf(&headers) {
        let body = prometheus_protobuf::encode_to_vec(&data.registry)
            .expect("writing to memory can't fail");
        return ([(header::CONTENT_TYPE, PROTOBUF)], body).into_response();
    }
    let mut body = String::new();
    text::encode(&mut body, &data.registry).expect("writing to a string can't fail");
    ([(header::CONTENT_TYPE, OPENMETRICS_TEXT)], body).into_response()
}

/// Clients list formats in their order of preference.
fn prefers_protobuf(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let first = accept.unwrap_or_default().split(',').next().unwrap_or_default();
    let mut words = first.split(';').map(str::trim);
    words.next() == Some("application/vnd.google.protobuf")
        && words.clone().any(|word| word == "proto=io.prometheus.client.MetricFamily")
        && words.any(|word| word == "encoding=delimited")
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use axum::{body::Body, routing::post};
    use http::Method;
    use tower_service::Service as _;

    use super::*;
    use crate::auth::MetricsAuth;

    #[tokio::test]
    async fn metrics_are_text_unless_the_client_prefers_protobuf() {
        let mut registry = Registry::default();
        let seconds = crate::histogram::create([0.1, 1.0]);
        registry.register("turn_seconds", "Time of a turn", seconds.clone());
        seconds.observe(0.3);
        let data = AdminData {
            registry: Arc::new(registry),
            ready: watch::channel(Ok(())).1,
            config: String::new(),
            gate: Gate::new(None, MetricsAuth::None, IpAddr::V4(Ipv4Addr::LOCALHOST)),
            actions: Router::new(),
        };
        let text_first = format!("text/plain;version=0.0.4;q=0.6,{PROTOBUF};q=0.5");
        let protobuf_first = format!("{PROTOBUF};q=0.6,{OPENMETRICS_TEXT};q=0.5,*/*;q=0.1");
        for (accept, content_type) in [
            ("*/*", OPENMETRICS_TEXT),
            (&text_first, OPENMETRICS_TEXT),
            ("application/vnd.google.protobuf", OPENMETRICS_TEXT),
            (&protobuf_first, PROTOBUF),
        ] {
            let request = Request::builder().uri("/metrics").header(header::HOST, "127.0.0.1");
            let request = request.header(header::ACCEPT, accept).body(Body::empty()).unwrap();
            let answer = app(data.clone()).call(request).await.unwrap();
            assert_eq!(answer.headers()[header::CONTENT_TYPE], content_type, "{accept}");
        }
        let families = prometheus_protobuf::encode(&data.registry).unwrap();
        let histogram = families[0].metric[0].histogram.as_ref().unwrap();
        let (classic, native) = (&histogram.bucket, &histogram.positive_span);
        assert_eq!((classic.len(), native.len()), (3, 1), "both kinds of buckets");
    }

    #[tokio::test]
    async fn a_page_of_another_origin_changes_nothing_and_reads_nothing() {
        let data = AdminData {
            registry: Arc::default(),
            ready: watch::channel(Ok(())).1,
            config: String::new(),
            gate: Gate::new(None, MetricsAuth::None, IpAddr::V4(Ipv4Addr::LOCALHOST)),
            actions: Router::new().route("/drain", post(|| async { "done" })),
        };
        let here = "127.0.0.1:9100";
        for (host, origin, status) in [
            (here, None, 200),
            (here, Some("http://127.0.0.1:9100"), 200),
            (here, Some("http://127.0.0.1:31002"), 403),
            ("evil.example:9100", None, 403),
            ("evil.example:9100", Some("http://evil.example:9100"), 403),
        ] {
            for (method, path) in [(Method::POST, "/drain"), (Method::GET, "/config")] {
                let mut request = Request::builder().method(&method).uri(path);
                request = request.header(header::HOST, host);
                if let Some(origin) = origin {
                    request = request.header(header::ORIGIN, origin);
                }
                let request = request.body(Body::empty()).unwrap();
                let answer = app(data.clone()).call(request).await.unwrap();
                assert_eq!(answer.status(), status, "{method} {path} {host} {origin:?}");
            }
        }
    }
}
