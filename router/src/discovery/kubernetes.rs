//! Lists the agents that the endpoint slices of a Kubernetes cluster name.
//!
//! If the watch ends, it goes on from the last version that it saw; if the API server has forgotten
//! that (410), it lists again. While no list is complete, the last one stays.

use std::{collections::BTreeMap, net::IpAddr, path::Path, pin::pin, time::Duration};

use http::StatusCode;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::{
    Api, Client, Config, ResourceExt as _,
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{
        WatchStreamExt as _,
        utils::Backoff,
        watcher::{self, Event},
    },
};
use service::log::describe_error;
use tokio_stream::StreamExt as _;

use super::{Reporter, dns::control_url};
use crate::{
    config::discovery::KubernetesTable,
    fleet::membership::{Listing, SourceList},
};

/// The API server's restart takes some seconds.
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Pauses {
    next: Duration,
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = self.next;
        self.next = (pause * 2).min(PAUSE_MAX);
        // Many routers should not ask at the same moment.
        Some(pause.mul_f32(0.5 + fastrand::f32() / 2.0))
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.next = PAUSE_MIN;
    }
}

pub(super) async fn run(settings: KubernetesTable, mut reporter: Reporter) {
    loop {
        match connect(&settings).await {
            Ok(api) => follow(api, &settings, &mut reporter).await,
            Err(why) => reporter.fail(why).await,
        }
        tokio::time::sleep(PAUSE_MAX).await;
    }
}

async fn connect(settings: &KubernetesTable) -> Result<Api<EndpointSlice>, String> {
    let describe = |error: &dyn std::error::Error| describe_error(error);
    let config = if settings.kubeconfig.as_os_str().is_empty() {
        Config::incluster().map_err(|error| describe(&error))?
    } else {
        read_kubeconfig(&settings.kubeconfig).await?
    };
    let namespace = match settings.namespace.as_str() {
        "" => config.default_namespace.clone(),
        namespace => namespace.to_owned(),
    };
    let client = Client::try_from(config).map_err(|error| describe(&error))?;
    Ok(Api::namespaced(client, &namespace))
}

async fn read_kubeconfig(path: &Path) -> Result<Config, String> {
    let file = Kubeconfig::read_from(path).map_err(|error| describe_error(&error))?;
    let options = KubeConfigOptions::default();
    Config::from_custom_kubeconfig(file, &options).await.map_err(|error| describe_error(&error))
}

/// The watch has no end, unless the task is dropped.
async fn follow(api: Api<EndpointSlice>, settings: &KubernetesTable, reporter: &mut Reporter) {
    let watch = watcher::watcher(api, watcher::Config::default().labels(&settings.selector));
    let mut watch = pin!(watch.backoff(Pauses { next: PAUSE_MIN }));
    let (mut slices, mut new_slices) = (BTreeMap::new(), BTreeMap::new());
    while let Some(event) = watch.next().await {
        match event {
            Ok(Event::Init) => {
                new_slices.clear();
                continue;
            }
            Ok(Event::InitApply(slice)) => {
                new_slices.insert(slice.name_any(), agents_of(&slice, settings));
                continue;
            }
            Ok(Event::InitDone) => slices = std::mem::take(&mut new_slices),
            Ok(Event::Apply(slice)) => {
                slices.insert(slice.name_any(), agents_of(&slice, settings));
            }
            Ok(Event::Delete(slice)) => {
                slices.remove(&slice.name_any());
            }
            Err(error) => {
                if is_expired(&error) {
                    reporter.count_expiry();
                }
                reporter.fail(describe_error(&error)).await;
                continue;
            }
        }
        reporter.list(merge(&slices)).await;
    }
}

/// Whether the API server has forgotten the version from which the watch would go on.
fn is_expired(error: &watcher::Error) -> bool {
    let status = match error {
        watcher::Error::WatchError(status) => status,
        watcher::Error::WatchStartFailed(kube::Error::Api(status)) => status,
        _ => return false,
    };
    status.code == StatusCode::GONE.as_u16()
}

/// While an endpoint moves between slices, it may be in two.
fn merge(slices: &BTreeMap<String, Vec<(String, Listing)>>) -> SourceList {
    let mut list = SourceList::new();
    for (url, listing) in slices.values().flatten() {
        let known = list.entry(url.clone()).or_insert(*listing);
        *known = (*known).max(*listing);
    }
    list
}

fn agents_of(slice: &EndpointSlice, settings: &KubernetesTable) -> Vec<(String, Listing)> {
    let ports = slice.ports.iter().flatten();
    let mut named =
        ports.filter(|port| port.name.as_deref().unwrap_or_default() == settings.port_name);
    let port = named.next().and_then(|port| u16::try_from(port.port?).ok());
    let Some(port) = port else { return vec![] };
    let scheme = if settings.tls { "https" } else { "http" };
    let agent = |endpoint: &Endpoint| {
        // All addresses of an endpoint are of one pod, so the first is enough. Names instead of
        // addresses are not resolved.
        let ip: IpAddr = endpoint.addresses.first()?.parse().ok()?;
        Some((control_url(scheme, ip, port), listing_of(endpoint)?))
    };
    slice.endpoints.iter().filter_map(agent).collect()
}

/// `None`: the endpoint is no member. A pod that terminates drains. A pod that isn't ready joins
/// only if it serves nevertheless. An absent condition means the usual state.
fn listing_of(endpoint: &Endpoint) -> Option<Listing> {
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let is_ready = conditions.ready.unwrap_or(true);
    let is_serving = conditions.serving.unwrap_or(is_ready);
    if conditions.terminating.unwrap_or(false) {
        return Some(Listing::Terminating);
    }
    (is_ready || is_serving).then_some(Listing::Serving)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn agents(conditions: &Value) -> Vec<(String, Listing)> {
        let slice: EndpointSlice = serde_json::from_value(json!({
            "metadata": { "name": "s" },
            "addressType": "IPv4",
            "endpoints": [{ "addresses": ["10.0.0.1"], "conditions": conditions }],
            "ports": [{ "name": "data", "port": 1 }, { "name": "control", "port": 2 }],
        }))
        .unwrap();
        agents_of(&slice, &KubernetesTable::default())
    }

    #[test]
    fn the_conditions_say_who_is_a_member_and_who_drains() {
        let serving = vec![("http://10.0.0.1:2".to_owned(), Listing::Serving)];
        let terminating = vec![("http://10.0.0.1:2".to_owned(), Listing::Terminating)];
        assert_eq!(agents(&json!({})), serving);
        assert_eq!(agents(&json!({ "ready": true, "serving": true })), serving);
        assert_eq!(agents(&json!({ "ready": false })), []);
        assert_eq!(agents(&json!({ "ready": false, "serving": false })), []);
        assert_eq!(agents(&json!({ "ready": false, "serving": true })), serving);
        let ends = json!({ "ready": false, "serving": true, "terminating": true });
        assert_eq!(agents(&ends), terminating);
        let ends = json!({ "ready": false, "serving": false, "terminating": true });
        assert_eq!(agents(&ends), terminating);
    }

    #[test]
    fn an_endpoint_in_two_slices_serves_if_one_says_so() {
        let url = || "http://10.0.0.1:2".to_owned();
        let slices = BTreeMap::from([
            ("a".to_owned(), vec![(url(), Listing::Serving)]),
            ("b".to_owned(), vec![(url(), Listing::Terminating)]),
        ]);
        assert_eq!(merge(&slices), SourceList::from([(url(), Listing::Serving)]));
    }

    #[test]
    fn a_slice_without_the_port_has_no_agents_and_an_ipv6_address_is_bracketed() {
        let settings = KubernetesTable { tls: true, ..KubernetesTable::default() };
        let slice = |port: &str| -> EndpointSlice {
            serde_json::from_value(json!({
                "metadata": { "name": "s" },
                "addressType": "IPv6",
                "endpoints": [{ "addresses": ["fd00::1"] }, { "addresses": ["a.example"] }],
                "ports": [{ "name": port, "port": 2 }],
            }))
            .unwrap()
        };
        let expected = [("https://[fd00::1]:2".to_owned(), Listing::Serving)];
        assert_eq!(agents_of(&slice("control"), &settings), expected);
        assert_eq!(agents_of(&slice("other"), &settings), []);
    }
}
