//! Traces of turns for OpenTelemetry: spans, their context in headers, and their export.
//!
//! A *span* is a part of a turn's way, such as the choice of its worker; a turn's *trace* has the
//! spans of all processes. Each process names its span in the header `traceparent` of the requests
//! that it sends, and the next makes its own spans children of that one.

pub mod context;
mod exporter;
pub mod record;
pub mod settings;
pub mod span;

use std::{sync::Arc, time::Duration};

use http::HeaderMap;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Endpoint;

pub use self::exporter::Metrics;
use self::{
    context::{TRACEPARENT, TRACESTATE, TraceParent, trace_state},
    exporter::{Exporter, LAST_EXPORTS_TIME_MAX, SPANS_QUEUED_MAX},
    record::Exported,
    settings::TracesTable,
    span::{Span, SpanQueue, Trace, new_trace_id, unsampled},
};
use crate::{metrics::Registrar, reload, tasks::Tasks};

#[expect(
    clippy::allow_attributes_without_reason,
    clippy::enum_variant_names,
    unreachable_pub,
    reason = "generated code"
)]
mod rpc {
    tonic::include_proto!("opentelemetry.proto.collector.trace.v1");
}

/// What the exporting thread may take to end after its last export.
const END_TIME_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("can't use the file that traces.ca names")]
    File(#[from] reload::Error),
    #[error("traces.endpoint is no URL; write http://host:port")]
    Endpoint(#[from] tonic::transport::Error),
    #[error("the thread that exports traces can't be created")]
    Thread(#[from] std::io::Error),
}

/// Makes the traces of turns. Clones share the same queue of spans.
#[derive(Debug, Clone, Default)]
pub struct Traces {
    /// Where spans go; `None`: turns aren't traced.
    queue: Option<Arc<SpanQueue>>,
    sample_ratio: f64,
}

/// The end of a process's traces. If dropped without [`Self::flush`], spans that wait may be lost.
#[derive(Debug, Default)]
pub struct TracesEnd(Option<(DropGuard, oneshot::Receiver<()>)>);

/// Exports nothing if the settings name no collector.
pub fn start(
    table: &TracesTable,
    exported: Exported,
    registry: &mut Registrar<'_>,
    file_metrics: &reload::Metrics,
    tasks: &Tasks,
) -> Result<(Traces, TracesEnd), Error> {
    if !table.is_on() {
        return Ok((Traces::default(), TracesEnd::default()));
    }
    let tls = table.client_files().map(|files| files.start(file_metrics, tasks)).transpose()?;
    let endpoint = Endpoint::from_shared(table.endpoint.clone())?;
    let metrics = Metrics::new(registry);
    let (records, queue) = mpsc::channel(SPANS_QUEUED_MAX);
    let exporter = Exporter { endpoint, tls, exported, metrics: metrics.clone(), queue };
    let (stop, (ending, ended)) = (CancellationToken::new(), oneshot::channel());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stopped = stop.clone();
    std::thread::Builder::new().name("traces".into()).spawn(move || {
        runtime.block_on(exporter.run(stopped));
        drop::<oneshot::Sender<()>>(ending);
    })?;
    let queue = Some(Arc::new(SpanQueue { records, metrics }));
    let traces = Traces { queue, sample_ratio: table.sample_ratio };
    Ok((traces, TracesEnd(Some((stop.drop_guard(), ended)))))
}

impl Traces {
    /// Begins this process's first span of a request, in the trace that the headers name; if they
    /// name none, the ratio decides whether there is a new one. The headers then say the same to
    /// the next process, which decides nothing itself.
    #[must_use]
    pub fn begin(&self, headers: &mut HeaderMap, name: &'static str) -> Trace {
        let Some(queue) = &self.queue else { return Trace::default() };
        let parent = TraceParent::from_headers(headers);
        if parent.is_some_and(|parent| !parent.is_sampled) {
            return Trace::default();
        }
        let trace_id = parent.map_or_else(new_trace_id, |parent| parent.trace_id);
        if parent.is_none() {
            // The state belongs to a context that can't be read.
            headers.remove(TRACESTATE);
            if !trace_id.is_in_sample(self.sample_ratio) {
                headers.insert(TRACEPARENT, unsampled(trace_id).to_header());
                return Trace::default();
            }
        }
        let (parent, state) = (parent.map(|parent| parent.span_id), trace_state(headers));
        let root = Span::root(Arc::clone(queue), name, trace_id, parent, state.into());
        root.inject(headers);
        Trace::new(root)
    }
}

impl TracesEnd {
    /// Exports what has ended so far, but not for long.
    pub async fn flush(self) {
        if let Some((stop, ended)) = self.0 {
            drop(stop);
            let _ = tokio::time::timeout(LAST_EXPORTS_TIME_MAX + END_TIME_MAX, ended).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::{
        exporter::DropReason,
        record::{SpanKind, SpanRecord},
        *,
    };

    const SENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    /// Returns traces whose spans wait in a queue of this size.
    fn traces(queued_max: usize, sample_ratio: f64) -> (Traces, mpsc::Receiver<SpanRecord>) {
        let (records, queue) = mpsc::channel(queued_max);
        let queue_of_spans = SpanQueue { records, metrics: Metrics::default() };
        (Traces { queue: Some(Arc::new(queue_of_spans)), sample_ratio }, queue)
    }

    fn sent(traceparent: &'static str) -> HeaderMap {
        let headers = [(TRACEPARENT, traceparent), (TRACESTATE, "a=1")];
        let headers = headers.map(|(name, value)| (name, HeaderValue::from_static(value)));
        HeaderMap::from_iter(headers)
    }

    fn ended(queue: &mut mpsc::Receiver<SpanRecord>) -> Vec<SpanRecord> {
        std::iter::from_fn(|| queue.try_recv().ok()).collect()
    }

    #[tokio::test]
    async fn a_clients_trace_is_continued_and_passed_on() {
        let (traces, mut queue) = traces(9, 0.0);
        let mut headers = sent(SENT);
        let trace = traces.begin(&mut headers, "turn");
        let mut to_agent = headers.clone();
        let mut child = trace.child("send", SpanKind::Client);
        child.inject(&mut to_agent);
        child.fail("no answer");
        let follower = trace.clone();
        drop(trace);
        drop(child);
        follower.change(|span| span.set("tokens", 7_u64));
        drop(follower);
        let ended = ended(&mut queue);
        let [child, root] = &ended[..] else { panic!("two spans") };
        let parent = TraceParent::from_headers(&sent(SENT)).unwrap();
        assert_eq!((root.trace_id, root.parent), (parent.trace_id, Some(parent.span_id)));
        assert!(root.is_parent_remote && &*root.trace_state == "a=1");
        assert_eq!((child.trace_id, child.parent), (parent.trace_id, Some(root.span_id)));
        assert!(!child.is_parent_remote && child.failure == Some("no answer"));
        assert!(root.attributes.len() == 1 && child.attributes.is_empty());
        assert!(root.began_unix_ns <= child.began_unix_ns);
        assert!(child.ended_unix_ns <= root.ended_unix_ns);
        assert_eq!(TraceParent::from_headers(&headers).unwrap().span_id, root.span_id);
        assert_eq!(TraceParent::from_headers(&to_agent).unwrap().span_id, child.span_id);
        assert_eq!(to_agent[TRACESTATE], "a=1");
    }

    #[tokio::test]
    async fn what_a_client_does_not_sample_passes_unchanged() {
        let (traces, mut queue) = traces(9, 1.0);
        let unsampled: &str = &SENT.replace("-01", "-00");
        let mut headers = sent(SENT);
        headers.insert(TRACEPARENT, HeaderValue::from_str(unsampled).unwrap());
        let trace = traces.begin(&mut headers, "turn");
        assert!(!trace.is_on());
        trace.child("send", SpanKind::Client).inject(&mut headers);
        assert_eq!(headers[TRACEPARENT], unsampled);
        assert!(ended(&mut queue).is_empty());
    }

    #[tokio::test]
    async fn a_malformed_context_begins_a_new_trace_without_its_state() {
        for (ratio, is_on) in [(1.0, true), (0.0, false)] {
            let (traces, mut queue) = traces(9, ratio);
            let mut headers = sent("00-nonsense");
            let trace = traces.begin(&mut headers, "turn");
            assert_eq!(trace.is_on(), is_on);
            // The next process doesn't decide again.
            assert_eq!(TraceParent::from_headers(&headers).unwrap().is_sampled, is_on);
            assert!(!headers.contains_key(TRACESTATE));
            drop(trace);
            let ended = ended(&mut queue);
            assert_eq!(ended.len(), usize::from(is_on));
            assert!(ended.iter().all(|root| root.parent.is_none() && !root.is_parent_remote));
        }
    }

    #[tokio::test]
    async fn spans_that_find_no_room_are_dropped_and_counted() {
        let (traces, mut queue) = traces(2, 1.0);
        for _ in 0..5 {
            drop(traces.begin(&mut HeaderMap::new(), "turn"));
        }
        assert_eq!(ended(&mut queue).len(), 2);
        let metrics = &traces.queue.as_ref().unwrap().metrics;
        assert_eq!(metrics.dropped(DropReason::QueueFull), 3);
    }

    #[test]
    fn without_a_collector_nothing_is_changed_or_kept() {
        let traces = Traces::default();
        let mut headers = sent("00-nonsense");
        let trace = traces.begin(&mut headers, "turn");
        let mut span = trace.child("send", SpanKind::Client);
        span.set("tokens", 7_u64);
        span.inject(&mut headers);
        trace.change(|_| panic!("the turn isn't traced"));
        assert_eq!(headers, sent("00-nonsense"));
    }
}
