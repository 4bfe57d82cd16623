//! Runs `berth-agent drain`: drains a running agent, or ends its drain.
//!
//! Routers then place no new sessions at the agent, and move those that can go with their next
//! turns. With a time to wait, the command ends when no turn runs or waits there, or the time has
//! passed. A service manager runs it before it stops the agent.

use std::time::Duration;

use proto::v1;
use service::clock::now;

use super::{CommandOutput, Error, connect};
use crate::config::DrainArgs;

/// The time limit of each call.
const CALL_MAX: Duration = Duration::from_secs(10);
/// The interval at which the command asks what is left.
const ASK_INTERVAL: Duration = Duration::from_millis(200);

/// Drains the agent, and says what is left. Turns that are left after the time to wait count as a
/// fault.
///
/// # Errors
/// See [`Error`].
pub async fn run(args: &DrainArgs) -> Result<CommandOutput, Error> {
    let deadline = now() + Duration::from_millis(args.wait_ms);
    let mut client = connect::connect(&args.agent, CALL_MAX).await?;
    loop {
        let answer = client.drain(v1::DrainRequest { undo: args.undo }).await;
        let answer = answer.map_err(|status| Error::Refused(status.message().to_owned()))?;
        let state = answer.into_inner();
        let turns = state.turns_running + state.turns_queued;
        let is_waiting = !args.undo && turns > 0;
        if !is_waiting || now() >= deadline {
            let is_fault_free = !is_waiting || args.wait_ms == 0;
            return Ok(CommandOutput { text: describe(state), is_fault_free });
        }
        tokio::time::sleep(ASK_INTERVAL).await;
    }
}

fn describe(state: v1::DrainState) -> String {
    let v1::DrainState { draining, turns_running, turns_queued, sessions } = state;
    let state = if draining { "drains" } else { "takes new sessions" };
    format!(
        "the agent {state}: {turns_running} turns run, {turns_queued} wait, {sessions} sessions \
         are left\n"
    )
}
