//! Keeps web pages from driving a router that asks for no key.
//!
//! A router without keys serves whoever reaches it, also web pages in an operator's browser. The
//! requests of pages are known by their headers (`service::auth::origin`). With keys nothing is
//! checked, as no page has one.

use std::sync::Arc;

use axum::extract::Request;
use contract::control::ControlRoute;
use http::Method;
use service::{
    auth::{gate, origin},
    refusal::{Code, Refusal},
};

use super::health;
use crate::{config::tables::ListenTable, turn::shared::Shared};

#[derive(Debug)]
pub(super) struct Pages {
    shared: Arc<Shared>,
    allowed: origin::Allowed,
    /// Whether a name that no setting allows is an attacker's: on loopback, or if names are set.
    needs_own_name: bool,
}

impl Pages {
    pub(super) fn new(shared: Arc<Shared>, listen: &ListenTable) -> Self {
        let allowed = origin::Allowed {
            origins: listen.cors_origins.clone(),
            hosts: listen.allowed_hosts.clone(),
        };
        let is_local = gate::is_local(listen.data_addr.ip());
        let needs_own_name = is_local || !allowed.hosts.is_empty();
        Self { shared, allowed, needs_own_name }
    }

    pub(super) fn check(&self, request: &Request) -> Result<(), Refusal> {
        self.check_origin(request).map_err(|why| {
            let message = format!("{why}; see listen.cors_origins and listen.allowed_hosts");
            Refusal::new(Code::ForeignPage, message)
        })
    }

    fn check_origin(&self, request: &Request) -> Result<(), &'static str> {
        let (path, headers) = (request.uri().path(), request.headers());
        if !self.shared.auth.is_open() || health::is_health_path(path) {
            return Ok(());
        }
        origin::check(headers, self.needs_own_name, &self.allowed)?;
        // A page can have a browser send a GET or HEAD without its origin, as for a picture.
        let changes_state = ControlRoute::for_path(path).is_some();
        let is_post = request.method() == Method::POST;
        if changes_state && !is_post && origin::is_of_unknown_page(headers) {
            return Err("this route changes the engines, so that a browser must POST to it");
        }
        Ok(())
    }
}
