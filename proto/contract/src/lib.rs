//! The contract between a Berth router and a worker agent: gRPC schema, and types that both share.
//!
//! `api` has the JSON of the router's own routes.
//!
//! It depends on no other package of Berth and does no I/O. Code that both processes need to run is
//! in the package `service`.

pub mod abort;
pub mod answers;
pub mod api;
pub mod body;
pub mod bootstrap;
pub mod claim;
pub mod control;
pub mod count;
pub mod envelope;
pub mod flags;
pub mod gaps;
pub mod hints;
pub mod id;
pub mod load;
pub mod model_files;
pub mod placement_claim;
pub mod proof;
pub mod route;
pub mod staged_prefill;
pub mod turn_rid;

/// Generated from `schema/agent/v1/agent.proto`.
#[expect(
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::large_enum_variant,
    clippy::too_many_lines,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("berth.agent.v1");
}
