//! Runs `berth drain`: makes routers place no new sessions at an agent, or ends that.
//!
//! It is in the agent's container too, for a hook that runs before the agent stops.

use std::time::Duration;

use contract::v1;
use serde::Serialize;
use service::clock::now;

use super::{Outcome, json_line, print};
use crate::{
    args::{DrainArgs, TargetArgs},
    connect::agent,
    error::Error,
};

const CALL_MAX: Duration = Duration::from_secs(10);
const ASK_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, Serialize)]
struct DrainState {
    draining: bool,
    turns_running: u32,
    turns_queued: u32,
    sessions: u32,
}

/// Turns that are left after the time to wait are not well.
pub async fn run(target: &TargetArgs, args: &DrainArgs) -> Result<Outcome, Error> {
    let deadline = now() + Duration::from_millis(args.wait_ms);
    let mut client = agent::connect(target, CALL_MAX).await?;
    loop {
        let answer = client.drain(v1::DrainRequest { undo: args.undo }).await;
        let state = answer.map_err(|status| agent::call_error(target, &status))?.into_inner();
        let turns = state.turns_running + state.turns_queued;
        let is_waiting = !args.undo && turns > 0;
        if !is_waiting || now() >= deadline {
            print(&describe(state, args.json))?;
            return Ok(Outcome::from_is_well(!is_waiting || args.wait_ms == 0));
        }
        tokio::time::sleep(ASK_INTERVAL).await;
    }
}

fn describe(state: v1::DrainState, is_json: bool) -> String {
    let v1::DrainState { draining, turns_running, turns_queued, sessions } = state;
    if is_json {
        return json_line(&DrainState { draining, turns_running, turns_queued, sessions });
    }
    let state = if draining { "drains" } else { "takes new sessions" };
    format!(
        "the agent {state}: {turns_running} turns run, {turns_queued} wait, {sessions} sessions \
         are left\n"
    )
}
