//! Plants each misconfiguration in the facts of a sound fleet, and expects exactly its finding.

use std::collections::BTreeSet;

use contract::{
    api::{Kv, UnheardAgent, Worker, Workers},
    load::{
        Description, Device, EngineFacts, Figure, FunctionOff, ModelFiles, Rank, RankLoad,
        Retention, RetentionOff, Source,
    },
};
use serde_json::json;

use super::{
    facts::{Asked, Facts, Reach},
    *,
};

fn figure(value: u64, source: Source) -> Option<Figure> {
    Some(Figure { value, source, age_ms: 0 })
}

fn worker(number: u32) -> Worker {
    let device = Device {
        uuid: format!("GPU-{number}"),
        index: Some(number),
        memory_total_bytes: Some(80 << 30),
        memory_used_bytes: Some(70 << 30),
        engine_bytes: figure(70 << 30, Source::Nvml),
        age_ms: Some(500),
        ..Device::default()
    };
    Worker {
        worker: format!("w{number}/0"),
        agent: format!("w{number}"),
        control: format!("http://w{number}:31001"),
        state: "fresh".into(),
        load: Some(RankLoad {
            pool_used_tokens: figure(100, Source::Shim),
            devices: vec![device],
            ..RankLoad::default()
        }),
        kv: Kv { state: "live".into(), ..Kv::default() },
        engine: EngineFacts {
            version: "0.5.23".into(),
            models: vec!["m".into()],
            page_tokens: 64,
            context_tokens: 32_768,
            vocabulary: Some(1000),
            instance: format!("process-{number}"),
            disaggregation: "null".into(),
            ..EngineFacts::default()
        },
        retentions: ["pinned", "tagged", "none"].map(str::to_owned).to_vec(),
        rank: Some(Rank { pool_tokens: 1 << 20, rows: 64, ..Rank::default() }),
        ..Worker::default()
    }
}

fn description(number: u32) -> Description {
    Description {
        agent_id: format!("w{number}"),
        epoch: number.into(),
        data_port: 31_000,
        data_address: None,
        control_url: None,
        data_tls: false,
        engine: EngineFacts {
            version: "0.5.23".into(),
            models: vec!["m".into()],
            page_tokens: 64,
            context_tokens: 32_768,
            vocabulary: Some(1000),
            streaming_sessions: true,
            radix_sessions: true,
            instance: format!("process-{number}"),
            disaggregation: "null".into(),
            shortens_prompts: false,
            adapters: None,
            transfer: None,
        },
        ranks: vec![],
        retentions: vec![],
        retentions_off: vec![],
        turns_queued_per_session_max: 1,
        model_files: Some(ModelFiles { hash: [7; 32], bytes: 1 }),
        trim_sglang_versions: vec!["0.5.23".into()],
        shim_functions_off: vec![],
    }
}

fn agent(number: u32) -> Asked {
    let kv_events = r#"{"publisher": "zmq", "replay_endpoint": "tcp://127.0.0.1:5558"}"#;
    Asked {
        url: format!("http://w{number}:31001"),
        clock_ahead_ms: Some(300),
        settings: json!({
            "worker_id": format!("w{number}"),
            "sessions": { "pin_budget_ratio": 0.7, "rows_reserve": 1 },
            "limits": { "turn_ms_max": 3_600_000, "queue_wait_ms_max": 60_000 },
            "reports": { "interval_ms": 500 },
            "engine": { "url": "http://127.0.0.1:30000" },
        }),
        description: Some(description(number)),
        engine: Some(Ok(json!({ "enable_cache_report": true, "kv_events_config": kv_events }))),
        ..Asked::default()
    }
}

fn router(number: u32) -> Asked {
    Asked {
        url: format!("http://router-{number}:8080"),
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        clock_ahead_ms: Some(-300),
        fleet: Some(Workers { workers: vec![worker(0), worker(1)], unheard: vec![] }),
        settings: json!({
            "workers": ["http://w0:31001", "http://w1:31001"],
            "listen": { "data_addr": "0.0.0.0:8080" },
            "auth": { "keys_file": "/etc/berth/keys.toml" },
            "claims": { "store": "agents" },
            "connections": { "keep_alive_ms": 75_000 },
            "timeouts": { "turn_ms_max": 1_800_000, "load_report_age_ms_max": 3_000 },
        }),
        ..Asked::default()
    }
}

/// Returns a fleet without a fault.
fn sound_facts() -> Facts {
    Facts {
        routers: vec![router(0), router(1)],
        agents: vec![agent(0), agent(1)],
        descriptors_max: [("berth-agent (pid 7)".to_owned(), 65_536)].into(),
        certificate_days: [("agent.pem".to_owned(), 60)].into(),
        balancer_keep_alive_ms: Some(60_000),
    }
}

fn worker_of(facts: &mut Facts) -> &mut Worker {
    &mut facts.routers[0].fleet.as_mut().unwrap().workers[0]
}

fn refuse(facts: &mut Facts, retention: Retention, reason: &str) {
    let off = RetentionOff { retention, reason: reason.into() };
    worker_of(facts).retentions_off = vec![off];
}

fn device_of(facts: &mut Facts) -> &mut Device {
    &mut worker_of(facts).load.as_mut().unwrap().devices[0]
}

fn described(agent: &mut Asked) -> &mut Description {
    agent.description.as_mut().unwrap()
}

fn set(settings: &mut serde_json::Value, name: &str, value: serde_json::Value) {
    let pointer = format!("/{}", name.replace('.', "/"));
    *settings.pointer_mut(&pointer).unwrap() = value;
}

type Plant = fn(&mut Facts);

/// Each misconfiguration: the check that must find it, and a change of the sound fleet.
const PLANTS: &[(&str, Plant)] = &[
    ("router-unreachable", |f| f.routers[1].reach = Reach::Nothing("refused".into())),
    ("agent-unreachable", |f| f.agents[0].reach = Reach::Nothing("refused".into())),
    ("ports-swapped", |f| f.routers[1].reach = Reach::OtherPort("an admin port")),
    ("ports-swapped", |f| f.agents[1].reach = Reach::OtherPort("an agent's data port")),
    ("credential-refused", |f| f.agents[1].reach = Reach::Refused("no token".into())),
    ("clock-skew", |f| f.agents[1].clock_ahead_ms = Some(-2_001)),
    ("clock-skew", |f| f.routers[1].clock_ahead_ms = Some(90_000)),
    ("version-differs", |f| f.routers[1].version = Some("0.0.1".into())),
    ("worker-stale", |f| worker_of(f).state = "stale".into()),
    ("worker-stale", |f| {
        let unheard = UnheardAgent { control: "http://w2:1".into(), ..UnheardAgent::default() };
        f.routers[0].fleet.as_mut().unwrap().unheard.push(unheard);
    }),
    ("worker-unhealthy", |f| worker_of(f).state = "unhealthy".into()),
    ("drain-left-on", |f| worker_of(f).state = "draining".into()),
    ("restart-required", |f| worker_of(f).restart_required = Some("leaked pages".into())),
    ("agent-id-duplicate", |f| {
        // As the router lists the second one.
        let fleet = f.routers[0].fleet.as_mut().unwrap();
        let rejected = fleet.workers.pop().unwrap();
        let control = rejected.control;
        fleet.unheard.push(UnheardAgent { control, ..UnheardAgent::default() });
        described(&mut f.agents[1]).agent_id = "w0".into();
    }),
    ("engine-shared", |f| worker_of(f).engine.instance = "process-1".into()),
    ("page-size-differs", |f| worker_of(f).engine.page_tokens = 16),
    ("model-differs", |f| worker_of(f).engine.vocabulary = Some(2000)),
    ("model-differs", |f| worker_of(f).engine.context_tokens = 8_192),
    ("tokenizer-differs", |f| {
        described(&mut f.agents[1]).model_files = Some(ModelFiles { hash: [8; 32], bytes: 1 })
    }),
    ("no-tokenizer", |f| described(&mut f.agents[1]).model_files = None),
    ("engine-unreadable", |f| f.agents[1].engine = Some(Err("status 401".into()))),
    ("engine-key-unsent", |f| {
        let Some(Ok(engine)) = &mut f.agents[0].engine else { panic!("it is known") };
        engine["api_key"] = "k".into();
    }),
    ("engine-radix-off", |f| {
        worker_of(f).retentions = vec!["pinned".into(), "none".into()];
        refuse(f, Retention::Tagged, "the engine runs without --enable-session-radix-cache");
    }),
    ("engine-streaming-off", |f| {
        worker_of(f).retentions = vec!["tagged".into(), "none".into()];
        refuse(f, Retention::Pinned, "the engine runs without --enable-streaming-session");
    }),
    ("engine-retention-unsafe", |f| {
        worker_of(f).retentions = vec!["tagged".into(), "none".into()];
        refuse(
            f,
            Retention::Pinned,
            "the engine has a --hicache-storage-backend, and no shim has connected",
        );
    }),
    ("engine-cache-report-off", |f| {
        f.agents[0].engine = Some(Ok(json!({ "enable_cache_report": false })));
    }),
    ("kv-events-off", |f| {
        let reason = Some("start it with --kv-events-config".into());
        worker_of(f).kv = Kv { state: "unknown".into(), reason, ..Kv::default() };
    }),
    ("kv-events-unreachable", |f| {
        let reason = Some("no KV events from tcp://10.0.0.7:5557: refused".into());
        worker_of(f).kv = Kv { state: "unknown".into(), reason, ..Kv::default() };
    }),
    ("kv-replay-missing", |f| {
        f.agents[0].engine = Some(Ok(json!({ "kv_events_config": r#"{"publisher": "zmq"}"# })));
    }),
    ("shim-silent", |f| {
        worker_of(f).load.as_mut().unwrap().pool_used_tokens = figure(1, Source::Loads);
    }),
    ("shim-other-version", |f| {
        described(&mut f.agents[0]).trim_sglang_versions = vec!["0.5.20".into()]
    }),
    ("shim-other-version", |f| {
        described(&mut f.agents[0]).shim_functions_off = vec![FunctionOff {
            function: "demotion".into(),
            reason: "Req.lock is missing on SGLang 0.5.23".into(),
        }];
    }),
    ("pool-too-small", |f| worker_of(f).rank.as_mut().unwrap().pool_tokens = 40_000),
    ("rows-too-few", |f| worker_of(f).rank.as_mut().unwrap().rows = 2),
    ("nvml-missing", |f| {
        *device_of(f) = Device { uuid: "cuda".into(), ..Device::default() };
    }),
    ("gpu-unhealthy", |f| device_of(f).unhealthy = Some("XID 79".into())),
    ("gpu-foreign-process", |f| device_of(f).engine_bytes = figure(60 << 30, Source::Nvml)),
    ("gpu-mig", |f| device_of(f).parent_uuid = Some("GPU-9".into())),
    ("gpu-shared", |f| device_of(f).uuid = "GPU-1".into()),
    ("gpu-readings-old", |f| device_of(f).age_ms = Some(31_000)),
    ("open-without-key", |f| set(&mut f.routers[1].settings, "auth.keys_file", json!(""))),
    ("keep-alive-short", |f| f.balancer_keep_alive_ms = Some(75_000)),
    ("routers-without-claims", |f| {
        for router in &mut f.routers {
            set(&mut router.settings, "claims.store", json!("memory"));
        }
    }),
    ("claims-differ", |f| set(&mut f.routers[1].settings, "claims.store", json!("redis"))),
    ("timeouts-contradict", |f| {
        set(&mut f.agents[0].settings, "limits.turn_ms_max", json!(600_000));
    }),
    ("timeouts-contradict", |f| {
        set(&mut f.agents[0].settings, "limits.queue_wait_ms_max", json!(3_600_000));
    }),
    ("timeouts-contradict", |f| {
        set(&mut f.agents[0].settings, "reports.interval_ms", json!(2_000));
    }),
    ("workers-differ", |f| set(&mut f.routers[1].settings, "workers", json!(["http://w0:31001"]))),
    ("descriptors-few", |f| f.descriptors_max.values_mut().for_each(|most| *most = 1_024)),
    ("certificate-expiring", |f| f.certificate_days.values_mut().for_each(|days| *days = 13)),
    ("certificate-expiring", |f| f.certificate_days.values_mut().for_each(|days| *days = -1)),
];

fn ids(facts: &Facts) -> BTreeSet<&'static str> {
    diagnose(facts).into_iter().map(|finding| finding.id).collect()
}

#[test]
fn a_sound_fleet_has_no_finding_and_neither_has_an_unknown_one() {
    assert_eq!(diagnose(&sound_facts()), []);
    assert_eq!(diagnose(&Facts::default()), []);
}

#[test]
fn each_planted_misconfiguration_is_found_alone_and_names_what_to_change() {
    for (number, (id, plant)) in PLANTS.iter().enumerate() {
        let mut facts = sound_facts();
        plant(&mut facts);
        assert_eq!(ids(&facts), BTreeSet::from([*id]), "plant {number}");
        for finding in diagnose(&facts) {
            assert!(!finding.fix.is_empty() && !finding.about.is_empty(), "{finding:?}");
        }
    }
}

#[test]
fn what_makes_no_difference_is_no_finding() {
    let mut facts = sound_facts();
    let other_order = json!(["http://w1:31001/", "http://w0:31001"]);
    set(&mut facts.routers[1].settings, "workers", other_order);
    let settings = &mut facts.routers[0].settings;
    set(settings, "listen.data_addr", json!("[::ffff:127.0.0.1]:8080"));
    set(settings, "auth.keys_file", json!(""));
    // One agent under two addresses.
    facts.agents[1].description = facts.agents[0].description.clone();
    assert_eq!(diagnose(&facts), []);
}

#[test]
fn an_agent_that_isn_t_heard_has_the_line_for_its_own_fault() {
    for (reach, id, line) in [
        (Reach::Refused("no token".into()), None, "auth.token_file"),
        (Reach::Port, None, "engine.url"),
        (Reach::Port, Some("w2"), "each agent once"),
        (Reach::Nothing("refused".into()), None, "listen.control_addr"),
    ] {
        let mut facts = sound_facts();
        let control = "http://w2:31001".to_owned();
        let unheard = UnheardAgent { control: control.clone(), ..UnheardAgent::default() };
        facts.routers[0].fleet.as_mut().unwrap().unheard.push(unheard);
        let description = id.map(|id| Description { agent_id: id.into(), ..description(2) });
        facts.agents.push(Asked { url: control.clone(), reach, description, ..agent(2) });
        let stale = diagnose(&facts).into_iter().find(|it| it.id == "worker-stale").unwrap();
        assert_eq!(stale.about, control);
        assert!(stale.fix.contains(line), "{stale:?}");
    }
}

#[test]
fn every_check_is_planted_and_stands_once() {
    let planted: BTreeSet<&str> = PLANTS.iter().map(|(id, _)| *id).collect();
    let checks: Vec<&str> = all_checks().map(|check| check.id).collect();
    let distinct: BTreeSet<&str> = checks.iter().copied().collect();
    assert_eq!(checks.len(), distinct.len());
    assert_eq!(planted, distinct);
    assert!(checks.len() >= 20, "{}", checks.len());
}

#[test]
fn faults_come_before_warnings() {
    let mut facts = sound_facts();
    worker_of(&mut facts).engine.page_tokens = 16;
    facts.certificate_days.values_mut().for_each(|days| *days = 1);
    let severities: Vec<Severity> =
        diagnose(&facts).into_iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Severity::Fault, Severity::Warning]);
}
