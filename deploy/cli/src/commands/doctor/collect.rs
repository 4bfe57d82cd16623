//! Collects the facts of a fleet: asks its ports, and looks at this host's own processes and files.
//!
//! A failure to ask is no error. If it proves nothing about the fleet either, it is named in
//! [`Collector::not_asked`].

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::SocketAddr,
    path::Path,
    time::{Duration, SystemTime},
};

use contract::{load, v1};
use http::{HeaderValue, StatusCode, Uri};
use serde_json::Value;
use service::clock;

use super::certificate;
use crate::{
    args::{AGENT_URL, DoctorArgs, TargetArgs},
    connect::{
        agent, is_loopback, normalize_url,
        router::{self, ADMIN_PORT, RawAnswer, RouterClient},
    },
    doctor::facts::{Asked, Facts, Reach, setting},
    error::{Error, chain},
};

const CALL_MAX: Duration = Duration::from_secs(5);
/// These ports are the defaults.
const ROUTER_ADMIN_PORT: u16 = 8081;
const AGENT_ADMIN_PORT: u16 = 31_002;
const NS_PER_DAY: u64 = 86_400_000_000_000;
const CERTIFICATE_SETTINGS: [&str; 6] =
    ["tls.cert", "tls.client_ca", "agents.ca", "agents.cert", "auth.jwt.ca_file", "claims.ca"];

pub(super) struct Collector<'a> {
    target: &'a TargetArgs,
    key: Option<HeaderValue>,
    /// The admin ports of agents that the caller named.
    admins: Vec<AdminPort>,
    /// Says what could not be asked, and how it could be.
    pub(super) not_asked: Vec<String>,
}

#[derive(Debug, Clone)]
struct AdminPort {
    url: String,
    settings: Value,
    date: Option<SystemTime>,
}

impl<'a> Collector<'a> {
    pub(super) fn new(target: &'a TargetArgs) -> Result<Self, Error> {
        let key = router::read_key(target.key_file.as_deref())?;
        Ok(Self { target, key, admins: vec![], not_asked: vec![] })
    }

    pub(super) async fn collect(&mut self, args: &DoctorArgs) -> Result<Facts, Error> {
        let mut facts = Facts::default();
        let urls = [&self.target.router].into_iter().chain(&args.other_router);
        for (number, url) in urls.enumerate() {
            facts.routers.push(self.ask_router(url, args.router_admin.get(number)).await?);
        }
        for url in &args.agent_admin {
            let admin = self.ask_admin(url, "the agent's admin port", "").await?;
            self.admins.extend(admin);
        }
        for url in agent_urls(self.target, args, &facts) {
            facts.agents.push(self.ask_agent(&url).await?);
        }
        facts.descriptors_max = descriptors_max();
        facts.certificate_days = certificate_days(&facts);
        facts.balancer_keep_alive_ms = args.balancer_keep_alive_ms;
        if args.balancer_keep_alive_ms.is_none() {
            let text = "the load balancer's idle limit: give it with --balancer-keep-alive-ms";
            self.not_asked.push(text.to_owned());
        }
        Ok(facts)
    }

    async fn ask_router(&mut self, url: &str, admin: Option<&String>) -> Result<Asked, Error> {
        let client = RouterClient::at(self.target, "--router", url, self.key.clone())?;
        let answer = client.probe("/v1/workers").await;
        let document = client.probe("/openapi.json").await;
        let document = document.map(|answer| answer.json()).unwrap_or_default();
        let version = document["info"]["version"].as_str().map(str::to_owned);
        let reach = match &answer {
            Ok(answer) => router_reach(answer, version.is_some()),
            // A server of gRPC speaks no HTTP/1.
            Err(_) if self.describe(url).await.is_ok() => {
                Reach::OtherPort("an agent's control port")
            }
            Err(why) => Reach::Nothing(why.clone()),
        };
        let admin = admin.cloned().or_else(|| at_port(client.url(), ROUTER_ADMIN_PORT));
        let admin = match (&reach, admin) {
            // The admin port may take a caller whom the data port refuses.
            (Reach::Port | Reach::Refused(_), Some(admin)) => {
                self.ask_admin(&admin, "settings of the router,", "; see --router-admin").await?
            }
            _ => None,
        };
        let answer = answer.ok();
        let workers = answer.as_ref().filter(|answer| answer.status == StatusCode::OK);
        Ok(Asked {
            url: client.url().to_owned(),
            reach,
            clock_ahead_ms: answer.as_ref().and_then(|answer| answer.date).map(ahead_ms),
            settings: admin.map(|admin| admin.settings).unwrap_or_default(),
            version,
            fleet: workers.and_then(|answer| serde_json::from_slice(&answer.body).ok()),
            ..Asked::default()
        })
    }

    async fn ask_agent(&mut self, url: &str) -> Result<Asked, Error> {
        let described = self.describe(url).await;
        let reach = match &described {
            // The description isn't there while the engine is unknown, but the port is.
            Ok(_) | Err(Error::Failed { .. } | Error::Answer { .. }) => Reach::Port,
            Err(Error::Refused { why, .. }) => Reach::Refused(why.clone()),
            Err(error) => {
                let client = RouterClient::at(self.target, "--agent", url, None)?;
                // A server of gRPC answers no HTTP/1.
                match client.probe("/healthz").await {
                    Ok(_) => Reach::OtherPort("a data or admin port"),
                    Err(_) => Reach::Nothing(chain(error)),
                }
            }
        };
        let description = described.ok();
        let agent_id = description.as_ref().map(|it| it.agent_id.as_str());
        let admin = self.admin_of(url, agent_id, reach == Reach::Port).await?;
        let (settings, date) = admin.map(|it| (it.settings, it.date)).unwrap_or_default();
        let engine = match setting(&settings, "engine.url").as_str() {
            // The agent's loopback is this host's only where the agent is here.
            Some(engine) if !is_loopback(engine) || is_loopback(url) => {
                let key = router::read_engine_key()?;
                let answer = self.get("engine.url", engine, "/server_info", key).await?;
                Some(answer.map(|answer| answer.json()))
            }
            _ => None,
        };
        let clock_ahead_ms = date.map(ahead_ms);
        let url = url.to_owned();
        Ok(Asked { url, reach, clock_ahead_ms, settings, description, engine, ..Asked::default() })
    }

    /// The admin port that the caller named for the agent, or the one at the usual place.
    async fn admin_of(
        &mut self,
        url: &str,
        agent_id: Option<&str>,
        is_there: bool,
    ) -> Result<Option<AdminPort>, Error> {
        let own = self.admins.iter().filter(|admin| admin.is_of(url, agent_id));
        // Two agents may have one id by mistake.
        if let Some(admin) = own.min_by_key(|admin| !admin.has_control_port(url)) {
            return Ok(Some(admin.clone()));
        }
        let Some(usual) = at_port(url, AGENT_ADMIN_PORT).filter(|_| is_there) else {
            return Ok(None);
        };
        let admin = self.ask_admin(&usual, "settings of the agent,", "; see --agent-admin").await?;
        Ok(admin.filter(|admin| admin.is_of(url, agent_id)))
    }

    async fn describe(&self, url: &str) -> Result<load::Description, Error> {
        let mut client = agent::connect_to(self.target, url, CALL_MAX).await?;
        let description = client.describe(v1::DescribeRequest {}).await;
        let description = description.map_err(|status| agent::call_error(self.target, &status))?;
        load::Description::try_from(description.into_inner())
            .map_err(|error| Error::Answer { url: url.to_owned(), why: error.to_string() })
    }

    /// If there is no answer, [`Self::not_asked`] gets `what` and `help`.
    async fn ask_admin(
        &mut self,
        url: &str,
        what: &str,
        help: &str,
    ) -> Result<Option<AdminPort>, Error> {
        let flag = "--router-admin and --agent-admin";
        let answer = self.get(flag, url, "/config", self.key.clone()).await?;
        let admin = answer.and_then(|RawAnswer { body, date, .. }| {
            let settings = toml::from_str(&String::from_utf8_lossy(&body));
            let settings = settings.map_err(|_| "no settings answer there".to_owned())?;
            Ok(AdminPort { url: normalize_url(flag, url).unwrap_or_default(), settings, date })
        });
        admin.map(Some).or_else(|why| {
            self.not_asked.push(format!("{what} {url}: {why}{help}"));
            Ok(None)
        })
    }

    /// The inner error says why there is no answer of status 200.
    async fn get(
        &self,
        flag: &str,
        url: &str,
        path: &str,
        key: Option<HeaderValue>,
    ) -> Result<Result<RawAnswer, String>, Error> {
        let answer = RouterClient::at(self.target, flag, url, key)?.probe(path).await;
        Ok(answer.and_then(|answer| match answer.status {
            StatusCode::OK => Ok(answer),
            status => Err(format!("status {status}")),
        }))
    }
}

impl AdminPort {
    fn is_of(&self, control: &str, agent_id: Option<&str>) -> bool {
        let worker_id = self.settings["worker_id"].as_str().filter(|id| !id.is_empty());
        match worker_id.zip(agent_id) {
            Some((worker_id, agent_id)) => worker_id == agent_id,
            // The setting is empty by default. And without its engine, or to a caller whom it
            // refuses, an agent says no id.
            None => {
                at_port(control, AGENT_ADMIN_PORT).as_ref() == Some(&self.url)
                    || self.has_control_port(control)
            }
        }
    }

    /// Judges by the admin port's host and settings.
    fn has_control_port(&self, control: &str) -> bool {
        let addr = setting(&self.settings, "listen.control_addr").as_str();
        let port = addr.and_then(|it| it.parse::<SocketAddr>().ok()).map(|it| it.port());
        let (own, control) = (self.url.parse::<Uri>().ok(), control.parse::<Uri>().ok());
        let is_same = |(own, control): (Uri, Uri)| {
            own.host() == control.host() && port.is_some() && port == control.port_u16()
        };
        own.zip(control).is_some_and(is_same)
    }
}

fn agent_urls(target: &TargetArgs, args: &DoctorArgs, facts: &Facts) -> BTreeSet<String> {
    let mut urls: BTreeSet<&String> = facts.workers().map(|worker| &worker.control).collect();
    let fleets = facts.routers.iter().filter_map(|router| router.fleet.as_ref());
    urls.extend(fleets.flat_map(|fleet| &fleet.unheard).map(|agent| &agent.control));
    urls.extend(&args.other_agent);
    if urls.is_empty() || target.agent != AGENT_URL {
        urls.insert(&target.agent);
    }
    let normalize = |url: &String| normalize_url("--agent", url).unwrap_or_else(|_| url.clone());
    urls.into_iter().map(normalize).collect()
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
fn descriptors_max() -> BTreeMap<String, u64> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| descriptors_max_of(&entry.path())).collect()
}

fn descriptors_max_of(folder: &Path) -> Option<(String, u64)> {
    let pid: u32 = folder.file_name()?.to_str()?.parse().ok()?;
    let name = fs::read_to_string(folder.join("comm")).ok()?;
    let name = Some(name.trim()).filter(|it| ["berth-router", "berth-agent"].contains(it))?;
    let limits = fs::read_to_string(folder.join("limits")).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let most = line.split_whitespace().next()?.parse().unwrap_or(u64::MAX);
    Some((format!("{name} (pid {pid})"), most))
}

fn certificate_days(facts: &Facts) -> BTreeMap<String, i64> {
    let asked = facts.routers.iter().chain(&facts.agents);
    let files = asked.flat_map(|it| {
        CERTIFICATE_SETTINGS.into_iter().filter_map(|name| setting(&it.settings, name).as_str())
    });
    let files: BTreeSet<&str> = files.collect();
    let today = i64::try_from(clock::unix_ns() / NS_PER_DAY).unwrap_or(i64::MAX);
    let with_days =
        |file: &str| Some((file.to_owned(), certificate::last_day(Path::new(file))? - today));
    files.into_iter().filter_map(with_days).collect()
}
