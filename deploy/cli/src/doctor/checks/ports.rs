//! Checks of what answers, and at which port. Pure.

use super::super::{
    Check,
    Find::{Agents, Ports, Routers},
    facts::{Asked, Reach},
    fault, warning,
};

/// Tokens may differ by a minute; claims and logs of several hosts are compared by seconds.
const CLOCK_SKEW_MS_MAX: i64 = 2_000;

pub const CHECKS: &[Check] = &[
    fault(
        "router-unreachable",
        "clients that use this address get no answer",
        Routers(
            "router.toml: listen.data_addr = \"ADDRESS:PORT\" of a network that clients reach; \
             start berth-router",
            nothing_answers,
        ),
    ),
    fault(
        "agent-unreachable",
        "routers that use this address place nothing on its engine",
        Agents(
            "agent.toml: listen.control_addr = \"ADDRESS:PORT\" of a network that routers reach; \
             start berth-agent",
            |agent, _| nothing_answers(agent),
        ),
    ),
    fault(
        "ports-swapped",
        "the port serves others than those who ask there",
        Ports(
            [
                "name the router's listen.data_addr (8080), not its admin_addr",
                "router.toml: workers = [\"http://HOST:PORT\"] with the agent's \
                 listen.control_addr (31001), not its data_addr or admin_addr",
            ],
            |it| match it.reach {
                Reach::OtherPort(port) => Some(format!("{port} answers there")),
                _ => None,
            },
        ),
    ),
    fault(
        "credential-refused",
        "with this key, token or certificate nobody gets in",
        Ports(
            [
                "keys.toml: add [[key]] with sha256 = \"DIGEST\" and admin = true; give the secret \
                 by --key-file",
                "agent.toml: auth.token_file must have the token that router.toml's \
                 agents.token_file has first; give it by --token-file",
            ],
            |it| match &it.reach {
                Reach::Refused(why) => Some(format!("refused: {why}")),
                _ => None,
            },
        ),
    ),
    warning(
        "clock-skew",
        "tokens of an identity provider, claims and logs of several hosts don't fit together",
        Ports(["run a time service on both hosts: timedatectl set-ntp true"; 2], |it| {
            let ahead_ms = it.clock_ahead_ms.filter(|ahead| ahead.abs() > CLOCK_SKEW_MS_MAX)?;
            Some(format!("its clock is {ahead_ms} ms ahead of this host's"))
        }),
    ),
    warning(
        "version-differs",
        "long prompts may be sent without staged prefill, and new figures are missing",
        Routers("install one version of all of Berth", |router| {
            let own = env!("CARGO_PKG_VERSION");
            let version = router.version.as_ref().filter(|version| *version != own)?;
            Some(format!("the router's version is {version}, this berth's is {own}"))
        }),
    ),
];

fn nothing_answers(it: &Asked) -> Option<String> {
    match &it.reach {
        Reach::Nothing(why) => Some(format!("nothing answers: {why}")),
        Reach::Port | Reach::OtherPort(_) | Reach::Refused(_) => None,
    }
}
