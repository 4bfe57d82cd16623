//! Makes fleets of agents for unit tests: descriptions, load reports, and a state that got them.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use contract::load::{
    Description, EngineFacts, Figure, KvTransfer, LoadReport, Rank, RankLoad, Retention, Source,
    Weights,
};

use super::{
    membership::{AgentIds, Listing, Source as ListSource, SourceList},
    state::{SourceNews, State, Update},
    worker::AgentKey,
};
use crate::config::Config;

/// Returns a point in time for pure code.
#[expect(clippy::disallowed_methods, reason = "tests of pure code need one instant to start from")]
pub(crate) fn start() -> Instant {
    Instant::now()
}

/// Returns the description of an agent with this id and epoch, whose engine has `ranks` ranks. The
/// epoch identifies the agent process.
pub(crate) fn description(agent_id: &str, epoch: u64, ranks: u32) -> Description {
    let rank = |dp_rank| Rank { dp_rank, pool_tokens: 10_000, rows: 8, devices: vec![] };
    Description {
        agent_id: agent_id.to_owned(),
        epoch,
        data_port: 9,
        data_tls: false,
        data_address: None,
        control_url: None,
        engine: EngineFacts {
            version: String::new(),
            models: vec!["m".to_owned()],
            page_tokens: 1,
            context_tokens: 1000,
            vocabulary: None,
            streaming_sessions: true,
            radix_sessions: true,
            instance: String::new(),
            disaggregation: "null".to_owned(),
            shortens_prompts: false,
            transfer: None,
            adapters: None,
        },
        ranks: (0..ranks).map(rank).collect(),
        retentions: vec![Retention::Pinned, Retention::Tagged, Retention::None],
        turns_queued_per_session_max: 0,
        model_files: None,
        trim_sglang_versions: vec![],
        shim_functions_off: vec![],
        retentions_off: vec![],
    }
}

/// Returns the description with an engine in `mode`, `prefill` or `decode`. All of these fit.
pub(crate) fn disaggregated(mut description: Description, mode: &str) -> Description {
    description.engine.disaggregation = mode.to_owned();
    description.engine.transfer = Some(KvTransfer {
        bootstrap_host: None,
        bootstrap_port: 8998,
        backend: "mooncake".to_owned(),
        kv_dtype: "auto".to_owned(),
        tp_size: 1,
        decode_cache: false,
        kv_bytes_per_token: Some(1 << 17),
    });
    description.retentions = vec![Retention::None];
    description
}

/// Returns a load report. `ranks` has the running turns of each rank, and how many of the 10,000
/// tokens of its KV pool are used.
pub(crate) fn report(ranks: &[(u32, u64)]) -> LoadReport {
    let figure = |value| Some(Figure { value, source: Source::Loads, age_ms: 0 });
    let rank = |(dp_rank, (turns, used)): (u32, &(u32, u64))| RankLoad {
        dp_rank,
        turns_running: *turns,
        turns_running_max: 64,
        requests_running: None,
        requests_waiting: None,
        pool_used_tokens: figure(*used),
        pool_total_tokens: figure(10_000),
        pinned_tokens: figure(0),
        resident_tokens_estimate: figure(0),
        rows_held: None,
        rows_total: None,
        sessions: 0,
        devices: vec![],
        turns_queued: 0,
        pool_available_tokens: None,
        pool_evictable_tokens: None,
        foreign_tokens: None,
        pages: None,
        prefill_tokens_per_s: None,
        prefill_backlog_tokens: None,
        staged_prefill: None,
        host: None,
    };
    LoadReport {
        interval: Duration::from_millis(500),
        ranks: (0..).zip(ranks).map(rank).collect(),
        unhealthy: None,
        draining: false,
        restart_required: None,
        held: None,
        weights: Weights::default(),
    }
}

/// Returns the state of a fleet with one agent per element of `loads`. Each agent has one rank and
/// was heard at `now`. See [`report`] for the elements.
pub(crate) fn fleet(loads: &[(u32, u64)], now: Instant) -> State {
    let workers = (0..loads.len()).map(|agent| format!("http://host{agent}:1")).collect();
    let mut state = State::new(&Config { workers, ..Config::default() });
    for (agent, load) in loads.iter().enumerate() {
        let description = description(&format!("a{agent}"), 1, 1);
        state.apply(
            AgentKey::first(agent),
            Update::StreamBegan { description, sessions: vec![] },
            now,
        );
        state.apply(AgentKey::first(agent), Update::Report(report(&[*load])), now);
    }
    state
}

/// Lets the settings' agent leave, and an idle one of another id join in its slot. Returns the key
/// of that one.
pub(crate) fn replace_agent(state: &mut State, old: AgentKey, now: Instant) -> AgentKey {
    let news = |source, list: SourceList| {
        let (list, agent_ids) = (Some(list), AgentIds::new());
        SourceNews { source, list, agent_ids }
    };
    let view = state.snapshot();
    let others = view.known_agents().filter(|(key, _)| *key != old);
    let stay = others.map(|(_, agent)| (agent.control_url.clone(), Listing::Serving));
    state.apply_news(news(ListSource::Static, stay.collect()), now);
    assert!(!state.end_leaving(now + Duration::from_secs(3600)).is_empty(), "it leaves");
    state.apply(old, Update::TasksEnded, now);
    let joins = BTreeMap::from([("http://joins:1".to_owned(), Listing::Serving)]);
    state.apply_news(news(ListSource::File, joins), now);
    let view = state.snapshot();
    let joined = view.known_agents().find(|(_, agent)| agent.control_url == "http://joins:1");
    let (new, _) = joined.expect("it was listed");
    assert_eq!(new.slot(), old.slot(), "no other slot is free");
    let description = description("joins", 1, 1);
    state.apply(new, Update::StreamBegan { description, sessions: vec![] }, now);
    state.apply(new, Update::Report(report(&[(0, 0)])), now);
    new
}
