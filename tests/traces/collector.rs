//! A collector that takes spans over gRPC, by OpenTelemetry's own schema, and keeps them.

use std::{net::SocketAddr, sync::Arc};

use engine_sim::loopback::own_addr;
use harness::cluster::eventually;
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{AnyValue, KeyValue, any_value::Value},
    trace::v1::Span,
};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::{net::TcpListener, task::JoinSet};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, async_trait, transport::Server};

/// A span, and the binary that sent it.
#[derive(Debug, Clone)]
pub(crate) struct SeenSpan {
    pub(crate) service: String,
    pub(crate) span: Span,
}

/// What has come so far.
#[derive(Debug, Clone, Default)]
struct Seen {
    spans: Arc<Mutex<Vec<SeenSpan>>>,
    bytes: Arc<Mutex<Vec<u8>>>,
}

/// A running collector. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Collector {
    addr: SocketAddr,
    seen: Seen,
    _server: JoinSet<()>,
}

impl SeenSpan {
    /// Returns the span's name with its binary, such as `router/turn`.
    pub(crate) fn name(&self) -> String {
        let service = self.service.strip_prefix("berth-").unwrap_or(&self.service);
        format!("{service}/{}", self.span.name)
    }

    /// Returns an attribute as text, or an empty string.
    pub(crate) fn attribute(&self, key: &str) -> String {
        text(&self.span.attributes, key)
    }

    /// Returns the names of the attributes.
    pub(crate) fn keys(&self) -> Vec<&str> {
        self.span.attributes.iter().map(|pair| pair.key.as_str()).collect()
    }
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    let pair = attributes.iter().find(|pair| pair.key == key);
    match pair.and_then(|pair| pair.value.clone()) {
        Some(AnyValue { value: Some(Value::StringValue(text)) }) => text,
        Some(AnyValue { value: Some(Value::IntValue(number)) }) => number.to_string(),
        Some(AnyValue { value: Some(Value::BoolValue(flag)) }) => flag.to_string(),
        _ => String::new(),
    }
}

#[async_trait]
impl TraceService for Seen {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let request = request.into_inner();
        self.bytes.lock().extend(request.encode_to_vec());
        for process in request.resource_spans {
            let resource = process.resource.expect("each process says what it is");
            let service = text(&resource.attributes, "service.name");
            let spans = process.scope_spans.into_iter().flat_map(|scope| scope.spans);
            let spans = spans.map(|span| SeenSpan { service: service.clone(), span });
            self.spans.lock().extend(spans);
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Starts a collector on a free port.
    pub(crate) async fn start() -> Self {
        Self::start_at(own_addr()).await
    }

    /// Starts a collector.
    pub(crate) async fn start_at(addr: SocketAddr) -> Self {
        let listener = TcpListener::bind(addr).await.expect("the port is free");
        let addr = listener.local_addr().expect("it is bound");
        let seen = Seen::default();
        let server = Server::builder().add_service(TraceServiceServer::new(seen.clone()));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            drop(server.serve_with_incoming(TcpListenerStream::new(listener)).await);
        });
        Self { addr, seen, _server: tasks }
    }

    /// Returns the URL for the settings.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Returns all spans that have come.
    pub(crate) fn spans(&self) -> Vec<SeenSpan> {
        self.seen.spans.lock().clone()
    }

    /// Returns the spans that have come once they have all of these names.
    pub(crate) async fn wait_for(&self, names: &[&str]) -> Vec<SeenSpan> {
        eventually("the spans", || async {
            let spans = self.spans();
            let has = |name: &&str| spans.iter().any(|span| span.name() == **name);
            names.iter().all(has).then_some(spans)
        })
        .await
    }

    /// Whether this text was in any request.
    pub(crate) fn has_seen(&self, text: &str) -> bool {
        let bytes = self.seen.bytes.lock();
        bytes.windows(text.len()).any(|window| window == text.as_bytes())
    }
}
