//! Sends control calls and aborts to the engine, and reads whether it runs and with which weights.

use std::time::Duration;

use bytes::Bytes;
use contract::turn_rid::RESPONSE_PREFIX;
use http::{HeaderValue, Method, Request, StatusCode, header, uri::PathAndQuery};
use http_body_util::{BodyExt as _, Full, Limited};
use serde_json::Value;

use super::{ANSWER_BYTES_MAX, EngineClient, Error, connection_error};
use crate::engine::control::{ControlAnswer, WeightsLabel};

#[derive(Debug, Clone)]
pub struct ControlCall {
    pub method: Method,
    pub path_and_query: Option<PathAndQuery>,
    pub content_type: HeaderValue,
    /// The value of `Authorization`.
    pub credential: Option<HeaderValue>,
    pub body: Bytes,
}

impl EngineClient {
    /// Fails if no complete answer comes within `limit`; any status is an answer.
    pub async fn control(
        &self,
        call: ControlCall,
        limit: Duration,
    ) -> Result<ControlAnswer, Error> {
        let path = "a control call";
        let mut request = Request::new(Full::new(call.body));
        *request.method_mut() = call.method;
        *request.uri_mut() = self.uri(call.path_and_query.as_ref());
        request.headers_mut().insert(header::CONTENT_TYPE, call.content_type);
        if let Some(credential) = call.credential {
            request.headers_mut().insert(header::AUTHORIZATION, credential);
        }
        let answer = async {
            let sent = self.control_client.request(request).await;
            let (head, body) = sent.map_err(connection_error)?.into_parts();
            let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
            let body = body.map_err(Error::Broken)?;
            Ok(ControlAnswer {
                status: head.status,
                content_type: head.headers.get(header::CONTENT_TYPE).cloned(),
                body: body.to_bytes(),
            })
        };
        tokio::time::timeout(limit, answer).await.map_err(|_| Error::Timeout(path, limit))?
    }

    pub async fn read_weights(&self) -> Result<WeightsLabel, Error> {
        let path = "/model_info";
        let body = self.call(Method::GET, path, None).await?;
        let value: Value = serde_json::from_slice(&body)
            .map_err(|error| Error::Answer { path, detail: error.to_string() })?;
        let text = |key| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        Ok(WeightsLabel { version: text("weight_version"), model_path: text("model_path") })
    }

    /// The turn's own answer shows when it has ended.
    pub async fn abort(&self, rid: &str) -> Result<(), Error> {
        let body = serde_json::json!({ "rid": rid, "abort_all": false });
        let mut request = self.build_request(Method::POST, "/abort_request", Some(&body));
        if let Some(key) = &self.admin_key {
            request.headers_mut().insert(header::AUTHORIZATION, key.clone());
        }
        let sent = self.send_with_limit(&self.control_client, "/abort_request", request);
        sent.await.map(drop)
    }

    /// Where the turn's route isn't known: in the engine, turns of the Responses API have a prefix,
    /// so both ids are aborted.
    pub async fn abort_turn(&self, rid: &str) -> Result<(), Error> {
        self.abort(rid).await?;
        self.abort(&format!("{RESPONSE_PREFIX}{rid}")).await
    }

    /// The engine is ready if it is healthy and not paused.
    pub async fn is_ready(&self) -> Result<bool, Error> {
        match self.call(Method::GET, "/ready", None).await {
            Ok(_) => Ok(true),
            Err(Error::Status { status: StatusCode::SERVICE_UNAVAILABLE, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
