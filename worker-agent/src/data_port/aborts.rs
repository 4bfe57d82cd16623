//! Aborts turns for the clients that sent them.
//!
//! A client names its turns itself, and the engine has them under ids of the agent. A turn that
//! waits for room ends at once. A turn inside the engine is aborted there, and its answer is the
//! engine's own. The engine has no id for some turns: these lose their connection to the engine,
//! which then aborts them.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
    routing::post,
};
use contract::{
    abort::{AgentAbortRequest, PATH, TurnNames, TurnPart},
    id::TurnId,
    route::Kind,
};
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use parking_lot::Mutex;
use service::{
    abortable_turns::{AbortableTurn, AbortableTurns},
    refusal::{AbortedTurn, Code, Refusal},
};
use tracing::debug;

use super::{
    TurnContext,
    request::{AbortReach, ParsedRequest},
};

/// The engine forgets an abort that arrives before it has registered the turn, so aborts repeat
/// until the turn has ended.
pub(super) const ABORT_INTERVAL: Duration = Duration::from_millis(500);
/// A body has the names of a large batch.
const BODY_BYTES_MAX: usize = 512 << 10;

/// A turn is on its way here for about as long as its body takes.
const EARLY_ABORTS_MAX: usize = 4096;

pub(super) type AgentTurn = AbortableTurn<Arc<EngineTurn>>;

#[derive(Debug)]
pub struct EngineTurn {
    rid: String,
    pub(super) reach: AbortReach,
    /// The engine's ids that are being aborted: at most one for each prompt.
    aborting: Mutex<Vec<String>>,
}

/// Clones share them.
#[derive(Debug, Clone, Default)]
pub struct AgentTurns {
    running: AbortableTurns<Arc<EngineTurn>>,
    /// Turns that a router aborted before they had arrived here. The oldest is first.
    early_aborts: Arc<Mutex<VecDeque<TurnId>>>,
}

impl AgentTurns {
    fn abort_early(&self, turns: Vec<TurnId>) {
        let mut early = self.early_aborts.lock();
        early.extend(turns);
        let excess = early.len().saturating_sub(EARLY_ABORTS_MAX);
        early.drain(..excess);
    }

    fn was_aborted_early(&self, turn: TurnId) -> bool {
        self.early_aborts.lock().contains(&turn)
    }
}

impl EngineTurn {
    fn rids(&self, part: TurnPart) -> Vec<String> {
        let prompt_rid = |number| format!("{}_{number}", self.rid);
        match (self.reach, part) {
            (AbortReach::Turn, TurnPart::Whole) => vec![self.rid.clone()],
            (AbortReach::Prompts(count), TurnPart::Whole) => (0..count).map(prompt_rid).collect(),
            (AbortReach::Prompts(count), TurnPart::Prompt(number)) if number < count => {
                vec![prompt_rid(number)]
            }
            (AbortReach::Connection, _) | (_, TurnPart::Prompt(_)) => vec![],
        }
    }

    /// Returns whether this is the first abort of the id.
    fn begin_abort(&self, rid: &str) -> bool {
        let mut aborting = self.aborting.lock();
        let is_first = aborting.iter().all(|known| known != rid);
        if is_first {
            aborting.push(rid.to_owned());
        }
        is_first
    }
}

/// `rid` is the turn's id inside the engine.
pub(super) fn add_turn(
    turns: &AgentTurns,
    turn_id: Option<TurnId>,
    principal: &str,
    parsed: &ParsedRequest,
    headers: &HeaderMap,
    rid: String,
) -> AgentTurn {
    let names = parsed.names.clone().or_header(headers);
    let answer_id = rid.clone();
    let facts = EngineTurn { rid, reach: parsed.reach, aborting: Mutex::default() };
    let running = turns.running.add(principal, names, &answer_id, Arc::new(facts));
    // Looked at after the turn can be found by its names, so that no abort falls between.
    if turn_id.is_some_and(|turn_id| turns.was_aborted_early(turn_id)) {
        running.aborted_token().cancel();
    }
    running
}

pub(super) fn answer_unsent(kind: Kind, parsed: &ParsedRequest) -> Result<Response, Refusal> {
    let rid = if let TurnNames::Turn(name) = &parsed.names { name } else { "" };
    let (wants_stream, is_single) = (parsed.wants_stream, parsed.has_single_answer);
    AbortedTurn { kind, rid, wants_stream, is_single }.answer()
}

pub(super) fn routes() -> Router<Arc<TurnContext>> {
    Router::new().route(PATH, post(serve))
}

async fn serve(State(context): State<Arc<TurnContext>>, request: Request) -> Response {
    match abort(&context, request).await {
        Ok(()) => StatusCode::NO_CONTENT.into_response(),
        Err(refusal) => {
            context.metrics.count_refusal(refusal.code);
            refusal.into_response()
        }
    }
}

/// Returns when the engine has the aborts.
async fn abort(context: &TurnContext, request: Request) -> Result<(), Refusal> {
    let invalid = |_| Refusal::new(Code::InvalidJson, "the body is no abort request of a router");
    let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
    let body = body.map_err(|_| Refusal::new(Code::BodyTooLarge, "the abort request is too large"));
    let request: AgentAbortRequest = serde_json::from_slice(&body?.to_bytes()).map_err(invalid)?;
    let AgentAbortRequest { request, unanswered } = request;
    context.turns.abort_early(unanswered);
    let mut rids = vec![];
    for turn in context.turns.running.abort(&request) {
        for rid in turn.facts.rids(turn.part) {
            if turn.facts.begin_abort(&rid) {
                repeat_abort(context, &turn.facts, rid.clone());
            }
            rids.push(rid);
        }
    }
    let mut result = Ok(());
    // After an error, the engine still gets the other aborts.
    for rid in rids {
        if let Err(error) = context.engine.abort(&rid).await {
            let message = format!("can't abort at the engine: {error}");
            result = Err(Refusal::new(Code::EngineDown, message));
        }
    }
    result
}

fn repeat_abort(context: &TurnContext, turn: &Arc<EngineTurn>, rid: String) {
    let (engine, turn, stop) =
        (context.engine.clone(), Arc::downgrade(turn), context.tasks.token());
    context.tasks.spawn(async move {
        let mut ticks = tokio::time::interval(ABORT_INTERVAL);
        ticks.tick().await;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            if turn.strong_count() == 0 {
                return;
            }
            if let Err(error) = engine.abort(&rid).await {
                debug!(rid, %error, "can't abort a turn at the engine");
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_early_aborts_are_forgotten() {
        let turns = AgentTurns::default();
        turns.abort_early((0..=EARLY_ABORTS_MAX as u64).map(TurnId).collect());
        assert!(!turns.was_aborted_early(TurnId(0)) && turns.was_aborted_early(TurnId(1)));
        assert!(turns.was_aborted_early(TurnId(EARLY_ABORTS_MAX as u64)));
    }

    #[test]
    fn each_prompt_of_a_list_has_an_id_in_the_engine() {
        let turn = |reach| EngineTurn { rid: "r".into(), reach, aborting: Mutex::default() };
        let (whole, second) = (TurnPart::Whole, TurnPart::Prompt(1));
        for (reach, part, rids) in [
            (AbortReach::Turn, whole, vec!["r"]),
            (AbortReach::Turn, second, vec![]),
            (AbortReach::Prompts(2), whole, vec!["r_0", "r_1"]),
            (AbortReach::Prompts(2), second, vec!["r_1"]),
            (AbortReach::Prompts(1), second, vec![]),
            (AbortReach::Connection, whole, vec![]),
        ] {
            assert_eq!(turn(reach).rids(part), rids, "{reach:?} {part:?}");
        }
        let turn = turn(AbortReach::Turn);
        assert!(turn.begin_abort("r") && !turn.begin_abort("r"));
    }
}
