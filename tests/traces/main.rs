//! Tests of traces: one for each turn, over router, agent and engine, as a collector gets them.

#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

mod collector;

use engine_sim::{kv::KvEventsConfig, loopback::own_addr};
use harness::cluster::{Cluster, ClusterSettings, eventually, ids_turn, text_turn};
use serde_json::{Value, json};
use service::traces::settings::TracesTable;

use self::collector::{Collector, SeenSpan};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT_SPAN: &str = "b7ad6b7169203331";
/// All spans of a turn that isn't staged.
const OF_A_TURN: [&str; 9] = [
    "router/turn",
    "router/receive",
    "router/decide",
    "router/send",
    "router/stream",
    "agent/turn",
    "agent/queue",
    "agent/engine",
    "agent/stream",
];

/// Makes router and agents export to `endpoint`. The agents would trace each turn.
fn export_to(settings: &mut ClusterSettings, endpoint: &str, router_ratio: f64) {
    let table = |sample_ratio| TracesTable {
        endpoint: endpoint.to_owned(),
        sample_ratio,
        ..TracesTable::default()
    };
    settings.agent.traces = table(1.0);
    if let Some(router) = &mut settings.router {
        router.traces = table(router_ratio);
    }
}

async fn start(collector: &Collector, router_ratio: f64) -> Cluster {
    let url = collector.url();
    Cluster::start(1, |settings| export_to(settings, &url, router_ratio)).await.unwrap()
}

fn sent(flags: &str) -> String {
    format!("00-{TRACE}-{CLIENT_SPAN}-{flags}")
}

/// Returns the only span of this name.
fn only<'a>(spans: &'a [SeenSpan], name: &str) -> &'a SeenSpan {
    let mut found = spans.iter().filter(|span| span.name() == name);
    let span = found.next().unwrap_or_else(|| panic!("no {name} in {spans:?}"));
    assert!(found.next().is_none(), "{name} is there twice");
    span
}

fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the header of each request that the engine got for a turn.
fn engine_saw(cluster: &Cluster, header: &str) -> Vec<String> {
    let value = |headers: &http::HeaderMap| {
        headers.get(header).map_or("", |value| value.to_str().unwrap()).to_owned()
    };
    cluster.engine().headers_seen("/generate").iter().map(value).collect()
}

#[tokio::test]
async fn a_turn_is_one_trace_from_the_client_to_the_engine() {
    let collector = Collector::start().await;
    let cluster = start(&collector, 0.0).await;
    let context = sent("01");
    let headers = [
        ("traceparent", context.as_str()),
        ("tracestate", "other=1"),
        ("authorization", "Bearer a-private-key"),
        ("x-berth-session-id", "a-private-name"),
        ("x-request-id", "a-private-request"),
    ];
    let turn = text_turn("a private prompt", 3);
    let answer = cluster.turn("/generate", &headers, &turn).await;
    let spans = collector.wait_for(&OF_A_TURN).await;
    assert_eq!(spans.len(), OF_A_TURN.len(), "{spans:?}");
    let parents = [
        ("router/receive", "router/turn"),
        ("router/decide", "router/turn"),
        ("router/send", "router/turn"),
        ("router/stream", "router/turn"),
        ("agent/turn", "router/send"),
        ("agent/queue", "agent/turn"),
        ("agent/engine", "agent/turn"),
        ("agent/stream", "agent/turn"),
    ];
    for (child, parent) in parents {
        let (child, parent) = (&only(&spans, child).span, &only(&spans, parent).span);
        assert_eq!(child.parent_span_id, parent.span_id, "{} of {}", child.name, parent.name);
    }
    for SeenSpan { service, span } in &spans {
        assert_eq!(hex(&span.trace_id), TRACE);
        assert_eq!(span.trace_state, "other=1");
        assert!(span.status.as_ref().is_none_or(|status| status.code == 0), "{span:?}");
        let root = &only(&spans, &format!("{}/turn", service.replace("berth-", ""))).span;
        assert!(root.start_time_unix_nano <= span.start_time_unix_nano, "{span:?} in {root:?}");
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
        assert!(span.end_time_unix_nano <= root.end_time_unix_nano, "{span:?} in {root:?}");
    }
    let root = only(&spans, "router/turn");
    assert_eq!(hex(&root.span.parent_span_id), CLIENT_SPAN);
    let engine_span = hex(&only(&spans, "agent/engine").span.span_id);
    assert_eq!(engine_saw(&cluster, "traceparent"), [format!("00-{TRACE}-{engine_span}-01")]);
    assert_eq!(engine_saw(&cluster, "tracestate"), ["other=1"]);
    assert_eq!(root.attribute("http.route"), "/generate");
    assert_eq!(root.attribute("http.response.status_code"), "200");
    assert_eq!(root.attribute("berth.outcome"), "ok");
    assert_eq!(root.attribute("berth.turn"), answer.header("x-berth-turn"));
    assert_eq!(root.attribute("berth.worker"), answer.header("x-berth-worker"));
    assert_eq!(root.attribute("berth.placement.reason"), answer.header("x-berth-placement"));
    assert_eq!(root.attribute("berth.session").len(), 16);
    assert_eq!(root.attribute("berth.output_tokens"), "3");
    let at_agent = only(&spans, "agent/turn");
    assert_eq!(at_agent.attribute("berth.turn"), answer.header("x-berth-turn"));
    assert_eq!(at_agent.attribute("berth.outcome"), "finished");
    assert_eq!(at_agent.attribute("berth.output_tokens"), "3");
    assert!(collector.has_seen("/generate") && collector.has_seen("other=1"));
    assert!(!collector.has_seen("private"), "{spans:?}");
}

#[tokio::test]
async fn what_nobody_samples_is_not_exported_and_its_context_passes_on() {
    let collector = Collector::start().await;
    let cluster = start(&collector, 0.0).await;
    let unsampled = sent("00");
    cluster.turn("/generate", &[("traceparent", unsampled.as_str())], &text_turn("a", 2)).await;
    cluster.turn("/generate", &[], &text_turn("a", 2)).await;
    cluster.turn("/generate", &[("traceparent", "00-nonsense")], &text_turn("a", 2)).await;
    // What comes later than the others' spans would.
    cluster.turn("/generate", &[("traceparent", sent("01").as_str())], &text_turn("a", 2)).await;
    let spans = collector.wait_for(&OF_A_TURN).await;
    assert_eq!(spans.len(), OF_A_TURN.len(), "{spans:?}");
    let contexts = engine_saw(&cluster, "traceparent");
    let [first, second, third, _] = &contexts[..] else { panic!("four turns") };
    assert_eq!(*first, unsampled);
    for new in [second, third] {
        assert!(new.len() == unsampled.len() && new.ends_with("-00"), "{new}");
        assert!(!new.contains(TRACE));
    }
    let metrics = cluster.web.get(&cluster.routers[0].admin_url("/metrics")).await.unwrap().text();
    assert!(!metrics.contains("spans_dropped_total{"), "{metrics}");
}

#[tokio::test]
async fn a_ratio_of_one_traces_each_turn_and_tells_why_one_was_refused() {
    let collector = Collector::start().await;
    let cluster = start(&collector, 1.0).await;
    let refused = cluster.post("/generate", &[], &json!("no object")).await;
    let spans = collector.wait_for(&["router/turn", "router/receive"]).await;
    assert_eq!(spans.len(), 2, "it was not placed: {spans:?}");
    let root = only(&spans, "router/turn");
    assert!(root.span.parent_span_id.is_empty());
    assert_eq!(root.attribute("error.type"), refused.code());
    assert_eq!(root.attribute("http.response.status_code"), "400");
    assert_eq!(root.keys(), ["http.route", "error.type", "http.response.status_code"]);
}

#[tokio::test]
async fn without_tracing_a_clients_context_reaches_the_engine_as_it_is() {
    let cluster = Cluster::start(1, |_| ()).await.unwrap();
    let headers = [("traceparent", "any text"), ("tracestate", "other=1")];
    cluster.turn("/generate", &headers, &text_turn("a", 2)).await;
    assert_eq!(engine_saw(&cluster, "traceparent"), ["any text"]);
    assert_eq!(engine_saw(&cluster, "tracestate"), ["other=1"]);
    let metrics = cluster.agent_metrics().await;
    assert!(!metrics.contains("spans"), "{metrics}");
}

#[tokio::test]
async fn turns_go_on_without_a_collector_and_are_traced_when_it_is_back() {
    let listener = std::net::TcpListener::bind(own_addr()).unwrap();
    let addr = listener.local_addr().unwrap();
    drop(listener);
    let url = format!("http://{addr}");
    let cluster = Cluster::start(1, |settings| export_to(settings, &url, 1.0)).await.unwrap();
    cluster.turn("/generate", &[], &text_turn("a", 2)).await;
    let (web, router) = (&cluster.web, &cluster.routers[0]);
    for (page, name) in
        [(router.admin_url("/metrics"), "router"), (cluster.agent().admin_url("/metrics"), "agent")]
    {
        let line = format!("berth_{name}_spans_dropped_total{{reason=\"export_failed\"}} ");
        eventually("dropped spans", || async {
            let metrics = web.get(&page).await.unwrap().text();
            let count = metrics.lines().find_map(|found| found.strip_prefix(&*line))?;
            (count.parse::<u64>().unwrap() >= 1).then_some(())
        })
        .await;
    }
    let collector = Collector::start_at(addr).await;
    cluster.turn("/generate", &[], &text_turn("a", 2)).await;
    collector.wait_for(&OF_A_TURN).await;
}

#[tokio::test]
async fn spans_that_wait_are_exported_before_the_process_ends() {
    let collector = Collector::start().await;
    let mut cluster = start(&collector, 1.0).await;
    cluster.turn("/generate", &[], &text_turn("a", 2)).await;
    let (router, agent) = (cluster.routers.remove(0), cluster.agents.remove(0));
    router.stop().await.unwrap();
    let names: Vec<String> = collector.spans().iter().map(SeenSpan::name).collect();
    assert!(names.iter().any(|name| name == "router/turn"), "{names:?}");
    agent.stop().await.unwrap();
    let names: Vec<String> = collector.spans().iter().map(SeenSpan::name).collect();
    assert!(OF_A_TURN.iter().all(|name| names.iter().any(|seen| seen == name)), "{names:?}");
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_spans() {
    let collector = Collector::start().await;
    let cluster = start(&collector, 1.0).await;
    cluster.slow_down(0.05).await;
    drop(cluster.stream("/generate", &[], text_turn("a", 400)).await);
    cluster.slow_down(0.0).await;
    let spans = collector.wait_for(&OF_A_TURN).await;
    assert_eq!(only(&spans, "router/turn").attribute("berth.outcome"), "client_gone");
    assert_eq!(only(&spans, "agent/turn").attribute("berth.outcome"), "aborted");
}

#[tokio::test]
async fn stages_of_a_long_prompt_are_in_its_turns_trace() {
    let collector = Collector::start().await;
    let url = collector.url();
    let started = Cluster::start(1, |settings| {
        export_to(settings, &url, 1.0);
        settings.agent.engine.prefill_stage_ms = 100;
        settings.engine.kv_events = Some(KvEventsConfig::local());
        let config = &mut settings.engine.core;
        (config.page_size, config.prefill_tokens_per_s) = (16, 20_000.0);
        (config.max_total_tokens, config.context_len) = (1 << 17, 1 << 16);
    });
    let cluster = started.await.unwrap();
    let live = |worker: &Value| worker["kv"]["state"] == "live";
    cluster.wait_for_worker(0, "the engine's blocks are told", live).await;
    let prompt: Vec<u32> = (0..30_000).map(|place| place % 300).collect();
    cluster.turn("/generate", &[], &ids_turn(&prompt, 2)).await;
    let spans = collector.wait_for(&OF_A_TURN).await;
    let root = &only(&spans, "router/turn").span;
    let at_router = &only(&spans, "router/staged_prefill").span;
    let at_agent = &only(&spans, "agent/staged_prefill").span;
    assert_eq!(at_router.parent_span_id, root.span_id);
    assert_eq!(at_agent.parent_span_id, at_router.span_id);
    let stages: Vec<&SeenSpan> = spans.iter().filter(|span| span.name() == "agent/stage").collect();
    assert!(!stages.is_empty(), "{spans:?}");
    let engine_contexts = engine_saw(&cluster, "traceparent");
    assert_eq!(engine_contexts.len(), stages.len() + 1);
    for SeenSpan { span: stage, .. } in stages {
        assert_eq!(stage.parent_span_id, at_agent.span_id);
        let engine = spans.iter().find(|span| {
            span.name() == "agent/engine" && span.span.parent_span_id == stage.span_id
        });
        let engine_span = hex(&engine.unwrap().span.span_id);
        assert!(engine_contexts.iter().any(|context| context.contains(&engine_span)));
    }
    assert!(spans.iter().all(|span| span.span.trace_id == root.trace_id));
}
