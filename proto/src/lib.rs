//! The contract between a Berth router and a worker agent.
//!
//! An *agent* runs beside one engine (SGLang) and reports its load and its resident KV. A *router*
//! places each turn (one request and its answer) on an agent. This package holds the gRPC schema
//! and the types that both sides share. It depends on no other package of Berth and does no I/O.
//! Code that both processes need to run is in the package `service`.
//!
//! - [`v1`]: the wire messages, generated from `schema/agent/v1/agent.proto`.
//! - [`id`]: validated identifiers.
//! - [`kv`]: an agent's messages about the blocks of KV that are resident in its engine.
//! - [`staged_prefill`]: how a router asks an agent to compute a long prompt in stages.
//! - [`load`]: an agent's load report, the description of its engine, and its sessions.
//! - [`model_files`]: how tokenizer and chat template files are named and hashed.
//! - [`route`]: the engine's routes that agent and router serve.
//! - [`placement_claim`]: how routers agree on the worker of a session that no agent has yet.
//! - [`claim`]: the headers by which a router tells an agent to which session a turn belongs.
//! - [`bootstrap`]: the header that tells an agent which half of a pair its engine runs.
//! - [`abort`]: the names by which clients abort turns, and how a router asks an agent for that.
//! - [`turn_rid`]: the ids that agents give their turns inside the engine.
//! - [`hints`]: the header by which a router tells an agent what a turn's client hinted at.
//! - [`block`]: routing blocks, the parts of a prompt whose KV both sides track.
//! - [`proof`]: the headers by which a router and an agent prove that they hold the same token.
//! - [`answers`]: whether a request asks for one answer to one prompt.
//! - [`body`]: reads and rewrites the top level of a JSON request body.
//! - [`count`]: bounds the counts that other processes report.
//! - [`gaps`]: how long sessions pause between two turns.
//! - [`table`]: the hash table on which both sides build their indexes of blocks or pages.

pub mod abort;
pub mod answers;
pub mod block;
pub mod body;
pub mod bootstrap;
pub mod claim;
pub mod control;
pub mod count;
pub mod flags;
pub mod gaps;
pub mod hints;
pub mod id;
pub mod kv;
pub mod load;
pub mod model_files;
pub mod placement_claim;
pub mod proof;
pub mod route;
pub mod staged_prefill;
pub mod table;
pub mod turn_rid;

/// The generated messages and services of `berth.agent.v1`.
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
