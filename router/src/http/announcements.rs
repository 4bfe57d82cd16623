//! Serves `POST /v1/agents`, by which agents announce themselves to this router.
//!
//! An announced agent gets prompts. So the caller's key must have the right `announce`, which names
//! the ids and addresses of the agents. Nothing else is taken, whoever asks.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{Extension, Request, State},
    response::{IntoResponse as _, Response},
};
use contract::api::{self, AnnouncementHeld};
use service::{
    clock::whole_millis,
    proof,
    refusal::{Code, Refusal},
};
use tracing::warn;

use super::{SharedState, respond, sessions::read_body};
use crate::{
    auth::Caller,
    config::control_authority,
    discovery::announce::{Announcement, Error, TTL_MAX},
};

pub(super) async fn announce(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    let answer = async {
        let Some(announcements) = &shared.announcements else {
            return Err(forbidden("this router takes no announcements; set discovery.announce"));
        };
        let headers = request.headers().clone();
        let body: api::Announcement = read_body(&shared, &caller, request, true).await?;
        let is_proven = announcements.is_proven(&body.agent_id, &body.control, &headers);
        let announcement = read_announcement(&caller, body)?;
        is_proven.map_err(|error| forbidden(&unproven_text(&error)))?;
        let ttl_ms = whole_millis(announcement.ttl);
        let refused = |error| match error {
            Error::Plain => forbidden(&format!("{error}")),
            Error::KeyShare(_) | Error::Full => {
                Refusal::new(Code::AnnounceLimit, format!("{error}"))
            }
        };
        announcements.put(announcement).map_err(refused)?;
        Ok(Json(AnnouncementHeld { ttl_ms }).into_response())
    };
    respond(&shared, answer.await)
}

fn read_announcement(caller: &Caller, body: api::Announcement) -> Result<Announcement, Refusal> {
    let api::Announcement { agent_id, control, ttl_ms, leaving } = body;
    let authority = control_authority(&control)
        .map_err(|why| Refusal::new(Code::InvalidField, format!("control: the text {why}")))?;
    // `control_authority` has found a port.
    let port = authority.port_u16().unwrap_or_default();
    // User and password in a URL would hide the host from people who read it.
    let has_user = authority.as_str().contains('@');
    if has_user || !caller.announce.allows(&agent_id, authority.host(), port) {
        warn!(principal = &*caller.principal, agent_id, control, "announcement refused");
        return Err(forbidden(
            "this key may not announce this agent at this address; its right announce in the key \
             file names the ids and addresses",
        ));
    }
    let ttl = Duration::from_millis(ttl_ms).min(TTL_MAX);
    Ok(Announcement {
        principal: Arc::clone(&caller.principal),
        agent_id,
        // The same agent must not count twice.
        control_url: control.trim_end_matches('/').to_owned(),
        ttl,
        is_leaving: leaving,
    })
}

fn unproven_text(error: &proof::Error) -> String {
    format!(
        "this router sends prompts to agents only that hold a token of its agents.token_file, and \
         of this announcement, {error}: set the agent's auth.token_file, and update agents before \
         routers"
    )
}

fn forbidden(message: &str) -> Refusal {
    Refusal::new(Code::AnnounceForbidden, message)
}
