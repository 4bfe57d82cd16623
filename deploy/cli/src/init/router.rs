//! Writes the settings of a router in front of the agents. Pure.

use std::fmt::Write as _;

use super::{AgentPlan, Paths, ROUTER_PORTS, Wishes, quoted};

#[must_use]
pub fn settings(agents: &[AgentPlan], paths: &Paths, wishes: &Wishes) -> String {
    let workers = agents.iter().map(|agent| control_url(agent, wishes));
    let workers: Vec<String> =
        workers.chain(wishes.other_agents.iter().cloned()).map(|url| quoted(&url)).collect();
    let [data, admin] = ROUTER_PORTS;
    let mut text = format!(
        "# Settings of berth-router in front of the agents of this host.\n\
         # Written by berth init {}. Keys left out have defaults;\n\
         # berth-router --check-config shows them.\n\n\
         # The agents' control ports.\n\
         workers = [{}]\n\n\
         [listen]\n\
         # For clients on this host. For others: \"0.0.0.0:{data}\", with the clients' keys in\n\
         # auth.keys_file.\n\
         data_addr = \"127.0.0.1:{data}\"\n\
         # Metrics, health and the dashboard.\n\
         admin_addr = \"127.0.0.1:{admin}\"\n",
        env!("CARGO_PKG_VERSION"),
        workers.join(", "),
    );
    if let Some(token_file) = &paths.token_file {
        let _ = write!(
            text,
            "\n[agents]\n\
             # Router and agents recognize each other by this token.\n\
             token_file = {}\n",
            quoted(token_file)
        );
    }
    text
}

#[must_use]
pub fn control_url(agent: &AgentPlan, wishes: &Wishes) -> String {
    let [_, control, _] = agent.ports;
    let host = match wishes.address.as_deref() {
        None => "127.0.0.1".to_owned(),
        Some(address) if address.contains(':') => format!("[{address}]"),
        Some(address) => address.to_owned(),
    };
    format!("http://{host}:{control}")
}
