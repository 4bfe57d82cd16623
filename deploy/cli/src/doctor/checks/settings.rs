//! Checks of the settings of routers and agents, and of what their hosts give them. Pure.

use std::{collections::BTreeSet, net::SocketAddr};

use serde_json::Value;

use super::super::{
    Check,
    Find::{Fleet, Routers},
    Found,
    facts::{Facts, setting},
    fault, warning,
};

/// Suffices for few hundred turns. The units set far more.
const DESCRIPTORS_MIN: u64 = 8_192;
/// With fewer days left, a certificate should have been replaced.
const CERTIFICATE_DAYS_MIN: i64 = 14;

pub const CHECKS: &[Check] = &[
    fault(
        "open-without-key",
        "everybody who reaches the port uses the engines",
        Routers(
            "router.toml: auth.keys_file = \"/etc/berth/keys.toml\", without auth.mode",
            |router| {
                let addr = setting(&router.settings, "listen.data_addr").as_str()?;
                let is_open = !addr.parse::<SocketAddr>().ok()?.ip().to_canonical().is_loopback();
                let has_keys = router.is_set("auth.keys_file") || router.is_set("auth.jwt.jwks");
                let what = || format!("listen.data_addr is {addr}, and no key is needed");
                (is_open && !has_keys).then(what)
            },
        ),
    ),
    fault(
        "keep-alive-short",
        "the balancer sends turns on connections that the router closes: 502 now and then",
        Fleet(find_short_keep_alive),
    ),
    fault(
        "routers-without-claims",
        "two routers begin the same new session on two workers",
        Fleet(find_missing_claims),
    ),
    fault(
        "claims-differ",
        "routers that ask other stores don't agree on a new session's worker",
        Fleet(|facts, found| find_other_setting(facts, found, "claims.store", |a, b| a == b)),
    ),
    warning(
        "timeouts-contradict",
        "the shorter limit always wins, and its refusal misleads",
        Fleet(find_contradictions),
    ),
    warning(
        "workers-differ",
        "routers that know other workers place the same session differently",
        Fleet(|facts, found| {
            // A router makes no difference between two orders of the list, and a slash at the end.
            let urls = |value: &Value| -> BTreeSet<String> {
                let urls = value.as_array().into_iter().flatten().filter_map(Value::as_str);
                urls.map(|url| url.trim_end_matches('/').to_owned()).collect()
            };
            find_other_setting(facts, found, "workers", |a, b| urls(a) == urls(b));
        }),
    ),
    warning(
        "descriptors-few",
        "fewer turns run at once than the settings allow",
        Fleet(|facts, found| {
            let fix = "its unit: LimitNOFILE=65536; a shell: ulimit -Hn 65536";
            for (process, most) in &facts.descriptors_max {
                let what = format!("it may have {most} file descriptors");
                found.add_if(process, (*most < DESCRIPTORS_MIN).then_some(what), fix);
            }
        }),
    ),
    fault("certificate-expiring", "after that, nobody connects", Fleet(find_old_certificates)),
];

fn find_short_keep_alive(facts: &Facts, found: &mut Found) {
    let Some(balancer_ms) = facts.balancer_keep_alive_ms else { return };
    let fix = format!("router.toml: connections.keep_alive_ms = {}", balancer_ms + 15_000);
    for router in &facts.routers {
        let own_ms = router.number("connections.keep_alive_ms").filter(|it| *it <= balancer_ms);
        let what = own_ms.map(|own_ms| {
            format!("connections.keep_alive_ms is {own_ms}, the balancer's limit {balancer_ms}")
        });
        found.add_if(&router.url, what, &fix);
    }
}

fn find_missing_claims(facts: &Facts, found: &mut Found) {
    let what = "claims.store is \"memory\", which is for a single router";
    let fix = "router.toml: claims.store = \"agents\", in every router";
    for router in facts.routers.iter().filter(|_| facts.routers.len() > 1) {
        let is_alone = setting(&router.settings, "claims.store") == "memory";
        found.add_if(&router.url, is_alone.then(|| what.to_owned()), fix);
    }
}

/// Compares each router with the first whose settings are known.
fn find_other_setting(
    facts: &Facts,
    found: &mut Found,
    name: &str,
    is_same: impl Fn(&Value, &Value) -> bool,
) {
    let mut known = facts.routers.iter().filter(|router| !router.settings.is_null());
    let Some(first) = known.next() else { return };
    let wanted = setting(&first.settings, name);
    for router in known {
        let own = setting(&router.settings, name);
        let what = || format!("{name} is {own}, at {} it is {wanted}", first.url);
        let fix = format!("router.toml: {name}, the same in every router");
        found.add_if(&router.url, (!is_same(own, wanted)).then(what), &fix);
    }
}

fn find_contradictions(facts: &Facts, found: &mut Found) {
    for agent in &facts.agents {
        let turn_ms = agent.number("limits.turn_ms_max");
        let wait_ms = agent.number("limits.queue_wait_ms_max");
        if let Some((wait, turn)) = wait_ms.zip(turn_ms).filter(|(wait, turn)| wait >= turn) {
            let what =
                format!("limits.queue_wait_ms_max ({wait}) isn't below turn_ms_max ({turn})");
            found.add(&agent.url, what, "agent.toml: a smaller limits.queue_wait_ms_max");
        }
        for router in &facts.routers {
            let router_turn_ms = router.number("timeouts.turn_ms_max");
            if let Some((ours, theirs)) = turn_ms.zip(router_turn_ms).filter(|(a, r)| a < r) {
                let what = format!(
                    "limits.turn_ms_max is {ours}, the router's timeouts.turn_ms_max {theirs}"
                );
                let fix = format!("agent.toml: limits.turn_ms_max = {theirs} or more");
                found.add(&agent.url, what, fix);
            }
            let interval_ms = agent.number("reports.interval_ms");
            let age_ms = router.number("timeouts.load_report_age_ms_max");
            if let Some((interval, age)) = interval_ms.zip(age_ms).filter(|(i, a)| i * 2 > *a) {
                let what = format!(
                    "load reports come each {interval} ms, and {} takes the agent for stale after \
                     {age}",
                    router.url
                );
                let fix = format!("agent.toml: reports.interval_ms = {} or less", age / 6);
                found.add(&agent.url, what, fix);
            }
        }
    }
}

fn find_old_certificates(facts: &Facts, found: &mut Found) {
    let fix = "replace the file; a changed certificate is in force within two seconds";
    for (path, days) in &facts.certificate_days {
        let what = match days {
            ..0 => format!("it expired {} days ago", -days),
            0.. => format!("it expires in {days} days"),
        };
        found.add_if(path, (*days < CERTIFICATE_DAYS_MIN).then_some(what), fix);
    }
}
