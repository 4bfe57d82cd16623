//! Traces of turns for OpenTelemetry: spans, and their context in headers.
//!
//! - [`context`]: the headers. [`record`]: a span that has ended, and its form for the collector.
//! - [`settings`]: the table `[traces]`.

pub mod context;
pub mod record;
pub mod settings;

/// The generated messages and the client of OTLP.
#[expect(
    clippy::allow_attributes_without_reason,
    clippy::enum_variant_names,
    unreachable_pub,
    reason = "generated code"
)]
mod rpc {
    tonic::include_proto!("opentelemetry.proto.collector.trace.v1");
}
