//! Plans files for made-up engines, and checks what is in them.

use serde_json::json;

use super::{
    host::{EngineEnvironment, HostGpu},
    *,
};
use crate::flags;

fn engine(port: u16, patch: &serde_json::Value) -> FoundEngine {
    let config = r#"{"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557","replay_endpoint":"x"}"#;
    let mut info = json!({
        "version": "0.5.23", "served_model_name": "m", "page_size": 16, "context_length": 1024,
        "max_total_num_tokens": 2048, "max_running_requests": 8, "device": "cuda",
        "enable_streaming_session": true, "enable_session_radix_cache": true,
        "enable_cache_report": true, "kv_events_config": config,
    });
    for (key, value) in patch.as_object().unwrap() {
        info[key] = value.clone();
    }
    FoundEngine::parse(&format!("http://127.0.0.1:{port}"), port, &info).unwrap()
}

fn process(user: &str, unit: Option<&str>) -> EngineProcess {
    let environment = EngineEnvironment {
        visible_devices: Some("1".into()),
        shim_socket: Some("/run/mine/shim.sock".into()),
        ..EngineEnvironment::default()
    };
    EngineProcess {
        pid: Some(7),
        uid: 998,
        user: Some(user.into()),
        unit: unit.map(str::to_owned),
        environment: Some(environment),
    }
}

fn host() -> Host {
    let gpu = |number: u32| HostGpu { uuid: Some(format!("GPU-{number}")), model: "H100".into() };
    Host { name: "node-1".into(), gpus: vec![gpu(0), gpu(1)], ports_taken: vec![] }
}

fn wishes(supervisor: Supervisor, address: Option<&str>) -> Wishes {
    Wishes {
        supervisor,
        address: address.map(str::to_owned),
        other_agents: vec![],
        token_file: None,
        folder: "/w/berth".into(),
    }
}

/// Returns the text of a planned file.
fn text<'a>(plan: &'a Plan, name: &str) -> &'a str {
    let found = plan.files.iter().find(|file| file.name == name);
    match found.map(|file| &file.content) {
        Some(Content::Text(text) | Content::Script(text)) => text,
        other => panic!("{name}: {other:?}"),
    }
}

fn toml(plan: &Plan, name: &str) -> toml::Table {
    text(plan, name).parse().unwrap_or_else(|error| panic!("{error}: {}", text(plan, name)))
}

fn plan_one(patch: &serde_json::Value, wishes: &Wishes) -> Plan {
    let found = vec![(engine(30_000, patch), Some(process("sglang", None)))];
    plan(found, &host(), wishes).unwrap()
}

#[test]
fn one_engine_of_this_host_alone_has_one_agent_on_loopback() {
    let plan = plan_one(&json!({}), &wishes(Supervisor::None, None));
    let names: Vec<&str> = plan.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["agent.toml", "router.toml"]);
    let agent = toml(&plan, "agent.toml");
    assert_eq!(agent["worker_id"].as_str(), Some("node-1-30000"));
    assert_eq!(agent["engine"]["url"].as_str(), Some("http://127.0.0.1:30000"));
    assert_eq!(agent["listen"]["control_addr"].as_str(), Some("127.0.0.1:31001"));
    assert_eq!(agent["files"]["shim_socket"].as_str(), Some("/run/mine/shim.sock"));
    assert_eq!(agent["gpu"]["devices"].as_array().unwrap()[0].as_str(), Some("GPU-1"));
    assert!(!agent.contains_key("sessions") && !agent.contains_key("auth"), "{agent}");
    let workers = toml(&plan, "router.toml")["workers"].clone();
    assert_eq!(workers.as_array().unwrap()[0].as_str(), Some("http://127.0.0.1:31001"));
    assert!(plan.next[0].contains("berth-agent --config /w/berth/agent.toml"), "{:?}", plan.next);
    assert_eq!(plan.notes, Vec::<String>::new());
}

#[test]
fn agents_of_a_fleet_listen_for_routers_and_want_a_token() {
    for (address, listen, control) in [
        ("node-1", "0.0.0.0:31001", "http://node-1:31001"),
        ("fd00::7", "[::]:31001", "http://[fd00::7]:31001"),
    ] {
        let mut wishes = wishes(Supervisor::None, Some(address));
        wishes.other_agents = vec!["http://node-2:31001".into()];
        let plan = plan_one(&json!({}), &wishes);
        let (agent, router) = (toml(&plan, "agent.toml"), toml(&plan, "router.toml"));
        assert_eq!(agent["listen"]["control_addr"].as_str(), Some(listen));
        assert_eq!(agent["listen"]["admin_addr"].as_str(), Some("127.0.0.1:31002"));
        assert_eq!(agent["advertise"]["host"].as_str(), Some(address));
        let workers: Vec<&str> =
            router["workers"].as_array().unwrap().iter().filter_map(|it| it.as_str()).collect();
        assert_eq!(workers, [control, "http://node-2:31001"]);
        let token = "/w/berth/router-token";
        assert_eq!(agent["auth"]["token_file"].as_str(), Some(token));
        assert_eq!(router["agents"]["token_file"].as_str(), Some(token));
        assert!(plan.files.iter().any(|file| file.content == Content::Token));
        assert!(plan.notes[0].contains("--token-file"), "{:?}", plan.notes);
    }
}

#[test]
fn each_missing_flag_is_in_the_file_with_the_line_to_add() {
    let lacking = json!({
        "enable_streaming_session": false, "enable_session_radix_cache": false,
        "enable_cache_report": false, "kv_events_config": null, "dp_size": 2,
    });
    let plan = plan_one(&lacking, &wishes(Supervisor::None, None));
    let text = text(&plan, "agent.toml");
    for flag in [flags::STREAMING_SESSION, flags::SESSION_RADIX_CACHE, flags::CACHE_REPORT] {
        assert!(text.contains(&format!("#   {}\n", flag.name)), "{text}");
        assert!(text.replace("\n#", "").contains(flag.why), "{}: {text}", flag.why);
    }
    assert!(text.contains(&flags::kv_events_flag(5557, 5559)), "each rank has a port: {text}");
    let all = plan_one(&json!({}), &wishes(Supervisor::None, None));
    assert!(!super::tests::text(&all, "agent.toml").contains("Start the engine"));
}

#[test]
fn pinned_sessions_get_as_much_of_the_pool_as_a_whole_session_needs() {
    for (context, ratio) in
        [(1024, None), (1433, None), (1434, Some(0.71)), (1843, Some(0.9)), (1844, None)]
    {
        let plan = plan_one(&json!({ "context_length": context }), &wishes(Supervisor::None, None));
        let agent = toml(&plan, "agent.toml");
        let written = agent.get("sessions").and_then(|it| it.get("pin_budget_ratio"));
        assert_eq!(written.and_then(toml::Value::as_float), ratio, "{context}");
        let warns = text(&plan, "agent.toml").contains("--mem-fraction-static");
        assert_eq!(warns, context == 1844, "{context}");
    }
    let few = plan_one(&json!({ "max_running_requests": 2 }), &wishes(Supervisor::None, None));
    assert!(text(&few, "agent.toml").contains("--max-running-requests"));
}

#[test]
fn several_engines_have_files_ports_and_units_of_their_own() {
    let found = [30_001, 30_000].map(|port| {
        let process = Some(process("alice", Some("sglang-a.service")));
        (engine(port, &json!({ "kv_events_config": null })), process)
    });
    let plan = plan(found.to_vec(), &host(), &wishes(Supervisor::Systemd, Some("node-1"))).unwrap();
    for (file, port, control) in [
        ("agent-30000.toml", "30000", "0.0.0.0:31001"),
        ("agent-30001.toml", "30001", "0.0.0.0:31011"),
    ] {
        let agent = toml(&plan, file);
        assert_eq!(agent["listen"]["control_addr"].as_str(), Some(control));
        let socket = format!("/run/berth/{port}/engine.sock");
        assert_eq!(agent["files"]["shim_socket"].as_str(), Some(socket.as_str()));
        let state = format!("/var/lib/berth/{port}");
        assert_eq!(agent["files"]["state_dir"].as_str(), Some(state.as_str()));
        assert_eq!(agent["auth"]["token_file"].as_str(), Some("/etc/berth/router-token"));
        let drop_in = text(&plan, &format!("systemd/berth-agent@{port}.service.d/init.conf"));
        assert!(drop_in.contains("User=alice") && drop_in.contains("After=sglang-a.service"));
    }
    let names: Vec<&str> = plan.files.iter().map(|file| file.name.as_str()).collect();
    assert!(!names.contains(&"systemd/sglang-a.service.d/berth.conf"), "two agents: {names:?}");
    let (first, second) = (text(&plan, "agent-30000.toml"), text(&plan, "agent-30001.toml"));
    assert!(first.contains("127.0.0.1:5557") && second.contains("127.0.0.1:5559"), "{second}");
    let template = text(&plan, "systemd/berth-agent@.service");
    for line in [
        "ExecStart=/usr/bin/berth-agent --config /etc/berth/agent-%i.toml --handover",
        "StateDirectory=berth/%i",
        "RuntimeDirectory=berth/%i",
    ] {
        assert!(template.lines().any(|it| it == line), "{line}: {template}");
    }
    let script = text(&plan, "install.sh");
    assert!(script.contains("berth-agent@30000.service berth-agent@30001.service"), "{script}");
}

#[test]
fn one_agent_uses_the_package_s_unit() {
    let plan = plan_one(&json!({ "api_key": "secret" }), &wishes(Supervisor::Systemd, None));
    assert!(!plan.files.iter().any(|file| file.name.starts_with("systemd/")), "{:?}", plan.files);
    let script = text(&plan, "install.sh");
    assert!(script.contains("enable --now berth-agent.service berth-router.service"), "{script}");
    assert!(script.contains("BERTH_ENGINE_API_KEY"), "{script}");
    assert!(plan.files.iter().all(|file| !format!("{:?}", file.content).contains("secret")));
    let found = vec![(engine(30_000, &json!({})), Some(process("sglang", Some("a.service"))))];
    let plan = super::plan(found, &host(), &wishes(Supervisor::Systemd, None)).unwrap();
    let drop_in = text(&plan, "systemd/a.service.d/berth.conf");
    assert!(drop_in.contains("Environment=BERTH_SHIM_SOCKET=/run/berth/engine.sock"), "{drop_in}");
    let strange = process("a b; rm -rf /", Some("x y.service"));
    let found = vec![(engine(30_000, &json!({})), Some(strange))];
    let plan = super::plan(found, &host(), &wishes(Supervisor::Systemd, None)).unwrap();
    assert!(!format!("{:?}", plan.files).contains("rm -rf"), "no name becomes a command");
}

#[test]
fn the_chart_takes_one_engine_of_a_node() {
    let plan = plan_one(
        &json!({ "api_key": "k", "context_length": 1500 }),
        &wishes(Supervisor::Helm, None),
    );
    let values = text(&plan, "values.yaml");
    for line in [
        "    enginePort: 30000",
        "    runAsUser: 998",
        "      pin_budget_ratio: 0.74",
        "  apiKeySecret: berth-engine-key",
    ] {
        assert!(values.lines().any(|it| it == line), "{line}: {values}");
    }
    let two = [30_000, 30_001].map(|port| (engine(port, &json!({})), None));
    let why = super::plan(two.to_vec(), &host(), &wishes(Supervisor::Helm, None)).unwrap_err();
    assert!(why.contains("30000, 30001") && why.contains("--engine"), "{why}");
}

#[test]
fn what_others_chose_can_t_leave_its_comment_or_string() {
    let name = "m\nlisten.data_addr = \"0.0.0.0:1\"\u{1b}";
    let patch = json!({ "served_model_name": name, "version": "1\n2" });
    for supervisor in [Supervisor::None, Supervisor::Helm, Supervisor::Systemd] {
        let plan = plan_one(&patch, &wishes(supervisor, None));
        let agent = toml(&plan, "agent.toml");
        assert_eq!(agent["listen"]["data_addr"].as_str(), Some("127.0.0.1:31000"));
        for file in &plan.files {
            let shown = format!("{:?}", file.content);
            assert!(!shown.contains("\\u{1b}") || shown.contains("\\\\u{1b}"), "{shown}");
        }
    }
}

#[test]
fn ports_that_are_taken_and_halves_of_pairs_are_noted() {
    let taken = Host { ports_taken: vec![31_001, 9000], ..host() };
    let prefill =
        json!({ "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998 });
    let found = vec![(engine(30_000, &prefill), None)];
    let plan = super::plan(found, &taken, &wishes(Supervisor::None, None)).unwrap();
    assert!(plan.notes[0].contains("31001") && !plan.notes[0].contains("9000"), "{:?}", plan.notes);
    assert!(plan.notes[1].contains("half of a pair"), "{:?}", plan.notes);
    assert!(text(&plan, "agent.toml").contains("bootstrap port 8998"));
}

#[test]
fn an_agent_s_id_is_one_that_agents_take() {
    assert_eq!(worker_id("node_1.fleet", 5), "node_1.fleet-5");
    assert_eq!(worker_id("\u{fc}!", 5), "node-5");
    assert_eq!(worker_id(&"a".repeat(300), 65_535).len(), 128);
}

#[test]
fn each_plan_can_be_written() {
    let lacking = json!({
        "enable_streaming_session": false, "enable_cache_report": false, "dp_size": 2,
        "kv_events_config": r#"{"publisher":"zmq","endpoint":"tcp://*:5557"}"#,
    });
    let patches = [
        json!({}),
        lacking,
        json!({ "context_length": 1500, "api_key": "k", "device": "cpu" }),
        json!({ "context_length": 1844, "max_running_requests": 2 }),
        json!({ "disaggregation_mode": "decode" }),
        json!({ "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998 }),
    ];
    let unread = EngineProcess { user: None, environment: None, ..process("", None) };
    let processes = [None, Some(process("alice", Some("a.service"))), Some(unread)];
    for patch in &patches {
        for process in &processes {
            for supervisor in [Supervisor::None, Supervisor::Helm, Supervisor::Systemd] {
                for address in [None, Some("node-1")] {
                    let found = vec![(engine(30_000, patch), process.clone())];
                    let plan = super::plan(found, &host(), &wishes(supervisor, address)).unwrap();
                    toml(&plan, "agent.toml");
                    toml(&plan, "router.toml");
                    let said = [plan.notes.as_slice(), &plan.next].concat();
                    let written = format!("{said:?} {:?}", plan.files);
                    assert!(!written.contains("{%") && !written.contains("none"), "{written}");
                    assert!(said.iter().all(|line| !line.is_empty()), "{said:?}");
                }
            }
        }
    }
}
