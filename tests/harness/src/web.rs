//! A small HTTP client for tests, which sends requests and returns answers unchanged.

use std::net::IpAddr;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;
use service::tls::{
    Protocol,
    client::{ClientTls, Connector},
};

use crate::cluster::PATIENCE;

/// The headers of a request.
pub type Headers<'a> = &'a [(&'a str, &'a str)];

/// A client with its own connection pool.
#[derive(Debug, Clone)]
pub struct Web {
    client: Client<Connector, Body>,
}

/// A complete answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

impl Answer {
    /// Returns the body as JSON, or null if the body isn't JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// Returns the code of a Berth refusal, or an empty string for any other answer. The header has
    /// it too, because the errors of some APIs have no code.
    pub fn code(&self) -> String {
        let in_body = &self.json()["error"]["code"];
        in_body.as_str().unwrap_or_else(|| self.header("x-berth-refusal")).to_owned()
    }

    /// Returns a number from the `meta_info` of `/generate`.
    pub fn meta(&self, key: &str) -> Option<u64> {
        self.json()["meta_info"][key].as_u64()
    }

    /// Returns the status and the code of a refusal.
    pub fn refusal(&self) -> (u16, String) {
        (self.status.as_u16(), self.code())
    }

    /// Returns a header's value, or an empty string.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap_or_default())
    }

    /// Returns a value from the `meta_info` of `/generate`.
    pub fn meta_value(&self, key: &str) -> Value {
        self.json()["meta_info"][key].clone()
    }

    /// Returns the body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

impl Default for Web {
    fn default() -> Self {
        Self::new(None, None)
    }
}

impl Web {
    /// Returns a client that also sends to `https` URLs.
    pub fn with_tls(tls: ClientTls) -> Self {
        Self::new(None, Some(tls))
    }

    /// Returns a client that connects from `source`, an address of this host. With `tls`, it also
    /// sends to `https` URLs.
    pub fn from_address(source: IpAddr, tls: Option<ClientTls>) -> Self {
        Self::new(Some(source), tls)
    }

    fn new(source: Option<IpAddr>, tls: Option<ClientTls>) -> Self {
        let mut http = HttpConnector::new();
        http.set_local_address(source);
        let connector = Connector::new(http, tls, Protocol::Http1, PATIENCE);
        Self { client: Client::builder(TokioExecutor::new()).build(connector) }
    }
}

impl Web {
    /// Sends a request; the caller reads the answer's body.
    ///
    /// # Errors
    /// Fails if no head of an answer arrives.
    pub async fn send(
        &self,
        method: Method,
        url: &str,
        headers: Headers<'_>,
        body: impl Into<Body>,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, value.as_bytes());
        }
        Ok(self.client.request(request.body(body.into())?).await?)
    }

    /// Sends a request and reads the complete answer.
    ///
    /// # Errors
    /// Fails if no answer arrives or the answer breaks off.
    pub async fn request(
        &self,
        method: Method,
        url: &str,
        headers: Headers<'_>,
        body: impl Into<Body>,
    ) -> anyhow::Result<Answer> {
        let (head, body) = self.send(method, url, headers, body).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Answer { status: head.status, headers: head.headers, body })
    }

    /// Sends a POST request with a JSON body.
    ///
    /// # Errors
    /// Fails if no answer arrives or the answer breaks off.
    pub async fn post(
        &self,
        url: &str,
        headers: Headers<'_>,
        body: &Value,
    ) -> anyhow::Result<Answer> {
        let mut all = vec![("content-type", "application/json")];
        all.extend_from_slice(headers);
        self.request(Method::POST, url, &all, body.to_string()).await
    }

    /// Sends a GET request.
    ///
    /// # Errors
    /// Fails if no answer arrives or the answer breaks off.
    pub async fn get(&self, url: &str) -> anyhow::Result<Answer> {
        self.request(Method::GET, url, &[], Body::empty()).await
    }
}
