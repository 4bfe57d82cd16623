//! Finds the engines on this host: asks ports of loopback for SGLang's `/server_info`.

use std::collections::BTreeSet;

use http::{HeaderValue, StatusCode, Uri};

use super::look::{self, Listening};
use crate::{
    args::{InitArgs, TargetArgs},
    connect::{
        normalize_url,
        router::{RawAnswer, RouterClient, read_engine_key},
    },
    error::Error,
    init::{ENGINES_MAX, engine::FoundEngine},
};

/// SGLang's default, and what a host with a process for each GPU usually takes.
const USUAL_PORTS: std::ops::Range<u16> = 30_000..30_008;
/// Each port takes 3 s at most.
const PORTS_MAX: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) engines: Vec<FoundEngine>,
    /// For the user: what answered, and is no engine to serve.
    pub(super) passed_over: Vec<String>,
}

pub(super) async fn find(
    target: &TargetArgs,
    args: &InitArgs,
    listening: &Listening,
) -> Result<Found, Error> {
    let key = read_engine_key()?;
    let found = match args.engine.is_empty() {
        true => search(target, listening, key).await?,
        false => ask_named(target, &args.engine, key).await?,
    };
    if found.engines.len() > ENGINES_MAX {
        let text = format!("there are more than {ENGINES_MAX} engines: name some with --engine");
        return Err(Error::Usage(text));
    }
    Ok(found)
}

async fn ask_named(
    target: &TargetArgs,
    urls: &[String],
    key: Option<HeaderValue>,
) -> Result<Found, Error> {
    let mut found = Found::default();
    let normalized = urls.iter().map(|url| normalize_url("--engine", url));
    for url in normalized.collect::<Result<BTreeSet<String>, Error>>()? {
        if !url.starts_with("http://") {
            let text = format!("--engine must be an http:// URL, as agents take them, not {url}");
            return Err(Error::Usage(text));
        }
        found.engines.push(ask(target, url, key.clone()).await?);
    }
    let mut ports = BTreeSet::new();
    match found.engines.iter().find(|engine| !ports.insert(engine.port)) {
        None => Ok(found),
        Some(FoundEngine { port, .. }) => {
            let text = format!("two engines at port {port}: agents name their files by it");
            Err(Error::Usage(text))
        }
    }
}

async fn search(
    target: &TargetArgs,
    listening: &Listening,
    key: Option<HeaderValue>,
) -> Result<Found, Error> {
    let mut found = Found::default();
    let ports = ports_to_ask(&look::sglang_ports(listening), listening.ports().as_ref());
    let mut refused = None;
    for port in &ports {
        let url = format!("http://127.0.0.1:{port}");
        // Another user of this host could listen at a port to learn the key.
        let key = key.clone().filter(|_| listening.is_trusted(*port));
        match ask(target, url.clone(), key).await {
            Ok(engine) => found.engines.push(engine),
            Err(Error::Unreachable { .. }) => {}
            Err(Error::NotAnEngine { why, .. }) => {
                found.passed_over.push(format!("{url} is no engine: {why}"));
            }
            Err(error @ Error::Refused { .. }) => {
                found.passed_over.push(format!(
                    "{url} wants a key: set BERTH_ENGINE_API_KEY, and name it with --engine"
                ));
                refused = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    if !found.engines.is_empty() {
        return Ok(found);
    }
    if let Some(error) = refused {
        return Err(error);
    }
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    let mut asked = vec![format!("the ports {} of 127.0.0.1", ports.join(", "))];
    asked.append(&mut found.passed_over);
    Err(Error::NoEngine { asked: asked.join("; ") })
}

/// The ports of SGLang's processes, and the usual ones: if it is known which ports listen, only
/// those of them, and the first.
fn ports_to_ask(of_processes: &BTreeSet<u16>, listening: Option<&BTreeSet<u16>>) -> Vec<u16> {
    let usual = USUAL_PORTS.filter(|port| listening.is_none_or(|it| it.contains(port)));
    let mut ports: BTreeSet<u16> = usual.chain(of_processes.iter().copied()).collect();
    ports.insert(USUAL_PORTS.start);
    ports.into_iter().take(PORTS_MAX).collect()
}

/// Asks the engine at a URL on this host, with the key in the environment if it wants one.
///
/// # Errors
/// Nothing answers there, or what answers is no engine.
pub async fn ask_engine(target: &TargetArgs, url: &str) -> Result<FoundEngine, Error> {
    ask(target, url.to_owned(), read_engine_key()?).await
}

/// Asks a URL, first without the key: a server that takes anybody must not learn it.
async fn ask(
    target: &TargetArgs,
    url: String,
    key: Option<HeaderValue>,
) -> Result<FoundEngine, Error> {
    let is_refused = |answer: &RawAnswer| {
        [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN].contains(&answer.status)
    };
    let client = |key| RouterClient::at(target, "--engine", &url, key);
    let mut answer = client(None)?.probe("/server_info").await;
    let wants_key = answer.as_ref().is_ok_and(is_refused) && key.is_some();
    if wants_key {
        answer = client(key)?.probe("/server_info").await;
    }
    let port = url.parse::<Uri>().ok().and_then(|uri| uri.port_u16()).unwrap_or(80);
    let why = match answer {
        Ok(answer) if answer.status == StatusCode::OK => {
            match FoundEngine::parse(&url, port, &answer.json()) {
                Ok(engine) => {
                    return Ok(FoundEngine { wants_key: wants_key || engine.wants_key, ..engine });
                }
                Err(why) => format!("in its /server_info {why}"),
            }
        }
        Ok(answer) if is_refused(&answer) => {
            let why = format!(
                "{url} wants a key; set BERTH_ENGINE_API_KEY to its --api-key, and name it with \
                 --engine"
            );
            return Err(Error::Refused { who: "engine", why });
        }
        Ok(answer) => format!("/server_info has status {}", answer.status),
        Err(why) => {
            let hint = "start the engine, or give its URL with --engine";
            return Err(Error::Unreachable { who: "engine", url, why, hint });
        }
    };
    Err(Error::NotAnEngine { url, why })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_ports_are_asked_and_those_of_processes_are_among_them() {
        assert_eq!(ports_to_ask(&BTreeSet::new(), None), USUAL_PORTS.collect::<Vec<_>>());
        let some = BTreeSet::from([22, 30_003, 40_000]);
        let of_processes = BTreeSet::from([40_000]);
        assert_eq!(ports_to_ask(&of_processes, Some(&some)), [30_000, 30_003, 40_000]);
        let many: BTreeSet<u16> = (40_000..50_000).collect();
        assert_eq!(ports_to_ask(&many, Some(&some)).len(), PORTS_MAX);
    }
}
