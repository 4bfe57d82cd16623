//! Serves the data port, the HTTP port on which routers send turns (one request and its answer).
//!
//! [`routes`] dispatches the requests, and [`turn`] takes a turn through the agent. On the way,
//! [`request`] checks and rewrites the body, `exchange` follows the turn inside the engine, and
//! [`response_scanner`] scans the answer. `refusals` maps the agent's errors to HTTP.

mod exchange;
mod refusals;
pub mod request;
pub mod response_scanner;
pub mod route_features;
pub mod routes;
pub mod turn;

pub use self::{
    refusals::refusal,
    routes::app,
    turn::{TurnContext, send_own_turn},
};
