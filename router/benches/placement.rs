//! Benchmark of one placement decision.
//!
//! A decision looks up the resident blocks, finds candidates, computes costs and chooses. The
//! prompt's blocks are given. A new session is compared on all workers; a session that stays needs
//! neither blocks nor look-up.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use blocks::block::{BlockHash, Tier, hash_after};
use blocks::index::{Index, Overlap};
use contract::{
    id::{Digest, SessionKey},
    load::{
        Description, EngineFacts, Figure, HostTier, LoadReport, Rank, RankLoad, Retention, Session,
        SessionState, Source, StagedPrefill, Weights,
    },
};
use criterion::{BenchmarkId, Criterion};
use router::{
    config::Config,
    fleet::{
        snapshot::Snapshot,
        state::{State, Update},
        worker::{AgentKey, WorkerRef},
    },
    placement::{PairUse, PlacementRequest, Sticky, place, place_without_prompt},
    residency::PromptOverlap,
};

const BLOCK_TOKENS: u64 = 64;
/// Number of blocks of a prompt, of which every worker has the system prompt.
const BLOCKS: usize = 76;
const SYSTEM_BLOCKS: usize = 32;
const POOL_TOKENS: u64 = 1_000_000;
const SESSIONS_PER_WORKER: usize = 8;

fn figure(value: usize) -> Option<Figure> {
    let value = u64::try_from(value).expect("a figure fits in u64");
    Some(Figure { value, source: Source::Shim, age_ms: 0 })
}

fn description(agent: usize) -> Description {
    Description {
        agent_id: format!("worker-{agent}"),
        epoch: 1,
        data_port: 9,
        data_tls: false,
        data_address: None,
        control_url: None,
        engine: EngineFacts {
            version: String::new(),
            models: vec!["m".to_owned()],
            page_tokens: 1,
            context_tokens: 1 << 17,
            vocabulary: None,
            streaming_sessions: true,
            radix_sessions: true,
            instance: String::new(),
            disaggregation: "null".to_owned(),
            shortens_prompts: false,
            transfer: None,
            adapters: None,
        },
        ranks: vec![Rank { dp_rank: 0, pool_tokens: POOL_TOKENS, rows: 4096, devices: vec![] }],
        retentions: vec![Retention::Pinned, Retention::Tagged, Retention::None],
        turns_queued_per_session_max: 0,
        model_files: None,
        trim_sglang_versions: vec![],
        shim_functions_off: vec![],
        retentions_off: vec![],
    }
}

/// Returns a report with some load, which differs between workers.
fn report(agent: usize, host: Option<HostTier>) -> LoadReport {
    let rank = RankLoad {
        dp_rank: 0,
        turns_running: u32::try_from(agent % 7).expect("a remainder of 7 fits in u32"),
        turns_running_max: 64,
        requests_running: None,
        requests_waiting: None,
        pool_used_tokens: figure(agent * 977 % 200_000),
        pool_total_tokens: figure(1_000_000),
        pinned_tokens: None,
        resident_tokens_estimate: None,
        rows_held: None,
        rows_total: None,
        sessions: 8,
        devices: vec![],
        turns_queued: 0,
        pool_available_tokens: figure(10_000),
        pool_evictable_tokens: figure(790_000),
        foreign_tokens: None,
        pages: None,
        prefill_tokens_per_s: figure(20_000),
        prefill_backlog_tokens: figure(agent * 7919 % 20_000),
        staged_prefill: Some(StagedPrefill {
            tokens: (agent * 104_729 % 100_000) as u64,
            prompts: 2,
            stage_tokens: 8_000,
        }),
        host,
    };
    LoadReport {
        interval: Duration::from_millis(500),
        ranks: vec![rank],
        unhealthy: None,
        draining: false,
        restart_required: None,
        held: None,
        weights: Weights::default(),
    }
}

fn session(agent: usize, number: usize) -> Session {
    Session {
        key: SessionKey::new("p", format!("{agent}-{number}")).expect("the id is valid"),
        retention: Retention::Tagged,
        state: SessionState::Idle,
        dp_rank: 0,
        turns: 1,
        turns_running: 0,
        exclusive: false,
        resident_tokens: figure(20_000 + agent * 331 % 100_000),
        idle: Duration::from_secs((agent * 37 + number * 101) as u64 % 900),
        full_history: false,
        volatile_prefix: None,
        began_unix_ms: 0,
        parent: None,
    }
}

fn fleet(workers: usize, host: Option<HostTier>, now: Instant) -> Snapshot {
    let workers_named = (0..workers).map(|agent| format!("http://host{agent}:1")).collect();
    let mut state = State::new(&Config { workers: workers_named, ..Config::default() });
    for agent in 0..workers {
        let sessions = (0..SESSIONS_PER_WORKER).map(|number| session(agent, number)).collect();
        let began = Update::StreamBegan { description: description(agent), sessions };
        state.apply(AgentKey::first(agent), began, now);
        state.apply(AgentKey::first(agent), Update::Report(report(agent, host)), now);
    }
    state.apply(AgentKey::first(0), Update::Report(report(0, host)), now + Duration::from_secs(1));
    state.snapshot()
}

fn chain(session: u64) -> Vec<BlockHash> {
    let next = |last: &mut BlockHash, at: usize| {
        *last = hash_after(*last, if at < SYSTEM_BLOCKS { 0 } else { 1 + session });
        Some(*last)
    };
    (0..BLOCKS).scan(BlockHash(7), next).collect()
}

/// With a host tier, the device has only the system prompt, and the host all.
fn filled(workers: usize, has_host: bool) -> Index {
    let mut index = Index::new(usize::MAX);
    for agent in 0..workers {
        let number = WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 }
            .number()
            .expect("rank 0 has a number");
        let chain = chain(agent as u64);
        let device_blocks = if has_host { SYSTEM_BLOCKS } else { BLOCKS };
        index.store(number, Tier::Device, None, &chain[..device_blocks]);
        if has_host {
            index.store(number, Tier::Host, None, &chain);
        }
    }
    index
}

fn request(digest: u64) -> PlacementRequest<'static> {
    PlacementRequest {
        digest: Digest(digest),
        expects_more_turns: true,
        sticky: None,
        conversations: None,
        prefer: None,
        prompt: None,
        retention: None,
        model: None,
        weights: None,
        exclude: None,
        pairs: PairUse::May,
    }
}

fn placement(criterion: &mut Criterion) {
    let now = service::clock::now();
    let mut group = criterion.benchmark_group("placement");
    let host = HostTier {
        total_tokens: figure(2_000_000),
        used_tokens: figure(1_500_000),
        load_tokens_per_s: figure(250_000),
        ..HostTier::default()
    };
    let sizes = [8, 32, 128, 1024];
    for (workers, host, name) in sizes
        .map(|workers| (workers, None, "newcomer"))
        .into_iter()
        .chain(sizes.map(|workers| (workers, Some(host), "newcomer, host tier")))
    {
        let (view, index) = (fleet(workers, host, now), filled(workers, host.is_some()));
        let chains: Vec<_> = (0..workers as u64).map(chain).collect();
        let mut overlap = Overlap::default();
        let mut at = 0;
        group.bench_function(BenchmarkId::new(name, workers), |bencher| {
            bencher.iter(|| {
                at = (at + 1) % workers;
                index.look_up(black_box(&chains[at]), &mut overlap);
                let prompt = PromptOverlap {
                    tokens: BLOCKS as u64 * BLOCK_TOKENS,
                    block_tokens: BLOCK_TOKENS,
                    overlap: &overlap,
                };
                let ask = PlacementRequest { prompt: Some(prompt), ..request(at as u64) };
                place(&ask, &view, now).expect("there are workers")
            });
        });
        if host.is_some() {
            // A session that stays is placed without its prompt.
            continue;
        }
        group.bench_function(BenchmarkId::new("stays", workers), |bencher| {
            bencher.iter(|| {
                at = (at + 1) % workers;
                let worker = WorkerRef { agent: AgentKey::first(at), dp_rank: 0 };
                let sticky = Some(Sticky {
                    last_turn_ended: Some(now),
                    new_tokens: Some(4_000),
                    ..Sticky::new(worker)
                });
                place_without_prompt(
                    &black_box(PlacementRequest { sticky, ..request(at as u64) }),
                    &view,
                    now,
                )
            });
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    placement(&mut criterion);
    criterion.final_summary();
}
