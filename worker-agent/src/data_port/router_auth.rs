//! Decides whether a request comes from a router, by its certificate or token.
//!
//! Both ports demand the proof of every request. So what a router is trusted with (claims of
//! sessions, the engine's API key) is out of reach for everybody else, and knowing a session's
//! principal and id is not enough to act for it. Only a port on loopback may demand no proof.

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::HeaderMap;
use proto::claim;
use service::{
    refusal::{Code, Refusal},
    reload::Reloaded,
    router_token::Tokens,
};

use super::TurnContext;

/// Who sent a request. Both may claim sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// A router that proved it. Its turns get the engine's API key.
    Router,
    /// A process on this host, at a port that demands no proof. Its own credential goes to the
    /// engine unchanged.
    Local,
}

/// What proves that a caller is a router. Clones follow the same files.
#[derive(Debug, Clone)]
pub struct RouterAuth {
    /// The tokens of which a router must send one; `None` if it needs none.
    pub tokens: Option<Reloaded<Tokens>>,
    /// Whether the ports accept only connections with a router's certificate.
    pub has_mutual_tls: bool,
}

impl RouterAuth {
    /// Whether callers must prove that they are routers.
    #[must_use]
    pub fn is_demanded(&self) -> bool {
        self.tokens.is_some() || self.has_mutual_tls
    }

    /// Returns who sent a request with these headers; `None` if it isn't allowed. If both a
    /// certificate and a token are demanded, both are needed.
    #[must_use]
    pub fn identify(&self, headers: &HeaderMap) -> Option<Caller> {
        let token = headers.get(claim::TOKEN).map(http::HeaderValue::as_bytes);
        if let Some(tokens) = &self.tokens
            && !tokens.load().accept(token)
        {
            return None;
        }
        Some(if self.is_demanded() { Caller::Router } else { Caller::Local })
    }
}

/// Lets a request to the data port pass if its caller may send it, and notes who the caller is.
pub(super) async fn demand_router(
    State(context): State<TurnContext>,
    mut request: Request,
    next: Next,
) -> Response {
    match context.router_auth.identify(request.headers()) {
        Some(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        None => {
            let refusal = refusal();
            context.metrics.count_refusal(refusal.code);
            refusal.into_response()
        }
    }
}

fn refusal() -> Refusal {
    let text = "this port serves routers only: send your requests to a router, or set its \
                agents.token_file to a token of this agent's auth.token_file";
    Refusal::new(Code::NotARouter, text)
}
