//! The headers by which a router and an agent prove to each other that they hold the same token.
//!
//! A router sends [`HELLO`] to [`PATH`] on the data port, and the agent answers with [`AGENT`]. On
//! the control port, the call `Prove` does the same. After that, each request and call of the
//! router has [`REQUEST`]. No token is ever sent. Each value is Base64.

use http::HeaderName;

/// Needs no proof.
pub const PATH: &str = "/berth/proof";

/// Request header: a [`ProveRequest`](crate::v1::ProveRequest), encoded.
pub const HELLO: HeaderName = HeaderName::from_static("x-berth-hello");

/// An agent's proof that it holds the token. On its answer to [`HELLO`] it is a
/// [`ProveResponse`](crate::v1::ProveResponse), encoded; on its announcement to a router, the id of
/// the token (8 bytes) and an HMAC of what it announces (32).
pub const AGENT: HeaderName = HeaderName::from_static("x-berth-agent-proof");

/// A router's proof, on each request and call to an agent: the token's id (8 bytes), the agent's
/// challenge (24), the router's random name (16), the request's number (8, little-endian), and an
/// HMAC of these, the request's method and path, and the headers that only a router may send (32).
pub const REQUEST: HeaderName = HeaderName::from_static("x-berth-router-proof");
