//! The contract between a Berth router and a worker agent: the gRPC schema and the domain types
//! that both sides share. It depends on nothing of Berth's and does no I/O.
//!
//! - [`v1`]: what travels, generated from `schema/agent/v1/agent.proto`.
//! - [`id`]: validated identifiers.
//! - [`kv`]: what an agent says of resident blocks.
//! - [`lane`]: how a router has an agent compute a long prompt in pieces.
//! - [`load`]: the load report in domain types; conversion rejects nonsense.
//! - [`model`]: how the files that make tokens are named.
//! - [`claim`]: what a router tells an agent about a turn's session, as one header.
//! - [`block`]: routing blocks, the unit in which both sides say what KV is where.
//! - [`body`]: the top level of a JSON request body, by byte range.
//! - [`table`]: what both sides' indexes of blocks are made of.
//! - [`process`]: what both binaries are to their operator: tasks, admin port, settings, refusals.

pub mod block;
pub mod body;
pub mod claim;
pub mod id;
pub mod kv;
pub mod lane;
pub mod load;
pub mod model;
pub mod process;
pub mod table;

/// The generated messages and services of `berth.agent.v1`.
#[expect(
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("berth.agent.v1");
}
