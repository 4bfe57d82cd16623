//! Tests of the router over real sockets, in front of minimal agents.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

mod agent;
mod blocks;
mod ends;
mod harness;
mod hints;
mod lifecycle;
mod models;
mod preamble;
mod recent;
mod refusals;
mod routes;
mod shares;
mod turns;
