//! Writes values of the Helm chart, for an agent on each node beside an engine that runs there.
//! Pure.

use std::fmt::Write as _;

use super::{AgentPlan, agent, host::Host, quoted};
use crate::text::clean;

#[must_use]
pub fn values(agent: &AgentPlan, host: &Host) -> String {
    let engine = &agent.engine;
    let runs_on_gpus = engine.gpus.device == "cuda";
    let user = agent.process.as_ref().map_or(0, |process| process.uid);
    let mut text = format!(
        "# Values of the chart deploy/helm/berth, for agents beside engines that run on the\n\
         # nodes' network. The engine here: {}, SGLang {}, model {}. Written by berth init {}.\n\
         auth:\n  \
           # The Secret of the clients' keys: kubectl create secret generic berth-keys\n  \
           # --from-file=keys.toml\n  \
           existingSecret: berth-keys\n\
         agent:\n  \
           mode: daemonset\n  \
           # NVML of the node's GPUs.\n  \
           nvidia: {runs_on_gpus}\n  \
           daemonset:\n    \
             enginePort: {}\n    \
             # The engine's user: the shim's socket is for this user and root only.\n    \
             runAsUser: {user}\n    \
             # The agent finds the engine's GPUs by its processes. They differ from node to\n    \
             # node, so no setting names them.\n    \
             hostPID: {runs_on_gpus}\n    \
             # The nodes that have such an engine.\n    \
             nodeSelector: {}\n",
        clean(&engine.url),
        clean(&engine.version),
        clean(&engine.model),
        env!("CARGO_PKG_VERSION"),
        engine.port,
        node_selector(runs_on_gpus, host),
    );
    if !runs_on_gpus {
        text.push_str("    tolerations: []\n");
    }
    if let Some(percent) = agent::pin_budget_percent(engine) {
        let _ = write!(
            text,
            "  settings:\n    sessions:\n      \
             # One session of {} tokens must fit into the share of {} that is pinned.\n      \
             pin_budget_ratio: 0.{percent:02}\n",
            engine.context_tokens, engine.pool_tokens
        );
    }
    if engine.wants_key {
        text.push_str(
            "engine:\n  # The Secret of the engine's --api-key: kubectl create secret generic\n  \
             # berth-engine-key --from-literal=api-key=...\n  apiKeySecret: berth-engine-key\n",
        );
    }
    for (flag, why) in agent::missing_flags(agent) {
        let _ = write!(text, "# The engine needs {flag}\n# as without it {why}.\n");
    }
    let _ = write!(
        text,
        "# The engine's pod mounts the node's /run/berth, and has PYTHONPATH=/run/berth/shim and\n\
         # BERTH_SHIM_SOCKET=/run/berth/engine-{}.sock.\n",
        engine.port
    );
    text
}

fn node_selector(runs_on_gpus: bool, host: &Host) -> String {
    if runs_on_gpus {
        return "{ nvidia.com/gpu.present: \"true\" }".into();
    }
    format!("{{ kubernetes.io/hostname: {} }}", quoted(&host.name))
}
