//! Spans while they are open: a span ends when its value is dropped.
//!
//! So each end of a turn ends its spans too, a client's leaving included. Without tracing the
//! values are empty, and nothing is allocated.

use std::{
    num::{NonZeroU64, NonZeroU128},
    sync::Arc,
    time::Instant,
};

use http::HeaderMap;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::{
    context::{SpanId, TRACEPARENT, TraceId, TraceParent},
    exporter::{DropReason, Metrics},
    record::{SpanKind, SpanRecord, Value},
};
use crate::clock::{WallClock, now};

#[derive(Debug, Clone)]
pub(super) struct SpanQueue {
    pub(super) records: mpsc::Sender<SpanRecord>,
    pub(super) metrics: Metrics,
}

impl SpanQueue {
    fn add(&self, record: SpanRecord) {
        if self.records.try_send(record).is_err() {
            self.metrics.count_dropped(DropReason::QueueFull, 1);
        }
    }
}

/// A part of a turn's way, until the drop. Empty, and without effect, if the turn isn't traced.
#[derive(Debug, Default)]
pub struct Span(Option<Box<OpenSpan>>);

#[derive(Debug)]
struct OpenSpan {
    queue: Arc<SpanQueue>,
    clock: WallClock,
    began_at: Instant,
    /// `None` only during the drop.
    record: Option<SpanRecord>,
}

impl Span {
    /// Begins the first span of this process in a trace. `parent` is the sender's span.
    pub(super) fn root(
        queue: Arc<SpanQueue>,
        name: &'static str,
        trace_id: TraceId,
        parent: Option<SpanId>,
        trace_state: Arc<str>,
    ) -> Self {
        let record = SpanRecord {
            trace_id,
            span_id: new_span_id(),
            parent,
            is_parent_remote: parent.is_some(),
            trace_state,
            name,
            kind: SpanKind::Server,
            began_unix_ns: 0,
            ended_unix_ns: 0,
            attributes: vec![],
            failure: None,
        };
        let (clock, began_at, record) = (WallClock::read(), now(), Some(record));
        Self(Some(Box::new(OpenSpan { queue, clock, began_at, record })))
    }

    #[must_use]
    pub fn child(&self, name: &'static str, kind: SpanKind) -> Self {
        let Some((open, parent)) = self.open() else { return Self::default() };
        let record = SpanRecord {
            span_id: new_span_id(),
            parent: Some(parent.span_id),
            is_parent_remote: false,
            trace_state: Arc::clone(&parent.trace_state),
            name,
            kind,
            attributes: vec![],
            failure: None,
            ..*parent
        };
        let (queue, clock, began_at) = (Arc::clone(&open.queue), open.clock, now());
        Self(Some(Box::new(OpenSpan { queue, clock, began_at, record: Some(record) })))
    }

    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(record) = self.record_mut() {
            record.set(key, value.into());
        }
    }

    pub fn set_known(&mut self, key: &'static str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.set(key, value);
        }
    }

    pub fn fail(&mut self, failure: &'static str) {
        if let Some(record) = self.record_mut() {
            record.failure = Some(failure);
        }
    }

    /// Makes this span the parent of the spans of whoever gets a request with these headers.
    pub fn inject(&self, headers: &mut HeaderMap) {
        if let Some((_, SpanRecord { trace_id, span_id, .. })) = self.open() {
            let (trace_id, span_id) = (*trace_id, *span_id);
            let parent = TraceParent { trace_id, span_id, is_sampled: true };
            headers.insert(TRACEPARENT, parent.to_header());
        }
    }

    fn open(&self) -> Option<(&OpenSpan, &SpanRecord)> {
        let open = self.0.as_deref()?;
        Some((open, open.record.as_ref()?))
    }

    fn record_mut(&mut self) -> Option<&mut SpanRecord> {
        self.0.as_mut()?.record.as_mut()
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        let Some(mut record) = self.record.take() else { return };
        record.began_unix_ns = self.clock.unix_ns(self.began_at);
        record.ended_unix_ns = self.clock.unix_ns(now());
        self.queue.add(record);
    }
}

/// The first span of a turn in this process, shared by all that follow the turn. It ends when the
/// last of them drops it. Empty, and without effect, if the turn isn't traced.
#[derive(Debug, Clone, Default)]
pub struct Trace(Option<Arc<Mutex<Span>>>);

impl Trace {
    pub(super) fn new(root: Span) -> Self {
        Self(Some(Arc::new(Mutex::new(root))))
    }

    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Changes the first span. `change` isn't called if the turn isn't traced.
    pub fn change(&self, change: impl FnOnce(&mut Span)) {
        if let Some(root) = &self.0 {
            change(&mut root.lock());
        }
    }

    #[must_use]
    pub fn child(&self, name: &'static str, kind: SpanKind) -> Span {
        self.0.as_ref().map_or_else(Span::default, |root| root.lock().child(name, kind))
    }

    pub async fn within<T>(&self, name: &'static str, future: impl Future<Output = T>) -> T {
        let _span = self.child(name, SpanKind::Internal);
        future.await
    }
}

/// Makes a span's id. The chance that one process makes the same twice within a trace is nil.
fn new_span_id() -> SpanId {
    SpanId(NonZeroU64::new(fastrand::u64(1..)).unwrap_or(NonZeroU64::MIN))
}

/// Makes the parent's context of a trace that isn't exported. No span has its id.
pub(super) fn unsampled(trace_id: TraceId) -> TraceParent {
    TraceParent { trace_id, span_id: new_span_id(), is_sampled: false }
}

pub(super) fn new_trace_id() -> TraceId {
    TraceId(NonZeroU128::new(fastrand::u128(1..)).unwrap_or(NonZeroU128::MIN))
}
