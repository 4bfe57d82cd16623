//! Sends spans that have ended to the collector, in batches, from a thread of its own.
//!
//! What comes while the queue is full is dropped, and so is a batch that the collector doesn't
//! take: no turn waits for a collector, and no span is sent twice.

use std::time::Duration;

use hyper_util::client::legacy::connect::HttpConnector;
use prometheus_client::metrics::counter::Counter;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};
use tracing::{info, warn};

use super::{
    record::{Exported, SpanRecord},
    rpc::trace_service_client::TraceServiceClient,
};
use crate::{
    log::describe_error,
    metrics::By,
    tls::{
        Protocol,
        client::{ClientTls, Connector},
    },
};

/// The most spans that wait for their export. A span takes about half a KiB. At 1,000 spans a
/// second, which are about 100 turns, a collector may be away for eight seconds.
pub(super) const SPANS_QUEUED_MAX: usize = 8_192;
/// The most spans of one request: OTLP's usual number. They take about 200 KiB.
const BATCH_SPANS_MAX: usize = 512;
/// So that a quiet process doesn't send each span alone, and a turn that has ended is soon found.
const BATCH_TIME: Duration = Duration::from_secs(1);
const CONNECT_TIME_MAX: Duration = Duration::from_secs(1);
/// Time limit of an export. A collector takes milliseconds.
const EXPORT_TIME_MAX: Duration = Duration::from_secs(5);
pub(super) const LAST_EXPORTS_TIME_MAX: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DropReason {
    /// The queue was full, or the process ends.
    QueueFull,
    /// The collector could not be reached, was late, or refused the request.
    ExportFailed,
    /// The collector took the request without this span.
    Rejected,
}

impl DropReason {
    fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::ExportFailed => "export_failed",
            Self::Rejected => "rejected",
        }
    }
}

crate::metrics! {
    pub struct Metrics {
        /// Spans of traces that the collector has taken
        exported: Counter = "spans_exported";
        /// Spans of traces that were dropped, by reason
        dropped: By<Counter> = "spans_dropped", By::label("reason");
    }
}

impl Metrics {
    pub(super) fn count_dropped(&self, reason: DropReason, spans: u64) {
        self.dropped.get(reason.as_str()).inc_by(spans);
    }

    #[cfg(test)]
    pub(super) fn dropped(&self, reason: DropReason) -> u64 {
        self.dropped.get(reason.as_str()).get()
    }
}

#[derive(Debug)]
pub(super) struct Exporter {
    pub(super) endpoint: Endpoint,
    pub(super) tls: Option<ClientTls>,
    pub(super) exported: Exported,
    pub(super) metrics: Metrics,
    pub(super) queue: mpsc::Receiver<SpanRecord>,
}

#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("the collector has not answered within {0:?}")]
    Late(Duration),
    #[error(transparent)]
    Refused(#[from] Status),
}

impl Exporter {
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let tls = self.tls.take();
        let connector =
            Connector::new(HttpConnector::new(), tls, Protocol::Http2, CONNECT_TIME_MAX);
        // Connects at the first export, and again after a failure.
        let channel = self.endpoint.connect_with_connector_lazy(connector);
        let mut client = TraceServiceClient::new(channel);
        let mut batch = vec![];
        let mut is_out = false;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                is_open = self.fill(&mut batch) => if !is_open { break },
            }
            let spans = std::mem::take(&mut batch);
            let result = self.export(&mut client, spans, EXPORT_TIME_MAX).await;
            let was_out = std::mem::replace(&mut is_out, result.is_err());
            let endpoint = self.endpoint.uri();
            match result {
                Err(error) if !was_out => {
                    let error = describe_error(&error);
                    warn!(%endpoint, error, "can't export traces, their spans are dropped");
                }
                Ok(()) if was_out => info!(%endpoint, "traces are exported again"),
                Ok(()) | Err(_) => {}
            }
        }
        self.export_rest(&mut client, batch).await;
    }

    /// Waits for spans, and a while for more of them. Returns false if no more can come. Spans are
    /// in `batch` or in the queue at any time, so that the future may be dropped.
    async fn fill(&mut self, batch: &mut Vec<SpanRecord>) -> bool {
        if self.queue.recv_many(batch, BATCH_SPANS_MAX).await == 0 {
            return false;
        }
        let send_at = Instant::now() + BATCH_TIME;
        while batch.len() < BATCH_SPANS_MAX {
            let room = BATCH_SPANS_MAX - batch.len();
            let more = self.queue.recv_many(batch, room);
            if !matches!(timeout_at(send_at, more).await, Ok(1..)) {
                break;
            }
        }
        true
    }

    async fn export(
        &self,
        client: &mut TraceServiceClient<Channel>,
        batch: Vec<SpanRecord>,
        time_max: Duration,
    ) -> Result<(), ExportError> {
        let spans = batch.len() as u64;
        let exporting = client.export(self.exported.request(batch));
        let result = match timeout(time_max, exporting).await {
            Ok(answer) => answer.map_err(ExportError::from),
            Err(_) => Err(ExportError::Late(time_max)),
        };
        let answer = result
            .inspect_err(|_| self.metrics.count_dropped(DropReason::ExportFailed, spans))?
            .into_inner();
        let rejected = answer.partial_success.map_or(0, |partial| partial.rejected_spans);
        let rejected = u64::try_from(rejected).unwrap_or(0).min(spans);
        self.metrics.exported.inc_by(spans - rejected);
        if rejected > 0 {
            self.metrics.count_dropped(DropReason::Rejected, rejected);
        }
        Ok(())
    }

    /// Exports what is left at the process's end. Counts as dropped what the time doesn't allow.
    async fn export_rest(
        &mut self,
        client: &mut TraceServiceClient<Channel>,
        mut batch: Vec<SpanRecord>,
    ) {
        self.queue.close();
        let give_up_at = Instant::now() + LAST_EXPORTS_TIME_MAX;
        loop {
            let room = BATCH_SPANS_MAX.saturating_sub(batch.len());
            if room > 0 {
                self.queue.recv_many(&mut batch, room).await;
            }
            let time_left = give_up_at.saturating_duration_since(Instant::now());
            let spans = std::mem::take(&mut batch);
            if spans.is_empty() || self.export(client, spans, time_left).await.is_err() {
                break;
            }
        }
        self.metrics.count_dropped(DropReason::ExportFailed, self.queue.len() as u64);
    }
}
