//! Runs `berth sessions`: the sessions of the key's owner at the router, or all of one agent.

use std::time::Duration;

use contract::{
    api::{Session, SessionReport},
    load, v1,
};
use serde::{Deserialize as _, Serialize};
use serde_json::{Value, json};
use service::proof::router::AgentClient;

use super::{
    Outcome,
    listing::{self, Listing},
    pages::PagedList,
};
use crate::{
    args::{SessionsArgs, TargetArgs},
    connect::{agent, router::RouterClient},
    error::Error,
    text::{
        clean, count, known, millis,
        style::state_tone,
        table::{Cell, Column},
    },
};

/// The agent answers from memory.
const CALL_MAX: Duration = Duration::from_secs(10);

const COLUMNS: &[Column] = &[
    Column::text("SESSION"),
    Column::text("WORKER"),
    Column::word("KEPT"),
    Column::word("STATE"),
    Column::number("TURNS"),
    Column::number("RUN"),
    Column::number("TOKENS"),
    Column::number("IDLE"),
];

const AGENT_COLUMNS: &[Column] = &[
    Column::text("SESSION"),
    Column::text("OWNER"),
    Column::word("KEPT"),
    Column::word("STATE"),
    Column::number("TURNS"),
    Column::number("RUN"),
    Column::number("TOKENS"),
    Column::number("IDLE"),
];

pub async fn run(target: &TargetArgs, args: &SessionsArgs) -> Result<Outcome, Error> {
    if args.at_agent {
        return listing::show(&args.list, async || {
            let client = agent::connect(target, CALL_MAX).await?;
            let sessions = read_from_agent(target, client, args.limit).await?;
            let rows = sessions.iter().map(AgentSession::row).collect();
            let json = json!({ "sessions": sessions });
            Ok(Listing { json, columns: AGENT_COLUMNS, rows, notes: vec![] })
        })
        .await;
    }
    let router = RouterClient::new(target)?;
    listing::show(&args.list, async || {
        let path = "/v1/sessions";
        let mut list = PagedList::new(&router, path, "sessions");
        let sessions = list.read_first(args.limit).await?;
        let rows: Result<_, _> = sessions.iter().map(routed_row).collect();
        let rows = rows.map_err(|error| router.answer_error(path, error.to_string()))?;
        let json = json!({ "sessions": sessions });
        Ok(Listing { json, columns: COLUMNS, rows, notes: vec![] })
    })
    .await
}

/// A session as its agent lists it.
#[derive(Debug, Serialize)]
struct AgentSession {
    session_id: String,
    principal: String,
    digest: String,
    dp_rank: u32,
    state: &'static str,
    #[serde(flatten)]
    report: SessionReport,
}

impl AgentSession {
    fn new(session: &load::Session) -> Self {
        Self {
            session_id: session.key.id().to_owned(),
            principal: session.key.principal().to_owned(),
            digest: session.key.digest().to_string(),
            dp_rank: session.dp_rank,
            state: session.state.as_str(),
            report: session.into(),
        }
    }

    fn row(&self) -> Vec<Cell> {
        row(&self.session_id, &self.principal, self.state, &self.report)
    }
}

fn routed_row(value: &Value) -> serde_json::Result<Vec<Cell>> {
    let Session { session_id, worker, state, report } = Session::deserialize(value)?;
    Ok(row(&session_id, &worker, &state, &report.unwrap_or_default()))
}

/// `place`: the worker, or the owner in an agent's list.
fn row(session_id: &str, place: &str, state: &str, report: &SessionReport) -> Vec<Cell> {
    vec![
        clean(session_id).into(),
        clean(place).into(),
        clean(&report.retention).into(),
        Cell::toned(clean(state), state_tone(state)),
        report.turns.to_string().into(),
        report.turns_running.to_string().into(),
        known(report.resident_tokens, count).into(),
        millis(report.idle_ms()).into(),
    ]
}

/// Returns sessions of all owners.
async fn read_from_agent(
    target: &TargetArgs,
    mut client: AgentClient,
    limit: usize,
) -> Result<Vec<AgentSession>, Error> {
    let mut sessions = vec![];
    let mut page_token = String::new();
    loop {
        let request = v1::ListSessionsRequest { page_size: 0, page_token };
        let page = client.list_sessions(request).await;
        let page = page.map_err(|status| agent::call_error(target, &status))?.into_inner();
        for session in page.sessions {
            let session = load::Session::try_from(session);
            let session = session.map_err(|error| agent_answer_error(target, error.to_string()))?;
            sessions.push(AgentSession::new(&session));
        }
        if page.next_page_token.is_empty() || sessions.len() >= limit {
            break;
        }
        page_token = page.next_page_token;
    }
    sessions.truncate(limit);
    Ok(sessions)
}

fn agent_answer_error(target: &TargetArgs, why: String) -> Error {
    Error::Answer { url: target.agent.clone(), why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_session_is_as_old_as_its_router_says() {
        let idle = |value: Value| format!("{:?}", routed_row(&value).unwrap().pop());
        let session = json!({ "session_id": "s", "idle_ms_at_report": 0, "idle_ms": 61_000 });
        assert_eq!(idle(session), format!("{:?}", Some(Cell::from(millis(61_000)))));
        let of_an_agent = json!({ "session_id": "s", "idle_ms_at_report": 7 });
        assert_eq!(idle(of_an_agent), format!("{:?}", Some(Cell::from(millis(7)))));
    }
}
