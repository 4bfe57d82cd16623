//! A small HTTP client for tests: sends exactly what it is told and shows exactly what came back.

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

/// A client with a connection pool of its own.
#[derive(Debug, Clone)]
pub struct Web {
    client: Client<HttpConnector, Body>,
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
}

impl Answer {
    /// The body as JSON; null when it isn't.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// The code of one of Berth's own refusals; empty for any other answer.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    /// A number of `/generate`'s `meta_info`.
    pub fn meta(&self, key: &str) -> Option<u64> {
        self.json()["meta_info"][key].as_u64()
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

impl Default for Web {
    fn default() -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http() }
    }
}

impl Web {
    /// Sends a request; its answer's body is still to be read.
    ///
    /// # Errors
    /// When no answer's head came.
    pub async fn send(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, value.as_bytes());
        }
        Ok(self.client.request(request.body(body.into())?).await?)
    }

    /// Sends a request and reads its whole answer.
    ///
    /// # Errors
    /// When the answer did not come or broke off.
    pub async fn ask(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> anyhow::Result<Answer> {
        let (head, body) = self.send(method, url, headers, body).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Answer { status: head.status, headers: head.headers, body })
    }

    /// Posts JSON.
    ///
    /// # Errors
    /// When the answer did not come or broke off.
    pub async fn post(
        &self,
        url: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> anyhow::Result<Answer> {
        let mut all = vec![("content-type", "application/json")];
        all.extend_from_slice(headers);
        self.ask(Method::POST, url, &all, body.to_string()).await
    }

    /// Gets.
    ///
    /// # Errors
    /// When the answer did not come or broke off.
    pub async fn get(&self, url: &str) -> anyhow::Result<Answer> {
        self.ask(Method::GET, url, &[], Body::empty()).await
    }
}
