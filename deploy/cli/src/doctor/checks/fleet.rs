//! Checks of workers and agents side by side. Pure.

use std::collections::{BTreeMap, BTreeSet};

use contract::api::Worker;

use super::super::{
    Check,
    Find::{Agents, Engines, Fleet, Workers},
    Found,
    facts::{Facts, Reach},
    fault, warning,
};

pub const CHECKS: &[Check] = &[
    fault("worker-stale", "no new session goes there", Fleet(find_silent_workers)),
    fault(
        "worker-unhealthy",
        "its engine takes no turns",
        Engines("start or continue the engine; see its log", |worker, _| {
            state_among(worker, ["unhealthy", "held"])
        }),
    ),
    warning("drain-left-on", "no new session goes there, and the others leave", Fleet(find_drains)),
    fault(
        "restart-required",
        "only a restart of the engine frees what it holds",
        Workers("restart this engine", |worker, _| {
            worker.restart_required.clone().filter(|why| !why.is_empty())
        }),
    ),
    fault(
        "agent-id-duplicate",
        "sessions of one agent are looked for at the other",
        Fleet(find_duplicate_ids),
    ),
    fault(
        "engine-shared",
        "each agent counts the KV and the rows of the engine as its own",
        Fleet(find_shared_engines),
    ),
    warning(
        "page-size-differs",
        "a session that moves between them is computed again: their blocks differ",
        Fleet(|facts, found| {
            let fix = "start each engine of this model with the same --page-size";
            let page = |worker: &Worker| Some(worker.engine.page_tokens);
            find_differences(facts, found, "tokens of a page differ", fix, page);
        }),
    ),
    warning("model-differs", "turns can't move between these workers", Fleet(find_models)),
    fault(
        "tokenizer-differs",
        "the same text has other blocks: placement by resident blocks goes wrong",
        Fleet(find_tokenizers),
    ),
    warning(
        "no-tokenizer",
        "text prompts are placed without knowing which worker has their KV",
        Agents(
            "let the agent read the engine's --model-path: the same host, path and user",
            |agent, _| {
                let lacks = agent.description.as_ref()?.model_files.is_none();
                lacks.then(|| "the agent can't read the model's tokenizer".into())
            },
        ),
    ),
];

fn state_among(worker: &Worker, states: [&str; 2]) -> Option<String> {
    let Worker { state, reason, .. } = worker;
    states.contains(&state.as_str()).then(|| format!("it is {state}: {reason}"))
}

fn find_silent_workers(facts: &Facts, found: &mut Found) {
    let fix = "start berth-agent there; agent.toml: listen.data_addr and listen.control_addr must \
               be open to the router";
    for worker in facts.engines() {
        found.add_if(&worker.worker, state_among(worker, ["stale", "lost"]), fix);
    }
    let duplicates = duplicates(facts);
    for agent in facts.fleet().into_iter().flat_map(|fleet| &fleet.unheard) {
        // Of two agents with one id, the router rejects the second.
        if !duplicates.values().any(|urls| urls.values().any(|url| *url == agent.control)) {
            let what = format!("it was never heard: {}", agent.reason);
            found.add(&agent.control, what, fix_of_unheard(facts, &agent.control));
        }
    }
}

/// Judges by what answers at the agent's address.
fn fix_of_unheard(facts: &Facts, control: &str) -> &'static str {
    let asked = facts.agents.iter().find(|agent| agent.url == control);
    match asked.map(|agent| (&agent.reach, &agent.description)) {
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

fn find_drains(facts: &Facts, found: &mut Found) {
    for worker in facts.engines().filter(|worker| worker.state == "draining") {
        // While turns run, the drain is at work.
        if worker.load.as_ref().is_none_or(|load| load.turns_running + load.turns_queued == 0) {
            let fix = format!("berth drain --undo --agent {}", worker.control);
            found.add(&worker.worker, "it drains, and no turn is left there", fix);
        }
    }
}

/// Groups of which the members differ, each with the first member that has one of the values.
fn differing<G: Ord, V: Ord, M>(
    members: impl Iterator<Item = (G, V, M)>,
) -> BTreeMap<G, BTreeMap<V, M>> {
    let mut groups: BTreeMap<G, BTreeMap<V, M>> = BTreeMap::new();
    for (group, value, member) in members {
        groups.entry(group).or_default().entry(value).or_insert(member);
    }
    groups.retain(|_, values| values.len() > 1);
    groups
}

/// The URLs of agents with one id. One process under two URLs is one agent.
fn duplicates(facts: &Facts) -> BTreeMap<&str, BTreeMap<u64, &str>> {
    differing(facts.agents.iter().filter_map(|agent| {
        let description = agent.description.as_ref()?;
        Some((description.agent_id.as_str(), description.epoch, agent.url.as_str()))
    }))
}

fn find_duplicate_ids(facts: &Facts, found: &mut Found) {
    for (id, agents) in duplicates(facts) {
        let urls: BTreeSet<&str> = agents.into_values().collect();
        let what = format!("the agents at {} have the same id", join(urls));
        found.add(id, what, "agent.toml: worker_id = \"NAME\", unique in the fleet");
    }
}

fn join<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    texts.into_iter().collect::<Vec<&str>>().join(", ")
}

fn find_shared_engines(facts: &Facts, found: &mut Found) {
    let known = facts.engines().filter(|worker| !worker.engine.instance.is_empty());
    let shared = differing(known.map(|worker| (&worker.engine.instance, &worker.agent, worker)));
    for agents in shared.values() {
        let urls = join(agents.values().map(|worker| worker.control.as_str()));
        let what = format!("the agents at {urls} serve one engine");
        let fix = "agent.toml: engine.url must name another engine in each agent";
        let first = agents.values().next().map(|worker| worker.worker.as_str());
        found.add(first.unwrap_or_default(), what, fix);
    }
}

/// Compares a figure of the engines that serve one model. 0 is unknown.
fn find_differences(
    facts: &Facts,
    found: &mut Found,
    name: &str,
    fix: &str,
    figure: fn(&Worker) -> Option<u32>,
) {
    let groups = differing(facts.engines().filter_map(|worker| {
        let model = worker.engine.models.first().filter(|model| !model.is_empty())?;
        Some((model, figure(worker).filter(|figure| *figure > 0)?, &worker.worker))
    }));
    for (model, figures) in groups {
        let texts = figures.iter().map(|(figure, worker)| format!("{figure} at {worker}"));
        let texts = texts.collect::<Vec<String>>().join(", ");
        found.add(model, format!("{name}: {texts}"), fix);
    }
}

fn find_models(facts: &Facts, found: &mut Found) {
    let fix = "start each engine of one --served-model-name with the same --model-path and \
               --context-length";
    find_differences(facts, found, "sizes of the vocabulary differ", fix, |it| {
        it.engine.vocabulary
    });
    find_differences(facts, found, "context lengths differ", fix, |it| {
        Some(it.engine.context_tokens)
    });
}

fn find_tokenizers(facts: &Facts, found: &mut Found) {
    let groups = differing(facts.agents.iter().filter_map(|agent| {
        let description = agent.description.as_ref()?;
        let hash = description.model_files?.hash;
        // Agents whose model is unknown can't be compared.
        let worker = facts.engines().filter(|it| it.agent == description.agent_id).last()?;
        Some((worker.engine.models.first()?, hash, agent.url.as_str()))
    }));
    for (model, hashes) in groups {
        let what = format!("the tokenizer's files differ at {}", join(hashes.into_values()));
        let fix = "give each engine of this model the same --model-path and --revision";
        found.add(model, what, fix);
    }
}
