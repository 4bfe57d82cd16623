//! Writes units of systemd for the agents, and the script that installs all files. Pure.
//!
//! One agent uses the unit `berth-agent` of the package, with a drop-in for what is particular on
//! this host. Several agents are instances of a template, made from the same unit.

use std::fmt::Write as _;

use super::{AgentPlan, Content, OutputFile, TOKEN_FILE, Wishes, text_file, unit_folder};

const UNIT: &str = include_str!("../../../systemd/berth-agent.service");
/// The user in the unit.
const USER: &str = "sglang";
const TEMPLATE: &str = "berth-agent@.service";

#[must_use]
pub fn files(agents: &[AgentPlan], wishes: &Wishes) -> Vec<OutputFile> {
    let mut files = vec![];
    if agents.iter().any(|agent| agent.instance.is_some()) {
        files.push(text_file(&format!("systemd/{TEMPLATE}"), template()));
    }
    for agent in agents {
        if let Some(text) = agent_drop_in(agent) {
            files.push(text_file(&format!("systemd/{}.d/init.conf", unit(agent)), text));
        }
        let engine_unit = engine_unit(agent);
        // One variable can't name the sockets of two agents.
        let shares_unit =
            agents.iter().filter(|it| self::engine_unit(it) == engine_unit).count() > 1;
        if let Some(engine_unit) = engine_unit.filter(|_| !shares_unit) {
            let text = format!(
                "# The engine's shim looks for its agent here. In force from the engine's next \
                 start.\n[Service]\nEnvironment=BERTH_SHIM_SOCKET=/run/{}/engine.sock\n",
                unit_folder(agent)
            );
            files.push(text_file(&format!("systemd/{engine_unit}.d/berth.conf"), text));
        }
    }
    let script = script(agents, wishes, &files);
    files.push(OutputFile { name: "install.sh".into(), content: Content::Script(script) });
    files
}

/// Instances are named by their engines' ports.
fn template() -> String {
    UNIT.replace("beside an SGLang engine", "beside the SGLang engine at port %i")
        .replace("/etc/berth/agent.toml", "/etc/berth/agent-%i.toml")
        .replace("StateDirectory=berth\n", "StateDirectory=berth/%i\n")
        .replace("RuntimeDirectory=berth\n", "RuntimeDirectory=berth/%i\n")
}

fn unit(agent: &AgentPlan) -> String {
    match &agent.instance {
        None => "berth-agent.service".into(),
        Some(instance) => format!("berth-agent@{instance}.service"),
    }
}

/// `None` unless the name is one that a path and a script can have.
fn engine_unit(agent: &AgentPlan) -> Option<&str> {
    let unit = agent.process.as_ref()?.unit.as_deref()?;
    is_name(unit).then_some(unit)
}

fn is_name(text: &str) -> bool {
    let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._@-".contains(&byte);
    !text.is_empty() && !text.starts_with(['.', '-']) && text.bytes().all(is_legal)
}

fn agent_drop_in(agent: &AgentPlan) -> Option<String> {
    let user = agent.process.as_ref().and_then(|it| it.user.as_deref());
    let mut text = String::new();
    if let Some(unit) = engine_unit(agent) {
        let _ = write!(text, "[Unit]\n# The engine.\nAfter={unit}\n");
    }
    if let Some(user) = user.filter(|user| *user != USER && is_name(user)) {
        let _ = write!(
            text,
            "[Service]\n# The engine's user: the shim's socket is for this user and root only.\n\
             User={user}\n"
        );
    }
    (!text.is_empty()).then_some(text)
}

fn script(agents: &[AgentPlan], wishes: &Wishes, units: &[OutputFile]) -> String {
    let mut settings: Vec<&str> = agents.iter().map(|agent| agent.file.as_str()).collect();
    settings.push("router.toml");
    if wishes.address.is_some() {
        settings.push(TOKEN_FILE);
    }
    let mut text = format!(
        "#!/bin/sh\n\
         # Installs these files on this host, and starts agents and router. Run it as root, after\n\
         # Berth's Debian package, or the commands of docs/systemd.md, have installed the rest.\n\
         # With DESTDIR it only copies the files, below that folder.\n\
         set -eu\n\
         cd \"$(dirname \"$0\")\"\n\
         to=${{DESTDIR:-}}\n\
         group='-g berth'\n\
         [ -z \"$to\" ] || group=\n\n\
         mkdir -p \"$to/etc/berth\"\n\
         install -m 640 $group {} \"$to/etc/berth/\"\n",
        settings.join(" ")
    );
    for file in units {
        let (name, place) = (&file.name, file.name.trim_start_matches("systemd/"));
        let _ = writeln!(text, "install -D -m 644 '{name}' \"$to/etc/systemd/system/{place}\"");
    }
    if agents.iter().any(|agent| agent.engine.wants_key) {
        text.push_str(
            "\n# The engine's key, which only root reads: systemd gives it to the agent.\n\
             : \"${BERTH_ENGINE_API_KEY:?set it to the --api-key of the engine}\"\n\
             (umask 077 && printf 'BERTH_ENGINE_API_KEY=%s\\n' \"$BERTH_ENGINE_API_KEY\" \\\n  \
             > \"$to/etc/berth/agent.env\")\n",
        );
    }
    let started: Vec<String> = agents.iter().map(unit).collect();
    let _ = write!(
        text,
        "\n[ -z \"$to\" ] || exit 0\n\
         systemctl daemon-reload\n\
         systemctl enable --now {} berth-router.service\n",
        started.join(" ")
    );
    text
}
