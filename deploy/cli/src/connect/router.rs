//! A client of a router's HTTP API.

use std::{
    path::Path,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde::de::DeserializeOwned;
use serde_json::Value;
use service::tls::{Protocol, client::Connector};

use super::{connector, normalize_url};
use crate::{
    args::TargetArgs,
    error::{Error, chain},
};

/// The router answers most requests from memory; a demotion takes 5 s at most.
const REQUEST_MAX: Duration = Duration::from_secs(10);
const PROBE_MAX: Duration = Duration::from_secs(3);
/// 1,024 workers with all their figures take 8 MB.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// What an admin port says in its refusal of a route that it doesn't have.
pub const ADMIN_PORT: &str = "the admin port";
const KEY_BYTES_MAX: usize = 64 * 1024;

#[derive(Debug, Clone)]
pub struct RouterClient {
    url: String,
    client: Client<Connector, Full<Bytes>>,
    authorization: Option<HeaderValue>,
}

/// An answer of the router, whatever its status.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    /// Null if the body isn't JSON.
    pub body: Value,
}

/// An answer of a port of which it isn't known what answers.
#[derive(Debug)]
pub struct RawAnswer {
    pub status: StatusCode,
    /// The clock of the answering host, in whole seconds.
    pub date: Option<SystemTime>,
    pub body: Bytes,
}

impl RawAnswer {
    /// Null if the body isn't JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

impl RouterClient {
    /// Takes the key of the arguments or the environment. Doesn't connect yet.
    pub fn new(args: &TargetArgs) -> Result<Self, Error> {
        let authorization = read_key(args.key_file.as_deref())?;
        Self::at(args, "--router", &args.router, authorization)
    }

    /// A client of any port. `flag` is the argument that gave `url`.
    pub fn at(
        args: &TargetArgs,
        flag: &str,
        url: &str,
        authorization: Option<HeaderValue>,
    ) -> Result<Self, Error> {
        let url = normalize_url(flag, url)?;
        let connector = connector(args, &url, Protocol::Http1)?;
        Ok(Self {
            url,
            client: Client::builder(TokioExecutor::new()).build(connector),
            authorization,
        })
    }

    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    pub async fn get(&self, path: &str) -> Result<Value, Error> {
        let answer = self.send(Method::GET, path).await?;
        self.accept(path, answer).await
    }

    pub async fn get_as<T: DeserializeOwned>(&self, path: &str) -> Result<(T, Value), Error> {
        let value = self.get(path).await?;
        let typed = T::deserialize(&value);
        let typed = typed.map_err(|error| self.answer_error(path, error.to_string()))?;
        Ok((typed, value))
    }

    pub async fn send(&self, method: Method, path: &str) -> Result<Answer, Error> {
        let unreachable_error = |why: String| Error::Unreachable {
            who: "router",
            url: self.url.clone(),
            why,
            hint: "give its data port with --router",
        };
        let answer = tokio::time::timeout(REQUEST_MAX, self.exchange(method, path)).await;
        let answer = answer.map_err(|_| {
            unreachable_error(format!("no answer within {} s", REQUEST_MAX.as_secs()))
        })?;
        answer.map_err(unreachable_error)
    }

    async fn exchange(&self, method: Method, path: &str) -> Result<Answer, String> {
        let RawAnswer { status, body, .. } = self.exchange_raw(method, path).await?;
        Ok(Answer { status, body: serde_json::from_slice(&body).unwrap_or_default() })
    }

    /// Anything may be behind the port. The error is what the connection failed with.
    pub async fn probe(&self, path: &str) -> Result<RawAnswer, String> {
        let answer = tokio::time::timeout(PROBE_MAX, self.exchange_raw(Method::GET, path)).await;
        answer.map_err(|_| format!("no answer within {} s", PROBE_MAX.as_secs()))?
    }

    async fn exchange_raw(&self, method: Method, path: &str) -> Result<RawAnswer, String> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        let request = request.body(Full::default()).map_err(|error| error.to_string())?;
        let answer = self.client.request(request).await.map_err(|error| chain(&error))?;
        let status = answer.status();
        let date = answer.headers().get(header::DATE);
        let date = date.and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| error.to_string())?.to_bytes();
        Ok(RawAnswer { status, date, body })
    }

    pub async fn accept(&self, path: &str, answer: Answer) -> Result<Value, Error> {
        let Answer { status, body } = answer;
        if status.is_success() {
            return Ok(body);
        }
        let text = |key: &str| body["error"][key].as_str().unwrap_or_default().to_owned();
        let (why, who) = (text("message"), "router");
        let why = if why.is_empty() { format!("status {status}") } else { why };
        match (status, text("code").as_str()) {
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => {
                Err(Error::Refused { who, why })
            }
            (_, "route_unknown") if why.contains(ADMIN_PORT) => {
                Err(Error::AdminPort { url: self.url.clone() })
            }
            (_, "route_unknown" | "method_not_allowed") => Err(self.route_absent_error(path).await),
            (StatusCode::NOT_FOUND, "") => Err(self.route_absent_error(path).await),
            _ => Err(Error::Failed { who, why }),
        }
    }

    pub async fn version(&self) -> Result<Option<String>, Error> {
        let document = self.send(Method::GET, "/openapi.json").await?;
        Ok(document.body["info"]["version"].as_str().map(str::to_owned))
    }

    async fn route_absent_error(&self, path: &str) -> Error {
        let version = match self.version().await {
            Ok(version) => version.unwrap_or_else(|| "unknown".to_owned()),
            Err(error) => return error,
        };
        let route = path.split('?').next().unwrap_or(path).to_owned();
        Error::RouteAbsent { url: self.url.clone(), version, route, own: env!("CARGO_PKG_VERSION") }
    }

    #[must_use]
    pub fn answer_error(&self, path: &str, why: String) -> Error {
        Error::Answer { url: format!("{}{path}", self.url), why }
    }
}

#[must_use]
pub fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// The key is that of the file, or of `BERTH_KEY` if no file is named.
pub fn read_key(key_file: Option<&Path>) -> Result<Option<HeaderValue>, Error> {
    let (key, path) = match key_file {
        Some(path) => {
            let to_error = |why: String| Error::KeyFile { path: path.display().to_string(), why };
            let key = std::fs::read_to_string(path).map_err(|error| to_error(error.to_string()))?;
            (key, path.display().to_string())
        }
        None => (std::env::var("BERTH_KEY").unwrap_or_default(), "BERTH_KEY".to_owned()),
    };
    if key.trim().is_empty() && key_file.is_some() {
        // An empty file is a mistake; an unset variable is not.
        return Err(Error::KeyFile { path, why: "the file is empty".to_owned() });
    }
    to_header(&key, &path)
}

pub fn read_engine_key() -> Result<Option<HeaderValue>, Error> {
    let name = "BERTH_ENGINE_API_KEY";
    to_header(&std::env::var(name).unwrap_or_default(), name)
}

/// `None` if there is no key.
fn to_header(key: &str, path: &str) -> Result<Option<HeaderValue>, Error> {
    let key = key.trim();
    let key_error = |why: &str| Error::KeyFile { path: path.to_owned(), why: why.to_owned() };
    if key.is_empty() {
        return Ok(None);
    }
    if key.len() > KEY_BYTES_MAX {
        return Err(key_error("the key is too long"));
    }
    let mut value = HeaderValue::try_from(format!("Bearer {key}"))
        .map_err(|_| key_error("the key must be one line of printable characters"))?;
    value.set_sensitive(true);
    Ok(Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_one_part_of_a_path() {
        assert_eq!(encode("a/b?c=d e\u{fc}%"), "a%2Fb%3Fc%3Dd%20e%C3%BC%25");
        assert_eq!(encode("A-z_0.9~"), "A-z_0.9~");
    }

    #[test]
    fn a_key_is_one_line_and_never_shown() {
        let folder = std::env::temp_dir().join(format!("berth-key-{}", std::process::id()));
        std::fs::write(&folder, "sk-1\n").unwrap();
        let key = read_key(Some(&folder)).unwrap().unwrap();
        assert_eq!(key, "Bearer sk-1");
        assert!(!format!("{key:?}").contains("sk-1"));
        for wrong in ["", "\n", "two\nlines"] {
            std::fs::write(&folder, wrong).unwrap();
            let error = read_key(Some(&folder)).unwrap_err();
            assert_eq!(error.exit_status(), 66, "{wrong:?}");
            assert!(!error.to_string().contains("lines"), "{error}");
        }
        std::fs::remove_file(&folder).unwrap();
        assert_eq!(read_key(Some(&folder)).unwrap_err().exit_status(), 66);
    }
}
