//! A span that has ended, and its form in OTLP. Pure.

use std::{borrow::Cow, sync::Arc};

use super::{
    context::{SpanId, TraceId},
    rpc::{
        AnyValue, ExportTraceServiceRequest, InstrumentationScope, KeyValue, Resource,
        ResourceSpans, ScopeSpans, Span, Status, any_value, status::StatusCode,
    },
};

/// The flags of a span: its trace is sampled.
const SAMPLED: u32 = 1;
/// The flags of a span whose parent's process is known.
const KNOWS_PROCESS: u32 = 1 << 8;
/// The flags of a span whose parent is in another process.
const IS_REMOTE: u32 = 1 << 9;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    Internal,
    Server,
    Client,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Text(Cow<'static, str>),
    /// A count. Greater ones than an `i64` holds become its maximum.
    Count(u64),
    Flag(bool),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned().into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text.into())
    }
}

impl From<u64> for Value {
    fn from(count: u64) -> Self {
        Self::Count(count)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

/// A span that has ended; flat, as OTLP's spans are.
#[derive(Debug, Clone)]
pub struct SpanRecord {
    pub trace_id: TraceId,
    pub span_id: SpanId,
    /// The span that caused this one. `None` for the first span of a trace.
    pub parent: Option<SpanId>,
    pub is_parent_remote: bool,
    /// What other tracing systems have added to the trace's context.
    pub trace_state: Arc<str>,
    /// What was done. One of a few names.
    pub name: &'static str,
    pub kind: SpanKind,
    pub began_unix_ns: u64,
    pub ended_unix_ns: u64,
    /// What is known of the span. Each key is there once.
    pub attributes: Vec<(&'static str, Value)>,
    /// Why the span failed, in few words. `None` if it didn't.
    pub failure: Option<&'static str>,
}

impl SpanRecord {
    /// Sets an attribute. A value that was set before is replaced.
    pub fn set(&mut self, key: &'static str, value: Value) {
        match self.attributes.iter_mut().find(|(known, _)| *known == key) {
            Some((_, known)) => *known = value,
            None => self.attributes.push((key, value)),
        }
    }

    fn into_otlp(self) -> Span {
        let flags = if self.is_parent_remote { KNOWS_PROCESS | IS_REMOTE } else { KNOWS_PROCESS };
        let kind = match self.kind {
            SpanKind::Internal => super::rpc::SpanKind::Internal,
            SpanKind::Server => super::rpc::SpanKind::Server,
            SpanKind::Client => super::rpc::SpanKind::Client,
        };
        Span {
            trace_id: self.trace_id.0.get().to_be_bytes().into(),
            span_id: self.span_id.0.get().to_be_bytes().into(),
            trace_state: self.trace_state.to_string(),
            parent_span_id: self.parent.map_or_else(Vec::new, |id| id.0.get().to_be_bytes().into()),
            name: self.name.to_owned(),
            kind: kind.into(),
            start_time_unix_nano: self.began_unix_ns,
            end_time_unix_nano: self.ended_unix_ns.max(self.began_unix_ns),
            attributes: self.attributes.into_iter().map(|(key, value)| pair(key, value)).collect(),
            status: self.failure.map(|failure| Status {
                message: failure.to_owned(),
                code: StatusCode::Error.into(),
            }),
            flags: flags | SAMPLED,
        }
    }
}

fn pair(key: &str, value: Value) -> KeyValue {
    let value = match value {
        Value::Text(text) => any_value::Value::StringValue(text.into_owned()),
        Value::Count(count) => any_value::Value::IntValue(i64::try_from(count).unwrap_or(i64::MAX)),
        Value::Flag(flag) => any_value::Value::BoolValue(flag),
    };
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }) }
}

#[derive(Debug, Clone)]
pub struct Exported {
    pub service: &'static str,
    pub version: &'static str,
    /// What tells it from other processes of its binary.
    pub instance: String,
}

impl Exported {
    pub(super) fn request(&self, records: Vec<SpanRecord>) -> ExportTraceServiceRequest {
        let attributes = vec![
            pair("service.name", self.service.into()),
            pair("service.version", self.version.into()),
            pair("service.instance.id", self.instance.clone().into()),
        ];
        let scope =
            InstrumentationScope { name: "berth".to_owned(), version: self.version.to_owned() };
        let spans = records.into_iter().map(SpanRecord::into_otlp).collect();
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans }];
        let resource = Some(Resource { attributes });
        ExportTraceServiceRequest { resource_spans: vec![ResourceSpans { resource, scope_spans }] }
    }
}

#[cfg(test)]
mod tests {
    use std::num::{NonZeroU64, NonZeroU128};

    use super::*;

    fn record() -> SpanRecord {
        SpanRecord {
            trace_id: TraceId(NonZeroU128::new(0x0102).unwrap()),
            span_id: SpanId(NonZeroU64::new(3).unwrap()),
            parent: None,
            is_parent_remote: false,
            trace_state: "a=1".into(),
            name: "turn",
            kind: SpanKind::Server,
            began_unix_ns: 10,
            ended_unix_ns: 30,
            attributes: vec![],
            failure: None,
        }
    }

    #[test]
    fn ids_are_big_endian_and_the_first_span_has_no_parent() {
        let span = record().into_otlp();
        assert_eq!(span.trace_id, [&[0; 14][..], &[1, 2]].concat());
        assert_eq!(span.span_id, [0, 0, 0, 0, 0, 0, 0, 3]);
        assert!(span.parent_span_id.is_empty() && span.status.is_none());
        assert_eq!((span.trace_state.as_str(), span.kind, span.flags), ("a=1", 2, 0x101));
        let parent = Some(SpanId(NonZeroU64::new(9).unwrap()));
        let child = SpanRecord { parent, is_parent_remote: true, ..record() }.into_otlp();
        assert_eq!((child.parent_span_id, child.flags), (vec![0, 0, 0, 0, 0, 0, 0, 9], 0x301));
    }

    #[test]
    fn an_attribute_is_there_once_and_a_failure_is_an_error() {
        let mut failed = SpanRecord { failure: Some("refused"), ..record() };
        failed.set("tries", 1_u64.into());
        failed.set("tries", u64::MAX.into());
        failed.set("ok", false.into());
        let span = failed.into_otlp();
        assert_eq!(span.attributes.len(), 2);
        assert_eq!(span.attributes[0], pair("tries", (i64::MAX as u64).into()));
        let status = span.status.unwrap();
        assert_eq!((status.message.as_str(), status.code()), ("refused", StatusCode::Error));
    }

    #[test]
    fn a_span_never_ends_before_it_begins() {
        let span = SpanRecord { ended_unix_ns: 5, ..record() }.into_otlp();
        assert_eq!(span.end_time_unix_nano, span.start_time_unix_nano);
    }
}
