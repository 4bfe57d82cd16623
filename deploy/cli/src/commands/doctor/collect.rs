//! Collects the facts of a fleet: asks its ports, and looks at this host's own processes and files.
//!
//! What can't be asked is no error. Where nothing can be concluded from that, it is named in
//! [`Collected::not_asked`].

use std::{
    collections::BTreeSet,
    fs,
    net::SocketAddr,
    path::Path,
    time::{Duration, SystemTime},
};

use http::{HeaderValue, StatusCode, Uri};
use proto::{load, v1};
use serde_json::Value;
use service::clock;

use super::certificate;
use crate::{
    api::Fleet,
    args::{AGENT_URL, DoctorArgs, TargetArgs},
    connect::{
        agent, is_loopback, normalize_url,
        router::{self, ADMIN_PORT, RawAnswer, RouterClient},
    },
    doctor::facts::{
        AgentFacts, CertificateFacts, Facts, ProcessFacts, Reach, RouterFacts, setting,
    },
    error::{Error, chain},
};

const CALL_MAX: Duration = Duration::from_secs(5);
/// These ports are the defaults.
const ROUTER_ADMIN_PORT: u16 = 8081;
const AGENT_ADMIN_PORT: u16 = 31_002;
const NS_PER_DAY: u64 = 86_400_000_000_000;
const CERTIFICATE_SETTINGS: [&str; 6] =
    ["tls.cert", "tls.client_ca", "agents.ca", "agents.cert", "auth.jwt.ca_file", "claims.ca"];

#[derive(Debug, Default)]
pub(super) struct Collected {
    pub(super) facts: Facts,
    /// Says what could not be asked, and how it could be.
    pub(super) not_asked: Vec<String>,
}

struct AdminPort {
    url: String,
    settings: Value,
    date: Option<SystemTime>,
}

pub(super) async fn collect(target: &TargetArgs, args: &DoctorArgs) -> Result<Collected, Error> {
    let key = router::read_key(target.key_file.as_deref())?;
    let mut collected = Collected::default();
    let urls = [&target.router].into_iter().chain(&args.other_router);
    for (number, url) in urls.enumerate() {
        let admin = args.router_admin.get(number).cloned();
        let facts = ask_router(target, url, admin, key.clone(), &mut collected.not_asked).await?;
        collected.facts.routers.push(facts);
    }
    let mut admins = vec![];
    for url in &args.agent_admin {
        match ask_admin(target, url, key.clone()).await? {
            Ok(admin) => admins.push(admin),
            Err(why) => collected.not_asked.push(format!("the agent's admin port {url}: {why}")),
        }
    }
    for url in agent_urls(target, args, &collected.facts) {
        let facts = ask_agent(target, &url, &admins, key.clone(), &mut collected.not_asked).await?;
        collected.facts.agents.push(facts);
    }
    collected.facts.processes = processes();
    collected.facts.certificates = certificates(&collected.facts);
    collected.facts.balancer_keep_alive_ms = args.balancer_keep_alive_ms;
    if args.balancer_keep_alive_ms.is_none() {
        let text = "the load balancer's idle limit: give it with --balancer-keep-alive-ms";
        collected.not_asked.push(text.to_owned());
    }
    Ok(collected)
}

fn agent_urls(target: &TargetArgs, args: &DoctorArgs, facts: &Facts) -> BTreeSet<String> {
    let mut urls: BTreeSet<String> = facts.workers().map(|worker| worker.control.clone()).collect();
    let fleets = facts.routers.iter().filter_map(|router| router.fleet.as_ref());
    urls.extend(fleets.flat_map(|fleet| &fleet.unheard).map(|agent| agent.control.clone()));
    urls.extend(args.other_agent.iter().cloned());
    if urls.is_empty() || target.agent != AGENT_URL {
        urls.insert(target.agent.clone());
    }
    urls.into_iter().map(|url| normalize_url("--agent", &url).unwrap_or(url)).collect()
}

async fn ask_router(
    target: &TargetArgs,
    url: &str,
    admin: Option<String>,
    key: Option<HeaderValue>,
    not_asked: &mut Vec<String>,
) -> Result<RouterFacts, Error> {
    let client = RouterClient::at(target, "--router", url, key.clone())?;
    let answer = client.probe("/v1/workers").await;
    let date = answer.as_ref().ok().and_then(|answer| answer.date);
    let document = client.probe("/openapi.json").await;
    let document = document.map(|answer| answer.json()).unwrap_or_default();
    let version = document["info"]["version"].as_str().map(str::to_owned);
    let reach = match &answer {
        Ok(answer) => router_reach(answer, version.is_some()),
        Err(why) if agent::connect_to(target, url, CALL_MAX).await.is_ok() => {
            // A server of gRPC speaks no HTTP/1.
            describe(target, url).await.map_or(Reach::Nothing(why.clone()), |_| {
                Reach::OtherPort("an agent's control port")
            })
        }
        Err(why) => Reach::Nothing(why.clone()),
    };
    let fleet = answer.ok().filter(|answer| answer.status == StatusCode::OK);
    let fleet = fleet.and_then(|answer| serde_json::from_slice::<Fleet>(&answer.body).ok());
    let admin = admin.or_else(|| at_port(client.url(), ROUTER_ADMIN_PORT));
    let settings = match (&reach, admin) {
        // The admin port may take a caller whom the data port refuses.
        (Reach::Port | Reach::Refused(_), Some(admin)) => match ask_admin(target, &admin, key)
            .await?
        {
            Ok(admin) => Some(admin.settings),
            Err(why) => {
                let text = format!("settings of the router, {admin}: {why}; see --router-admin");
                not_asked.push(text);
                None
            }
        },
        _ => None,
    };
    let clock_ahead_ms = date.map(ahead_ms);
    Ok(RouterFacts {
        url: client.url().to_owned(),
        reach,
        version,
        clock_ahead_ms,
        fleet,
        settings,
    })
}

/// Judges by the answer to `/v1/workers`.
fn router_reach(answer: &RawAnswer, has_document: bool) -> Reach {
    let message = answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
    match answer.status {
        StatusCode::UNAUTHORIZED if message.contains("routers only") => {
            Reach::OtherPort("an agent's data port")
        }
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Reach::Refused(message),
        _ if has_document => Reach::Port,
        _ if message.contains(ADMIN_PORT) => Reach::OtherPort("an admin port"),
        _ => Reach::OtherPort("another server than berth-router"),
    }
}

async fn describe(target: &TargetArgs, url: &str) -> Result<load::Description, Error> {
    let mut client = agent::connect_to(target, url, CALL_MAX).await?;
    let description = client.describe(v1::DescribeRequest {}).await;
    let description = description.map_err(|status| agent::call_error(target, &status))?;
    load::Description::try_from(description.into_inner())
        .map_err(|error| Error::Answer { url: url.to_owned(), why: error.to_string() })
}

async fn ask_agent(
    target: &TargetArgs,
    url: &str,
    admins: &[AdminPort],
    key: Option<HeaderValue>,
    not_asked: &mut Vec<String>,
) -> Result<AgentFacts, Error> {
    let described = describe(target, url).await;
    let reach = match &described {
        // The description isn't there while the engine is unknown, but the port is.
        Ok(_) | Err(Error::Failed { .. } | Error::Answer { .. }) => Reach::Port,
        Err(Error::Refused { why, .. }) => Reach::Refused(why.clone()),
        Err(error) => {
            let client = RouterClient::at(target, "--agent", url, None)?;
            // A server of gRPC answers no HTTP/1.
            match client.probe("/healthz").await {
                Ok(_) => Reach::OtherPort("a data or admin port"),
                Err(_) => Reach::Nothing(chain(error)),
            }
        }
    };
    let description = described.ok();
    let agent_id = description.as_ref().map(|it| it.agent_id.clone());
    let derived = at_port(url, AGENT_ADMIN_PORT);
    let is_own = |admin: &&AdminPort| {
        let worker_id = admin.settings["worker_id"].as_str().filter(|id| !id.is_empty());
        match (worker_id, agent_id.as_deref()) {
            (Some(worker_id), Some(agent_id)) => worker_id == agent_id,
            // Without its engine, or to a caller whom it refuses, an agent says no id.
            _ => Some(&admin.url) == derived.as_ref() || has_control_port(admin, url),
        }
    };
    // Two agents may have one id by mistake.
    let with_port = admins.iter().filter(is_own).find(|admin| has_control_port(admin, url));
    let own = with_port.or_else(|| admins.iter().find(is_own));
    let asked;
    let admin = match (own, &derived, &reach) {
        (Some(admin), ..) => Some(admin),
        (None, Some(derived), Reach::Port) => match ask_admin(target, derived, key).await? {
            Ok(admin) => {
                asked = admin;
                Some(&asked).filter(is_own)
            }
            Err(why) => {
                not_asked
                    .push(format!("settings of the agent, {derived}: {why}; see --agent-admin"));
                None
            }
        },
        _ => None,
    };
    let settings = admin.map(|admin| admin.settings.clone());
    let functions_off = |it: &load::Description| it.shim_functions_off.clone();
    let engine = match settings.as_ref().and_then(|it| setting(it, "engine.url").as_str()) {
        Some(engine) if is_reachable_from_here(url, engine) => ask_engine(target, engine).await?,
        _ => None,
    };
    Ok(AgentFacts {
        url: url.to_owned(),
        reach,
        agent_id,
        epoch: description.as_ref().map(|it| it.epoch),
        tokenizer: description.as_ref().map(|it| it.model_files.map(|files| files.hash.to_vec())),
        shim_functions_off: description.as_ref().map(functions_off).unwrap_or_default(),
        trims: description.map(|it| it.trim_sglang_versions),
        clock_ahead_ms: admin.and_then(|admin| admin.date).map(ahead_ms),
        settings,
        engine,
    })
}

/// Judges by the admin port's host and settings.
fn has_control_port(admin: &AdminPort, url: &str) -> bool {
    let control = setting(&admin.settings, "listen.control_addr").as_str();
    let port = control.and_then(|it| it.parse::<SocketAddr>().ok()).map(|it| it.port());
    let (url, admin) = (url.parse::<Uri>().ok(), admin.url.parse::<Uri>().ok());
    let (Some(url), Some(admin)) = (url, admin) else { return false };
    port.is_some() && port == url.port_u16() && admin.host() == url.host()
}

/// The inner error says why there are no settings.
async fn ask_admin(
    target: &TargetArgs,
    url: &str,
    key: Option<HeaderValue>,
) -> Result<Result<AdminPort, String>, Error> {
    let client = RouterClient::at(target, "--router-admin and --agent-admin", url, key)?;
    let answer = match client.probe("/config").await {
        Ok(answer) if answer.status == StatusCode::OK => answer,
        Ok(answer) => return Ok(Err(format!("status {}", answer.status))),
        Err(why) => return Ok(Err(why)),
    };
    let text = String::from_utf8_lossy(&answer.body);
    let settings =
        toml::from_str::<Value>(&text).map_err(|_| "no settings answer there".to_owned());
    let url = client.url().to_owned();
    Ok(settings.map(|settings| AdminPort { url, settings, date: answer.date }))
}

/// Whether the agent's own address of its engine means the same engine on this host.
fn is_reachable_from_here(control: &str, engine: &str) -> bool {
    !is_loopback(engine) || is_loopback(control)
}

/// Sends the key that the agent has too.
async fn ask_engine(
    target: &TargetArgs,
    url: &str,
) -> Result<Option<Result<Value, String>>, Error> {
    let client = RouterClient::at(target, "engine.url", url, router::read_engine_key()?)?;
    Ok(Some(match client.probe("/server_info").await {
        Ok(answer) if answer.status == StatusCode::OK => Ok(answer.json()),
        Ok(answer) => Err(format!("status {}", answer.status)),
        Err(why) => Err(why),
    }))
}

fn at_port(url: &str, port: u16) -> Option<String> {
    let uri = url.parse::<Uri>().ok()?;
    Some(format!("http://{}:{port}", uri.host()?))
}

/// How far the clock of `date`, which has whole seconds, is ahead of this host's.
fn ahead_ms(date: SystemTime) -> i64 {
    let since_1970 = date.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let theirs = i64::try_from(since_1970.as_millis()).unwrap_or(i64::MAX);
    let ours = i64::try_from(clock::unix_ns() / 1_000_000).unwrap_or(i64::MAX);
    // The time was rounded down to a second: half of one on average.
    theirs.saturating_add(500).saturating_sub(ours)
}

/// Leaves out what this user may not look at.
fn processes() -> Vec<ProcessFacts> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| process(&entry.path())).collect()
}

fn process(folder: &Path) -> Option<ProcessFacts> {
    let pid = folder.file_name()?.to_str()?.parse().ok()?;
    let name = fs::read_to_string(folder.join("comm")).ok()?.trim().to_owned();
    if !["berth-router", "berth-agent"].contains(&name.as_str()) {
        return None;
    }
    let limits = fs::read_to_string(folder.join("limits")).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let descriptors_max = line.split_whitespace().next()?.parse().unwrap_or(u64::MAX);
    Some(ProcessFacts { name, pid, descriptors_max })
}

fn certificates(facts: &Facts) -> Vec<CertificateFacts> {
    let routers = facts.routers.iter().filter_map(|router| router.settings.as_ref());
    let agents = facts.agents.iter().filter_map(|agent| agent.settings.as_ref());
    let named = routers.chain(agents).flat_map(|settings| {
        CERTIFICATE_SETTINGS.iter().filter_map(|name| setting(settings, name).as_str())
    });
    let paths: BTreeSet<&str> = named.filter(|path| !path.is_empty()).collect();
    let today = i64::try_from(clock::unix_ns() / NS_PER_DAY).unwrap_or(i64::MAX);
    let with_day = |path: &str| Some((path.to_owned(), certificate::last_day(Path::new(path))?));
    let ends = paths.into_iter().filter_map(with_day);
    ends.map(|(path, day)| CertificateFacts { path, days_left: day - today }).collect()
}
