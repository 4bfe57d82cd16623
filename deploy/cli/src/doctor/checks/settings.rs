//! Checks of the settings of routers and agents, and of what their hosts give them. Pure.

use std::{collections::BTreeSet, net::SocketAddr};

use serde_json::Value;

use super::super::{
    Check, Place, Severity,
    facts::{Facts, setting},
};

/// Suffices for few hundred turns. The units set far more.
const DESCRIPTORS_MIN: u64 = 8_192;
/// With fewer days left, a certificate should have been replaced.
const CERTIFICATE_DAYS_MIN: i64 = 14;

pub const CHECKS: &[Check] = &[
    Check {
        id: "open-without-key",
        severity: Severity::Fault,
        why: "everybody who reaches the port uses the engines",
        find: find_open_ports,
    },
    Check {
        id: "keep-alive-short",
        severity: Severity::Fault,
        why: "the balancer sends turns on connections that the router closes: 502 now and then",
        find: find_short_keep_alive,
    },
    Check {
        id: "routers-without-claims",
        severity: Severity::Fault,
        why: "two routers begin the same new session on two workers",
        find: find_missing_claims,
    },
    Check {
        id: "claims-differ",
        severity: Severity::Fault,
        why: "routers that ask other stores don't agree on a new session's worker",
        find: find_other_claims,
    },
    Check {
        id: "timeouts-contradict",
        severity: Severity::Warning,
        why: "the shorter limit always wins, and its refusal misleads",
        find: find_contradictions,
    },
    Check {
        id: "workers-differ",
        severity: Severity::Warning,
        why: "routers that know other workers place the same session differently",
        find: find_other_workers,
    },
    Check {
        id: "descriptors-few",
        severity: Severity::Warning,
        why: "fewer turns run at once than the settings allow",
        find: find_few_descriptors,
    },
    Check {
        id: "certificate-expiring",
        severity: Severity::Fault,
        why: "after that, nobody connects",
        find: find_expiring_certificates,
    },
];

fn routers(facts: &Facts) -> impl Iterator<Item = (&String, &Value)> {
    facts.routers.iter().filter_map(|router| Some((&router.url, router.settings.as_ref()?)))
}

fn agents(facts: &Facts) -> impl Iterator<Item = (&String, &Value)> {
    facts.agents.iter().filter_map(|agent| Some((&agent.url, agent.settings.as_ref()?)))
}

fn number(settings: &Value, name: &str) -> Option<u64> {
    setting(settings, name).as_u64()
}

fn is_set(settings: &Value, name: &str) -> bool {
    setting(settings, name).as_str().is_some_and(|text| !text.is_empty())
}

fn find_open_ports(facts: &Facts) -> Vec<Place> {
    routers(facts)
        .filter_map(|(url, settings)| {
            let addr = setting(settings, "listen.data_addr").as_str()?;
            let is_open =
                addr.parse::<SocketAddr>().is_ok_and(|it| !it.ip().to_canonical().is_loopback());
            let has_keys = is_set(settings, "auth.keys_file") || is_set(settings, "auth.jwt.jwks");
            let what = format!("listen.data_addr is {addr}, and no key is needed");
            let fix = "router.toml: auth.keys_file = \"/etc/berth/keys.toml\", without auth.mode";
            (is_open && !has_keys).then(|| Place::new(url, what, fix))
        })
        .collect()
}

fn find_short_keep_alive(facts: &Facts) -> Vec<Place> {
    let Some(balancer_ms) = facts.balancer_keep_alive_ms else { return vec![] };
    routers(facts)
        .filter_map(|(url, settings)| {
            let own_ms = number(settings, "connections.keep_alive_ms")?;
            let what = format!(
                "connections.keep_alive_ms is {own_ms}, the balancer's limit {balancer_ms}"
            );
            let fix = format!("router.toml: connections.keep_alive_ms = {}", balancer_ms + 15_000);
            (own_ms <= balancer_ms).then(|| Place::new(url, what, fix))
        })
        .collect()
}

fn find_missing_claims(facts: &Facts) -> Vec<Place> {
    if facts.routers.len() < 2 {
        return vec![];
    }
    let alone = routers(facts)
        .filter(|(_, settings)| setting(settings, "claims.store").as_str() == Some("memory"));
    alone
        .map(|(url, _)| {
            let what = "claims.store is \"memory\", which is for a single router";
            Place::new(url, what, "router.toml: claims.store = \"agents\", in every router")
        })
        .collect()
}

fn find_other_claims(facts: &Facts) -> Vec<Place> {
    find_other_setting(facts, "claims.store", |a, b| a == b)
}

fn find_other_workers(facts: &Facts) -> Vec<Place> {
    // A router makes no difference between two orders of the list, and a slash at the end.
    let urls = |value: &Value| -> BTreeSet<String> {
        let urls = value.as_array().into_iter().flatten().filter_map(Value::as_str);
        urls.map(|url| url.trim_end_matches('/').to_owned()).collect()
    };
    find_other_setting(facts, "workers", |a, b| urls(a) == urls(b))
}

/// Compares each router with the first.
fn find_other_setting(
    facts: &Facts,
    name: &str,
    is_same: impl Fn(&Value, &Value) -> bool,
) -> Vec<Place> {
    let mut all = routers(facts);
    let Some((first_url, first)) = all.next() else { return vec![] };
    let wanted = setting(first, name);
    all.filter(|(_, settings)| !is_same(setting(settings, name), wanted))
        .map(|(url, settings)| {
            let own = setting(settings, name);
            let what = format!("{name} is {own}, at {first_url} it is {wanted}");
            Place::new(url, what, format!("router.toml: {name}, the same in every router"))
        })
        .collect()
}

fn find_contradictions(facts: &Facts) -> Vec<Place> {
    let mut places = vec![];
    for (agent_url, agent) in agents(facts) {
        let turn_ms = number(agent, "limits.turn_ms_max");
        let wait_ms = number(agent, "limits.queue_wait_ms_max");
        if let Some((wait_ms, turn_ms)) = wait_ms.zip(turn_ms).filter(|(wait, turn)| wait >= turn) {
            let what =
                format!("limits.queue_wait_ms_max ({wait_ms}) isn't below turn_ms_max ({turn_ms})");
            places.push(Place::new(
                agent_url,
                what,
                "agent.toml: a smaller limits.queue_wait_ms_max",
            ));
        }
        for (router_url, router) in routers(facts) {
            let router_turn_ms = number(router, "timeouts.turn_ms_max");
            if let Some((ours, theirs)) = turn_ms.zip(router_turn_ms).filter(|(a, r)| a < r) {
                let what = format!(
                    "limits.turn_ms_max is {ours}, the router's timeouts.turn_ms_max {theirs}"
                );
                let fix = format!("agent.toml: limits.turn_ms_max = {theirs} or more");
                places.push(Place::new(agent_url, what, fix));
            }
            let interval_ms = number(agent, "reports.interval_ms");
            let age_ms = number(router, "timeouts.load_report_age_ms_max");
            if let Some((interval, age)) = interval_ms.zip(age_ms).filter(|(i, a)| i * 2 > *a) {
                let what = format!(
                    "load reports come each {interval} ms, and {router_url} takes the agent for \
                     stale after {age}"
                );
                let fix = format!("agent.toml: reports.interval_ms = {} or less", age / 6);
                places.push(Place::new(agent_url, what, fix));
            }
        }
    }
    places
}

fn find_few_descriptors(facts: &Facts) -> Vec<Place> {
    let few = facts.processes.iter().filter(|process| process.descriptors_max < DESCRIPTORS_MIN);
    few.map(|process| {
        let what = format!("it may have {} file descriptors", process.descriptors_max);
        let about = format!("{} (pid {})", process.name, process.pid);
        Place::new(about, what, "its unit: LimitNOFILE=65536; a shell: ulimit -Hn 65536")
    })
    .collect()
}

fn find_expiring_certificates(facts: &Facts) -> Vec<Place> {
    let old = facts.certificates.iter().filter(|it| it.days_left < CERTIFICATE_DAYS_MIN);
    old.map(|certificate| {
        let what = match certificate.days_left {
            days if days < 0 => format!("it expired {} days ago", -days),
            days => format!("it expires in {days} days"),
        };
        let fix = "replace the file; a changed certificate is in force within two seconds";
        Place::new(&certificate.path, what, fix)
    })
    .collect()
}
