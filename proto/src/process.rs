//! What the router and the agent are as processes, alike for whoever operates them: named tasks with
//! one policy each, an HTTP server with limits, an admin port, settings, logs, and one shape of
//! refusal. No decision of either lives here.

pub mod admin;
pub mod budget;
pub mod log;
pub mod refusal;
pub mod server;
pub mod settings;
pub mod tasks;
