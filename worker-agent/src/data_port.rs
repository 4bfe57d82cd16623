//! Serves the data port, the HTTP port on which routers send turns (one request and its answer).
//!
//! Parts, in the order of a turn's way through the agent:
//! - [`router_auth`] lets only routers pass.
//! - [`routes`] dispatches the HTTP requests, and [`turn`] takes a turn through the agent.
//! - [`route_features`] tells which features of a session each route supports.
//! - [`request`] checks and rewrites the body; `body_parts` sends it.
//! - `exchange` follows the turn inside the engine, and [`response_scanner`] scans the answer.
//! - `spans` says what a turn's trace tells.
//! - [`aborts`] aborts turns for their clients.
//! - `control` passes on the calls of operators and trainers.
//! - `refusals` maps the agent's errors to HTTP.
//!
//! [`crate::owner`] decides which turns run. Load reports, and opening and closing sessions, are on
//! the control port ([`crate::control_port`]).

pub mod aborts;
mod body_parts;
mod control;
mod exchange;
mod refusals;
pub mod request;
pub mod response_scanner;
pub mod route_features;
pub mod router_auth;
pub mod routes;
mod shim_headers;
pub(crate) mod spans;
pub mod turn;

pub use self::{
    refusals::refusal,
    router_auth::{Caller, PortAccess, RouterAuth},
    routes::app,
    turn::{TurnContext, send_own_turn},
};
