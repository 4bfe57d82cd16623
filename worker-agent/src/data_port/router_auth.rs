//! Decides whether a request or call comes from a router, by its certificate or its proof.
//!
//! Both ports demand the proof of every request, so what a router is trusted with (claims of
//! sessions, the engine's API key) is out of reach for everybody else, and knowing a session's
//! principal and id is not enough to act for it. Only a port on loopback may demand no proof.

use std::sync::Arc;

use axum::{
    extract::Request,
    response::{IntoResponse, Response},
};
use contract::{
    proof,
    v1::{ProveRequest, ProveResponse},
};
use http::{HeaderMap, Method, StatusCode, Uri};
use service::{
    auth::origin,
    proof::{Error, agent::AgentProofs},
    refusal::{Code, Refusal},
    tls::server::ServerTls,
};

use super::TurnContext;

/// Both may claim sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// A router's turns get the engine's API key.
    Router,
    /// A process on this host, at a port that demands no proof, whose credential goes to the
    /// engine.
    Local,
}

impl Caller {
    /// A request whose sender isn't noted is trusted with nothing.
    pub(super) fn read(request_head: &http::request::Parts) -> Self {
        request_head.extensions.get().copied().unwrap_or(Self::Local)
    }
}

#[derive(Debug, Clone)]
pub struct RouterAuth {
    /// By a token that routers and this agent share; `None` if the agent has none.
    pub proofs: Option<Arc<AgentProofs>>,
    /// The ports accept only connections with a router's certificate.
    pub has_mutual_tls: bool,
    /// Processes may call a port that demands no proof by these names and its host's. A page in a
    /// browser could use any other.
    pub own_names: Arc<[String]>,
}

#[derive(Debug, Clone)]
pub struct PortAccess {
    pub router_auth: RouterAuth,
    pub tls: Option<ServerTls>,
}

impl RouterAuth {
    #[must_use]
    pub fn is_demanded(&self) -> bool {
        self.proofs.is_some() || self.has_mutual_tls
    }

    /// If both a certificate and a token are demanded, both are needed.
    pub fn identify(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Caller, String> {
        if let Some(proofs) = &self.proofs {
            proofs.check(method, uri, headers).map_err(|error| stranger_text(&error))?;
        }
        if self.is_demanded() {
            return Ok(Caller::Router);
        }
        // A page that somebody on this host opens is no process of the host's.
        origin::check_no_browser(headers, &self.own_names).map_err(|why| stranger_text(&why))?;
        Ok(Caller::Local)
    }

    pub fn prove(&self, hello: &ProveRequest) -> Result<ProveResponse, Error> {
        self.proofs.as_ref().ok_or(Error::OtherToken)?.answer(hello)
    }
}

pub(crate) fn stranger_text(error: &dyn std::fmt::Display) -> String {
    format!(
        "this port serves routers only, and the caller is none ({error}): send your requests to a \
         router, and set its agents.token_file to a token of this agent's auth.token_file, if it \
         has one"
    )
}

/// Notes in the request who has sent it. The error is the answer to who is no router, or only
/// proves to be one.
#[expect(clippy::result_large_err, reason = "it goes to the client as it is")]
pub(super) fn demand_router(context: &TurnContext, request: &mut Request) -> Result<(), Response> {
    let auth = &context.router_auth;
    let identified = match &auth.proofs {
        // Only who has proven to be a router is told what else there is.
        Some(proofs) if request.uri().path() == proof::PATH => {
            match proofs.answer_headers(request.headers()) {
                Ok(answer) => {
                    return Err((StatusCode::OK, [(proof::AGENT, answer)]).into_response());
                }
                Err(error) => Err(stranger_text(&error)),
            }
        }
        _ => auth.identify(request.method(), request.uri(), request.headers()),
    };
    match identified {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            Ok(())
        }
        Err(text) => {
            let refusal = Refusal::new(Code::NotARouter, text);
            context.metrics.count_refusal(refusal.code);
            Err(refusal.into_response())
        }
    }
}
