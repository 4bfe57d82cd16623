//! Decides which requests an admin port lets pass.
//!
//! Whatever isn't named here needs an admin key, so that a new route is guarded. Without a key
//! file, a port that only this host can reach is open, and any other shows only what needs no
//! credential.

use std::net::IpAddr;

use http::{HeaderMap, Method};

use super::{MetricsAuth, admin_only_refusal, credential, keys::KeySet, unauthorized_refusal};
use crate::{refusal::Refusal, reload::Reloaded};

#[derive(Debug, Clone)]
pub struct Gate {
    keys: Option<Reloaded<KeySet>>,
    metrics_auth: MetricsAuth,
    is_local: bool,
}

/// A request that the gate has let pass, for an answer that goes on for long.
#[derive(Debug, Clone)]
pub struct GatePass {
    gate: Gate,
    method: Method,
    path: String,
    headers: HeaderMap,
}

impl GatePass {
    /// Whether the gate would still let the request pass. A key may have been taken away.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.gate.check(&self.method, &self.path, &self.headers).is_ok()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Nothing,
    Read,
    Admin,
}

impl Gate {
    /// `address` is the one that the port is bound to, not a client's.
    #[must_use]
    pub fn new(keys: Option<Reloaded<KeySet>>, metrics_auth: MetricsAuth, address: IpAddr) -> Self {
        Self { keys, metrics_auth, is_local: is_local(address) }
    }

    /// Whether the port needs no key, because only this host reaches it.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.keys.is_none() && self.is_local
    }

    pub fn check(&self, method: &Method, path: &str, headers: &HeaderMap) -> Result<(), Refusal> {
        let need = self.need(method, path);
        if need == Need::Nothing {
            return Ok(());
        }
        let Some(keys) = &self.keys else {
            let message = "this port has no keys; set keys_file, or ask on the host itself";
            return if self.is_local { Ok(()) } else { Err(admin_only_refusal(message)) };
        };
        let credential = credential::find(headers)
            .map_err(|error| unauthorized_refusal(&error.to_string()))?
            .ok_or_else(|| unauthorized_refusal("this route needs a key"))?;
        let keys = keys.load();
        let key =
            keys.find(credential).ok_or_else(|| unauthorized_refusal("the key is unknown"))?;
        match need {
            Need::Read if key.is_scrape || key.is_admin => Ok(()),
            Need::Read => {
                Err(admin_only_refusal("this route needs a key with scrape = true or admin = true"))
            }
            _ if key.is_admin => Ok(()),
            _ => Err(admin_only_refusal("this route needs a key with admin = true")),
        }
    }

    /// Checks a request as [`Self::check`], and returns a pass, by which a long answer asks again.
    pub fn let_pass(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<GatePass, Refusal> {
        self.check(method, path, headers)?;
        let (method, path, headers) = (method.clone(), path.to_owned(), headers.clone());
        Ok(GatePass { gate: self.clone(), method, path, headers })
    }

    fn need(&self, method: &Method, path: &str) -> Need {
        match path {
            _ if !matches!(*method, Method::GET | Method::HEAD) => Need::Admin,
            // Supervisors and load balancers send no credential.
            "/healthz" | "/readyz" => Need::Nothing,
            // The files of a page. They are in the program and say nothing of the fleet. A browser
            // can send no key with the request for a page; the page's own requests need one.
            "/dashboard" => Need::Nothing,
            _ if path.starts_with("/dashboard/page/") => Need::Nothing,
            "/metrics" if self.metrics_auth == MetricsAuth::None => Need::Nothing,
            "/metrics" | "/config" => Need::Read,
            _ => Need::Admin,
        }
    }
}

#[must_use]
pub fn is_local(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use http::{HeaderValue, StatusCode};
    use sha2::{Digest as _, Sha256};

    use super::*;

    const OPEN: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn keys() -> Reloaded<KeySet> {
        let entry = |name: &str, rest: &str| {
            let sha256: String =
                Sha256::digest(name).iter().map(|byte| format!("{byte:02x}")).collect();
            format!("[[key]]\nname = \"{name}\"\nsha256 = \"{sha256}\"\n{rest}\n")
        };
        let text =
            entry("ops", "admin = true") + &entry("mon", "scrape = true") + &entry("user", "");
        Reloaded::fixed(KeySet::parse(&text).unwrap())
    }

    /// Returns the status for a request with this key, or 200.
    fn status(gate: &Gate, method: &Method, path: &str, key: &'static str) -> StatusCode {
        let mut headers = HeaderMap::new();
        if !key.is_empty() {
            headers.insert("x-api-key", HeaderValue::from_static(key));
        }
        gate.check(method, path, &headers)
            .map_or_else(|refusal| refusal.code.status(), |()| StatusCode::OK)
    }

    fn statuses(gate: &Gate, method: &Method, path: &str) -> [u16; 5] {
        ["", "wrong", "user", "mon", "ops"].map(|key| status(gate, method, path, key).as_u16())
    }

    #[test]
    fn each_route_needs_its_right_where_there_are_keys() {
        for address in [OPEN, LOCAL] {
            let gate = Gate::new(Some(keys()), MetricsAuth::Key, address);
            for path in ["/healthz", "/readyz", "/dashboard", "/dashboard/page/app.js"] {
                assert_eq!(statuses(&gate, &Method::GET, path), [200; 5]);
            }
            for path in ["/metrics", "/config"] {
                assert_eq!(statuses(&gate, &Method::GET, path), [401, 401, 403, 200, 200]);
            }
            for path in ["/new", "/dashboard/events", "/dashboard/api/workers", "/dashboardx"] {
                assert_eq!(statuses(&gate, &Method::GET, path), [401, 401, 403, 403, 200]);
            }
            for path in ["/metrics", "/healthz"] {
                assert_eq!(statuses(&gate, &Method::POST, path), [401, 401, 403, 403, 200]);
            }
            let gate = Gate::new(Some(keys()), MetricsAuth::None, address);
            assert_eq!(statuses(&gate, &Method::GET, "/metrics"), [200; 5]);
            assert_eq!(statuses(&gate, &Method::GET, "/config"), [401, 401, 403, 200, 200]);
        }
    }

    #[test]
    fn without_keys_only_the_host_itself_sees_everything() {
        let gate = Gate::new(None, MetricsAuth::Key, LOCAL);
        assert_eq!(statuses(&gate, &Method::GET, "/config"), [200; 5]);
        let gate = Gate::new(None, MetricsAuth::Key, OPEN);
        assert_eq!(statuses(&gate, &Method::GET, "/config"), [403; 5]);
        assert_eq!(statuses(&gate, &Method::GET, "/metrics"), [403; 5]);
        assert_eq!(statuses(&gate, &Method::GET, "/healthz"), [200; 5]);
        let gate = Gate::new(None, MetricsAuth::None, OPEN);
        assert_eq!(statuses(&gate, &Method::GET, "/metrics"), [200; 5]);
        assert_eq!(statuses(&gate, &Method::GET, "/config"), [403; 5]);
    }
}
