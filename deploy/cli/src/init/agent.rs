//! Writes the settings of an agent, each with the reason why it is there. Pure.

use std::fmt::Write as _;

use super::{
    AgentPlan, Paths, Wishes,
    engine::{EngineRole, FoundEngine},
    quoted,
};
use crate::{
    flags::{self, EngineFlag},
    text::clean,
};

/// The agent's default of `sessions.pin_budget_ratio`.
const PIN_BUDGET_PERCENT: u64 = 70;
/// The rest of the pool is for running turns.
const PIN_BUDGET_PERCENT_MAX: u64 = 90;
/// With 3 rows two sessions can be pinned: the agent keeps one free.
const ROWS_MIN: u64 = 3;

#[must_use]
pub fn settings(agent: &AgentPlan, paths: &Paths, wishes: &Wishes) -> String {
    let engine = &agent.engine;
    let mut text = format!(
        "# Settings of berth-agent beside the engine at {}: SGLang {}, model {}.\n\
         # Written by berth init {}. Keys left out have defaults;\n\
         # berth-agent --check-config shows them.\n\n\
         # Unique in the fleet: this host, and the engine's port.\n\
         worker_id = {}\n\n\
         [engine]\n",
        clean(&engine.url),
        clean(&engine.version),
        clean(&engine.model),
        env!("CARGO_PKG_VERSION"),
        quoted(&agent.worker_id),
    );
    comment(&mut text, &sizes(engine));
    if engine.wants_key {
        comment(
            &mut text,
            "The engine wants its --api-key: set BERTH_ENGINE_API_KEY in the agent's environment.",
        );
    }
    let _ = writeln!(text, "url = {}", quoted(&engine.url));
    for flag in missing_flags(agent) {
        text.push('\n');
        comment(&mut text, &format!("Start the engine with this too, for without it {}:", flag.1));
        let _ = writeln!(text, "#   {}", flag.0);
    }
    if engine.exposes_kv_events() {
        text.push('\n');
        comment(
            &mut text,
            "Other hosts reach the engine's KV events, which have the token ids of prompts: start \
             it with an endpoint tcp://127.0.0.1:PORT in --kv-events-config.",
        );
    }
    write_listen(&mut text, agent, paths, wishes);
    write_sessions(&mut text, engine);
    write_files(&mut text, agent, paths);
    write_gpu(&mut text, agent);
    text
}

/// The flags as they are given, each with what its lack costs.
#[must_use]
pub fn missing_flags(agent: &AgentPlan) -> Vec<(String, &'static str)> {
    let port = agent.kv_events_port;
    let whole = |flag: EngineFlag| match flag {
        flags::KV_EVENTS | flags::KV_REPLAY => {
            flags::kv_events_flag(port, port.saturating_add(agent.engine.ranks))
        }
        flag => flag.name.to_owned(),
    };
    let missing = agent.engine.missing_flags();
    missing.into_iter().map(|flag| (whole(flag), flag.why)).collect()
}

/// Pinned sessions need this share of the pool so that one session of full length fits. `None`: the
/// default does, or no share would.
#[must_use]
pub fn pin_budget_percent(engine: &FoundEngine) -> Option<u64> {
    let whole = engine.context_tokens.checked_mul(100)?;
    let percent = whole.div_ceil(engine.pool_tokens.max(1));
    (PIN_BUDGET_PERCENT + 1..=PIN_BUDGET_PERCENT_MAX).contains(&percent).then_some(percent)
}

fn sizes(engine: &FoundEngine) -> String {
    let FoundEngine { pool_tokens, page_tokens, rows, context_tokens, .. } = engine;
    let ranks = match engine.ranks {
        1 => String::new(),
        ranks => format!("{ranks} ranks, each with "),
    };
    let role = match (engine.role, engine.bootstrap_port) {
        (EngineRole::Aggregated, _) => String::new(),
        (EngineRole::Prefill, Some(port)) => {
            format!("; it computes prompts for other engines, bootstrap port {port}")
        }
        (EngineRole::Prefill, None) => "; it computes prompts for other engines".into(),
        (EngineRole::Decode, _) => "; other engines compute its prompts".into(),
    };
    format!(
        "The engine has {ranks}{pool_tokens} tokens of KV in pages of {page_tokens} and {rows} \
         request rows, for prompts and answers of {context_tokens} tokens{role}."
    )
}

fn write_listen(text: &mut String, agent: &AgentPlan, paths: &Paths, wishes: &Wishes) {
    let [data, control, admin] = agent.ports;
    text.push_str("\n[listen]\n");
    let host = match &wishes.address {
        None => {
            comment(text, "For a router on this host. For a fleet: berth init --address HOST.");
            "127.0.0.1"
        }
        Some(address) if address.contains(':') => "[::]",
        Some(_) => "0.0.0.0",
    };
    let _ = writeln!(text, "data_addr = \"{host}:{data}\"\ncontrol_addr = \"{host}:{control}\"");
    comment(text, "Metrics and health. Other hosts may read them with keys: auth.keys_file.");
    let _ = writeln!(text, "admin_addr = \"127.0.0.1:{admin}\"");
    let Some(address) = &wishes.address else { return };
    text.push_str("\n[advertise]\n");
    comment(text, "Where routers of other hosts reach the ports above.");
    let _ = writeln!(text, "host = {}", quoted(address));
    if let Some(token_file) = &paths.token_file {
        text.push_str("\n[auth]\n");
        comment(
            text,
            "Whoever reaches the ports must show this token. Routers have the same file.",
        );
        let _ = writeln!(text, "token_file = {}", quoted(token_file));
    }
}

fn write_sessions(text: &mut String, engine: &FoundEngine) {
    if engine.role != EngineRole::Aggregated {
        // Half of a pair pins nothing.
        return;
    }
    let FoundEngine { pool_tokens, context_tokens, rows, .. } = engine;
    let mut table = String::new();
    if let Some(percent) = pin_budget_percent(engine) {
        comment(
            &mut table,
            &format!(
                "One session of {context_tokens} tokens must fit into the share of {pool_tokens} \
                 that pinned sessions may hold. The default is 0.{PIN_BUDGET_PERCENT}."
            ),
        );
        let _ = writeln!(table, "pin_budget_ratio = 0.{percent:02}");
    } else if context_tokens * 100 > pool_tokens * PIN_BUDGET_PERCENT {
        comment(
            &mut table,
            &format!(
                "A session of {context_tokens} tokens takes more than pinned sessions may hold of \
                 {pool_tokens}: start the engine with a larger --mem-fraction-static or a smaller \
                 --context-length."
            ),
        );
    }
    if *rows < ROWS_MIN {
        comment(
            &mut table,
            &format!(
                "{rows} request rows are too few to pin sessions: start the engine with a larger \
                 --max-running-requests."
            ),
        );
    }
    if !table.is_empty() {
        let _ = write!(text, "\n[sessions]\n{table}");
    }
}

fn write_files(text: &mut String, agent: &AgentPlan, paths: &Paths) {
    text.push_str("\n[files]\n");
    match paths.state_dir(agent) {
        Some(folder) => {
            comment(text, "The journal of open sessions.");
            let _ = writeln!(text, "state_dir = {}", quoted(&folder));
        }
        None => comment(
            text,
            "No state_dir: agent and shim find the same folder if they run as the same user.",
        ),
    }
    match paths.shim_socket(agent) {
        Some(socket) => {
            comment(
                text,
                &format!(
                    "The shim's socket. The engine's environment: BERTH_SHIM_SOCKET={}",
                    clean(&socket)
                ),
            );
            let _ = writeln!(text, "shim_socket = {}", quoted(&socket));
        }
        None => comment(text, &format!("The shim: {}.", flags::SHIM_FIX)),
    }
}

fn write_gpu(text: &mut String, agent: &AgentPlan) {
    text.push_str("\n[gpu]\n");
    match &agent.devices {
        Ok(devices) => {
            comment(text, "The engine's GPUs, by its flags and CUDA_VISIBLE_DEVICES.");
            let devices: Vec<String> = devices.iter().map(|it| quoted(it)).collect();
            let _ = writeln!(text, "devices = [{}]", devices.join(", "));
        }
        Err(why) => comment(
            text,
            &format!(
                "No devices: {}. The agent finds the GPUs of the processes that the shim reports.",
                clean(why)
            ),
        ),
    }
}

/// Breaks lines at 100 columns where the words allow.
fn comment(text: &mut String, comment: &str) {
    let mut line = String::from("#");
    for word in comment.split_whitespace() {
        if line.len() > 1 && line.chars().count() + 1 + word.chars().count() > 100 {
            text.push_str(&line);
            text.push('\n');
            line = "#".into();
        }
        line.push(' ');
        line.push_str(word);
    }
    text.push_str(&line);
    text.push('\n');
}
