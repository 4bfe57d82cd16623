//! Checks of workers and agents side by side. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{
    Check, Place, Severity,
    facts::{Facts, Reach},
};
use crate::api::Worker;

pub const CHECKS: &[Check] = &[
    Check {
        id: "worker-stale",
        severity: Severity::Fault,
        why: "no new session goes there",
        find: find_silent_workers,
    },
    Check {
        id: "worker-unhealthy",
        severity: Severity::Fault,
        why: "its engine takes no turns",
        find: find_unhealthy_workers,
    },
    Check {
        id: "drain-left-on",
        severity: Severity::Warning,
        why: "no new session goes there, and the others leave",
        find: find_drains,
    },
    Check {
        id: "restart-required",
        severity: Severity::Fault,
        why: "only a restart of the engine frees what it holds",
        find: find_restarts,
    },
    Check {
        id: "agent-id-duplicate",
        severity: Severity::Fault,
        why: "sessions of one agent are looked for at the other",
        find: find_duplicate_ids,
    },
    Check {
        id: "engine-shared",
        severity: Severity::Fault,
        why: "each agent counts the KV and the rows of the engine as its own",
        find: find_shared_engines,
    },
    Check {
        id: "page-size-differs",
        severity: Severity::Warning,
        why: "a session that moves between them is computed again: their blocks differ",
        find: find_page_sizes,
    },
    Check {
        id: "model-differs",
        severity: Severity::Warning,
        why: "turns can't move between these workers",
        find: find_models,
    },
    Check {
        id: "tokenizer-differs",
        severity: Severity::Fault,
        why: "the same text has other blocks: placement by resident blocks goes wrong",
        find: find_tokenizers,
    },
    Check {
        id: "no-tokenizer",
        severity: Severity::Warning,
        why: "text prompts are placed without knowing which worker has their KV",
        find: find_missing_tokenizers,
    },
];

fn find_in_state(facts: &Facts, states: &[&str], fix: &str) -> Vec<Place> {
    let found = facts.engines().filter(|worker| states.contains(&worker.state.as_str()));
    found
        .map(|worker| {
            let what = format!("it is {}: {}", worker.state, worker.reason);
            Place::new(&worker.worker, what, fix)
        })
        .collect()
}

fn find_silent_workers(facts: &Facts) -> Vec<Place> {
    let fix = "start berth-agent there; agent.toml: listen.data_addr and listen.control_addr must \
               be open to the router";
    let mut places = find_in_state(facts, &["stale", "lost"], fix);
    let fleets = facts.routers.iter().filter_map(|router| router.fleet.as_ref());
    let duplicates = duplicates(facts);
    let is_duplicate = |url: &str| duplicates.values().any(|urls| urls.contains(url));
    for agent in fleets.take(1).flat_map(|fleet| &fleet.unheard) {
        // Of two agents with one id, the router rejects the second.
        if !is_duplicate(&agent.control) {
            let what = format!("it was never heard: {}", agent.reason);
            places.push(Place::new(&agent.control, what, fix_of_unheard(facts, &agent.control)));
        }
    }
    places
}

/// Judges by what answers at the agent's address.
fn fix_of_unheard(facts: &Facts, control: &str) -> &'static str {
    let asked = facts.agents.iter().find(|agent| agent.url == control);
    match asked.map(|agent| (&agent.reach, &agent.agent_id)) {
        Some((Reach::Refused(_), _)) => {
            "router.toml: agents.token_file must begin with a token of agent.toml's \
             auth.token_file, or agents.cert must be one of its tls.client_ca"
        }
        Some((Reach::Port, None)) => {
            "start the engine; agent.toml: engine.url must name it, with its --api-key in \
             BERTH_ENGINE_API_KEY"
        }
        Some((Reach::Port, Some(_))) => {
            "router.toml: workers must name each agent once, by an address that the router reaches"
        }
        _ => "router.toml: workers must name each agent's listen.control_addr",
    }
}

fn find_unhealthy_workers(facts: &Facts) -> Vec<Place> {
    find_in_state(facts, &["unhealthy", "held"], "start or continue the engine; see its log")
}

fn find_drains(facts: &Facts) -> Vec<Place> {
    let draining = facts.engines().filter(|worker| worker.state == "draining");
    let quiet = draining.filter(|worker| {
        // While turns run, the drain is at work.
        worker.load.as_ref().is_none_or(|load| load.turns_running + load.turns_queued == 0)
    });
    quiet
        .map(|worker| {
            let fix = format!("berth drain --undo --agent {}", worker.control);
            Place::new(&worker.worker, "it drains, and no turn is left there", fix)
        })
        .collect()
}

fn find_restarts(facts: &Facts) -> Vec<Place> {
    facts
        .workers()
        .filter_map(|worker| {
            let why = worker.restart_required.as_ref().filter(|why| !why.is_empty())?;
            Some(Place::new(&worker.worker, why, "restart this engine"))
        })
        .collect()
}

/// Leaves out engines without a key.
fn by_key(facts: &Facts, key: impl Fn(&Worker) -> Option<&str>) -> BTreeMap<String, Vec<&Worker>> {
    let mut groups: BTreeMap<String, Vec<&Worker>> = BTreeMap::new();
    for worker in facts.engines() {
        if let Some(key) = key(worker).filter(|key| !key.is_empty()) {
            groups.entry(key.to_owned()).or_default().push(worker);
        }
    }
    groups
}

fn names(workers: &[&Worker]) -> String {
    let names: Vec<&str> = workers.iter().map(|worker| worker.control.as_str()).collect();
    names.join(", ")
}

/// Maps an id to the agents' URLs. One process under two URLs is one agent.
fn duplicates(facts: &Facts) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut groups: BTreeMap<&str, BTreeMap<u64, &str>> = BTreeMap::new();
    for agent in &facts.agents {
        if let (Some(id), Some(epoch)) = (&agent.agent_id, agent.epoch) {
            groups.entry(id).or_default().entry(epoch).or_insert(&agent.url);
        }
    }
    groups.retain(|_, agents| agents.len() > 1);
    groups.into_iter().map(|(id, agents)| (id, agents.into_values().collect())).collect()
}

fn find_duplicate_ids(facts: &Facts) -> Vec<Place> {
    duplicates(facts)
        .into_iter()
        .map(|(id, urls)| {
            let urls: Vec<&str> = urls.into_iter().collect();
            let what = format!("the agents at {} have the same id", urls.join(", "));
            Place::new(id, what, "agent.toml: worker_id = \"NAME\", unique in the fleet")
        })
        .collect()
}

fn find_shared_engines(facts: &Facts) -> Vec<Place> {
    let groups = by_key(facts, |worker| Some(&worker.engine.instance));
    let shared = groups
        .into_values()
        .filter(|workers| workers.iter().any(|worker| worker.agent != workers[0].agent));
    shared
        .map(|workers| {
            let what = format!("the agents at {} serve one engine", names(&workers));
            let fix = "agent.toml: engine.url must name another engine in each agent";
            Place::new(&workers[0].worker, what, fix)
        })
        .collect()
}

fn find_differences(
    facts: &Facts,
    name: &str,
    fix: &str,
    figure: impl Fn(&Worker) -> Option<u64>,
) -> Vec<Place> {
    let models = by_key(facts, |worker| worker.engine.models.first().map(String::as_str));
    let mut places = vec![];
    for (model, workers) in models {
        let mut figures: BTreeMap<u64, &str> = BTreeMap::new();
        for worker in workers {
            if let Some(figure) = figure(worker) {
                figures.entry(figure).or_insert(&worker.worker);
            }
        }
        if figures.len() > 1 {
            let texts: Vec<String> =
                figures.iter().map(|(figure, worker)| format!("{figure} at {worker}")).collect();
            places.push(Place::new(model, format!("{name}: {}", texts.join(", ")), fix));
        }
    }
    places
}

fn find_page_sizes(facts: &Facts) -> Vec<Place> {
    let fix = "start each engine of this model with the same --page-size";
    let page = |worker: &Worker| Some(worker.engine.page_tokens).filter(|tokens| *tokens > 0);
    find_differences(facts, "tokens of a page differ", fix, page)
}

fn find_models(facts: &Facts) -> Vec<Place> {
    let fix = "start each engine of one --served-model-name with the same --model-path and \
               --context-length";
    let mut places =
        find_differences(facts, "sizes of the vocabulary differ", fix, |it| it.engine.vocabulary);
    let context = |worker: &Worker| Some(worker.engine.context_tokens).filter(|it| *it > 0);
    places.extend(find_differences(facts, "context lengths differ", fix, context));
    places
}

fn find_tokenizers(facts: &Facts) -> Vec<Place> {
    let models: BTreeMap<&str, Option<&String>> = facts
        .engines()
        .map(|worker| (worker.agent.as_str(), worker.engine.models.first()))
        .collect();
    let mut groups: BTreeMap<Option<&String>, BTreeMap<&[u8], &str>> = BTreeMap::new();
    for agent in &facts.agents {
        if let Some(Some(hash)) = &agent.tokenizer {
            let model = agent.agent_id.as_deref().and_then(|id| models.get(id).copied().flatten());
            groups.entry(model).or_default().entry(hash).or_insert(&agent.url);
        }
    }
    // Agents whose model is unknown can't be compared.
    let known = groups.into_iter().filter_map(|(model, hashes)| Some((model?, hashes)));
    known
        .filter(|(_, hashes)| hashes.len() > 1)
        .map(|(model, hashes)| {
            let urls: Vec<&str> = hashes.into_values().collect();
            let what = format!("the tokenizer's files differ at {}", urls.join(", "));
            let fix = "give each engine of this model the same --model-path and --revision";
            Place::new(model, what, fix)
        })
        .collect()
}

fn find_missing_tokenizers(facts: &Facts) -> Vec<Place> {
    let without = facts.agents.iter().filter(|agent| agent.tokenizer == Some(None));
    without
        .map(|agent| {
            let fix = "let the agent read the engine's --model-path: the same host, path and user";
            Place::new(&agent.url, "the agent can't read the model's tokenizer", fix)
        })
        .collect()
}
