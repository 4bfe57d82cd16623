//! Serves the data port, the HTTP port on which routers send turns.

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
