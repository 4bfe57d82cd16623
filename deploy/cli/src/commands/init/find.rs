//! Finds the engines on this host: asks ports of loopback for SGLang's `/server_info`.

use std::collections::BTreeSet;

use http::{HeaderValue, StatusCode, Uri};

use super::look::{self, Listening};
use crate::{
    args::{InitArgs, TargetArgs},
    connect::{
        normalize_url,
        router::{RouterClient, read_engine_key},
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
    /// What answered too and isn't among the engines, for the user.
    pub(super) passed_over: Vec<String>,
}

enum Answered {
    Engine(Box<FoundEngine>),
    Refused,
    Other(String),
    Nothing(String),
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
        match ask(target, &url, key.clone()).await? {
            Answered::Engine(engine) => found.engines.push(*engine),
            Answered::Refused => return Err(refused_error(&url)),
            Answered::Other(why) => return Err(Error::NotAnEngine { url, why }),
            Answered::Nothing(why) => {
                let hint = "start the engine, or give its URL with --engine";
                return Err(Error::Unreachable { who: "engine", url, why, hint });
            }
        }
    }
    let mut ports: Vec<u16> = found.engines.iter().map(|engine| engine.port).collect();
    ports.sort_unstable();
    match ports.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(found),
        Some(pair) => {
            let text = format!("two engines at port {}: agents name their files by it", pair[0]);
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
    let ports = ports_to_ask(&look::sglang_ports(listening), listening);
    let mut refused = None;
    for port in &ports {
        let url = format!("http://127.0.0.1:{port}");
        // Any user of this host may listen at a port, to be sent the key.
        let key = key.clone().filter(|_| listening.is_trusted(*port));
        match ask(target, &url, key).await? {
            Answered::Engine(engine) => found.engines.push(*engine),
            Answered::Refused => {
                found.passed_over.push(format!(
                    "{url} wants a key: set BERTH_ENGINE_API_KEY, and name it with --engine"
                ));
                refused = Some(url);
            }
            Answered::Other(why) => found.passed_over.push(format!("{url} is no engine: {why}")),
            Answered::Nothing(_) => {}
        }
    }
    if !found.engines.is_empty() {
        return Ok(found);
    }
    if let Some(url) = refused {
        return Err(refused_error(&url));
    }
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    let mut asked = vec![format!("the ports {} of 127.0.0.1", ports.join(", "))];
    asked.append(&mut found.passed_over);
    Err(Error::NoEngine { asked: asked.join("; ") })
}

/// Where this host says which ports listen, others aren't asked, but for the first usual one.
fn ports_to_ask(of_processes: &BTreeSet<u16>, listening: &Listening) -> Vec<u16> {
    let usual = USUAL_PORTS.filter(|port| listening.ports().is_none_or(|it| it.contains(port)));
    let mut ports: BTreeSet<u16> = usual.chain(of_processes.iter().copied()).collect();
    ports.insert(USUAL_PORTS.start);
    ports.into_iter().take(PORTS_MAX).collect()
}

/// Asks a URL, first without the key: a server that takes anybody must not learn it.
async fn ask(target: &TargetArgs, url: &str, key: Option<HeaderValue>) -> Result<Answered, Error> {
    match (ask_with(target, url, None).await?, key) {
        (Answered::Refused, Some(key)) => Ok(match ask_with(target, url, Some(key)).await? {
            Answered::Engine(mut engine) => {
                engine.wants_key = true;
                Answered::Engine(engine)
            }
            answered => answered,
        }),
        (answered, _) => Ok(answered),
    }
}

async fn ask_with(
    target: &TargetArgs,
    url: &str,
    key: Option<HeaderValue>,
) -> Result<Answered, Error> {
    let client = RouterClient::at(target, "--engine", url, key)?;
    let port = url.parse::<Uri>().ok().and_then(|uri| uri.port_u16()).unwrap_or(80);
    Ok(match client.probe("/server_info").await {
        Err(why) => Answered::Nothing(why),
        Ok(answer) if answer.status == StatusCode::OK => {
            match FoundEngine::parse(url, port, &answer.json()) {
                Ok(engine) => Answered::Engine(Box::new(engine)),
                Err(why) => Answered::Other(format!("in its /server_info {why}")),
            }
        }
        Ok(answer) => match answer.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Answered::Refused,
            status => Answered::Other(format!("/server_info has status {status}")),
        },
    })
}

fn refused_error(url: &str) -> Error {
    let why = format!(
        "{url} wants a key; set BERTH_ENGINE_API_KEY to its --api-key, and name it with --engine"
    );
    Error::Refused { who: "engine", why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_ports_are_asked_and_those_of_processes_are_among_them() {
        let unknown = Listening::default();
        assert_eq!(ports_to_ask(&BTreeSet::new(), &unknown), USUAL_PORTS.collect::<Vec<_>>());
        let some = Listening::of_ports(&[22, 30_003, 40_000]);
        let of_processes = BTreeSet::from([40_000]);
        assert_eq!(ports_to_ask(&of_processes, &some), [30_000, 30_003, 40_000]);
        let many: BTreeSet<u16> = (40_000..50_000).collect();
        assert_eq!(ports_to_ask(&many, &some).len(), PORTS_MAX);
    }
}
