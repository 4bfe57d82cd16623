//! Checks of what answers, and at which port. Pure.

use super::super::{
    Check, Place, Severity,
    facts::{Facts, Reach},
};

/// Tokens may differ by a minute; claims and logs of several hosts are compared by seconds.
const CLOCK_SKEW_MS_MAX: i64 = 2_000;

pub const CHECKS: &[Check] = &[
    Check {
        id: "router-unreachable",
        severity: Severity::Fault,
        why: "clients that use this address get no answer",
        find: find_unreachable_routers,
    },
    Check {
        id: "agent-unreachable",
        severity: Severity::Fault,
        why: "routers that use this address place nothing on its engine",
        find: find_unreachable_agents,
    },
    Check {
        id: "ports-swapped",
        severity: Severity::Fault,
        why: "the port serves others than those who ask there",
        find: find_swapped_ports,
    },
    Check {
        id: "credential-refused",
        severity: Severity::Fault,
        why: "with this key, token or certificate nobody gets in",
        find: find_refusals,
    },
    Check {
        id: "clock-skew",
        severity: Severity::Warning,
        why: "tokens of an identity provider, claims and logs of several hosts don't fit together",
        find: find_clock_skew,
    },
    Check {
        id: "version-differs",
        severity: Severity::Warning,
        why: "long prompts may be sent without staged prefill, and new figures are missing",
        find: find_other_versions,
    },
];

fn addresses(facts: &Facts) -> impl Iterator<Item = (&'static str, &String, &Reach)> {
    let routers = facts.routers.iter().map(|router| ("--router", &router.url, &router.reach));
    routers.chain(facts.agents.iter().map(|agent| ("--agent", &agent.url, &agent.reach)))
}

fn find_unreachable_routers(facts: &Facts) -> Vec<Place> {
    let fix = "router.toml: listen.data_addr = \"ADDRESS:PORT\" of a network that clients reach; \
               start berth-router";
    find_nothing(facts, "--router", fix)
}

fn find_unreachable_agents(facts: &Facts) -> Vec<Place> {
    let fix = "agent.toml: listen.control_addr = \"ADDRESS:PORT\" of a network that routers reach; \
               start berth-agent";
    find_nothing(facts, "--agent", fix)
}

fn find_nothing(facts: &Facts, flag: &str, fix: &str) -> Vec<Place> {
    let of_kind = addresses(facts).filter(|(kind, ..)| *kind == flag);
    of_kind
        .filter_map(|(_, url, reach)| match reach {
            Reach::Nothing(why) => Some(Place::new(url, format!("nothing answers: {why}"), fix)),
            Reach::Port | Reach::OtherPort(_) | Reach::Refused(_) => None,
        })
        .collect()
}

fn find_swapped_ports(facts: &Facts) -> Vec<Place> {
    addresses(facts)
        .filter_map(|(flag, url, reach)| {
            let Reach::OtherPort(port) = reach else { return None };
            let fix = match flag {
                "--router" => "name the router's listen.data_addr (8080), not its admin_addr",
                _ => {
                    "router.toml: workers = [\"http://HOST:PORT\"] with the agent's \
                      listen.control_addr (31001), not its data_addr or admin_addr"
                }
            };
            Some(Place::new(url, format!("{port} answers there"), fix))
        })
        .collect()
}

fn find_refusals(facts: &Facts) -> Vec<Place> {
    addresses(facts)
        .filter_map(|(flag, url, reach)| {
            let Reach::Refused(why) = reach else { return None };
            let fix = match flag {
                "--router" => {
                    "keys.toml: add [[key]] with sha256 = \"DIGEST\" and admin = true; \
                               give the secret by --key-file"
                }
                _ => {
                    "agent.toml: auth.token_file must have the token that router.toml's \
                      agents.token_file has first; give it by --token-file"
                }
            };
            Some(Place::new(url, format!("refused: {why}"), fix))
        })
        .collect()
}

fn find_clock_skew(facts: &Facts) -> Vec<Place> {
    let routers = facts.routers.iter().map(|router| (&router.url, router.clock_ahead_ms));
    let agents = facts.agents.iter().map(|agent| (&agent.url, agent.clock_ahead_ms));
    routers
        .chain(agents)
        .filter_map(|(url, ahead_ms)| {
            let ahead_ms = ahead_ms.filter(|ahead| ahead.abs() > CLOCK_SKEW_MS_MAX)?;
            let what = format!("its clock is {ahead_ms} ms ahead of this host's");
            Some(Place::new(
                url,
                what,
                "run a time service on both hosts: timedatectl set-ntp true",
            ))
        })
        .collect()
}

fn find_other_versions(facts: &Facts) -> Vec<Place> {
    let own = env!("CARGO_PKG_VERSION");
    facts
        .routers
        .iter()
        .filter_map(|router| {
            let version = router.version.as_ref().filter(|version| *version != own)?;
            let what = format!("the router's version is {version}, this berth's is {own}");
            Some(Place::new(&router.url, what, "install one version of all of Berth"))
        })
        .collect()
}
