//! Writes the files of a plan from their templates. Pure.
//!
//! One agent uses the unit `berth-agent` of the package, with a drop-in for what is particular on
//! this host. Several agents are instances of a template unit of systemd, made from the same unit.

use minijinja::{Environment, Error, UndefinedBehavior, syntax::SyntaxConfig, value::Serde};
use serde_json::{Value, json};

use super::{
    AgentPlan, Content, OutputFile, PIN_BUDGET_PERCENT, ROUTER_PORTS, TOKEN_FILE, Wishes,
    host::Host,
};
use crate::{
    args::Supervisor,
    flags,
    text::{clean, wrap},
};

const TEMPLATES: [(&str, &str); 8] = [
    ("agent.toml", include_str!("templates/agent.toml.jinja")),
    ("router.toml", include_str!("templates/router.toml.jinja")),
    ("values.yaml", include_str!("templates/values.yaml.jinja")),
    ("agent.conf", include_str!("templates/agent.conf.jinja")),
    ("engine.conf", include_str!("templates/engine.conf.jinja")),
    ("install.sh", include_str!("templates/install.sh.jinja")),
    ("notes", include_str!("templates/notes.jinja")),
    ("next", include_str!("templates/next.jinja")),
];
const UNIT: &str = include_str!("../../../systemd/berth-agent.service");
/// With the sign `# `, a line has 100 columns.
const COMMENT_COLUMNS: usize = 98;

/// The templates, with the variables that all of them share.
pub(super) struct Templates {
    environment: Environment<'static>,
    shared: Value,
}

impl Templates {
    pub(super) fn new(agents: &[AgentPlan], host: &Host, wishes: &Wishes) -> Self {
        let own = agents.iter().map(|agent| &agent.control_url);
        let workers: Vec<&String> = own.chain(&wishes.other_agents).collect();
        let ports = agents.iter().flat_map(|agent| agent.ports).chain(ROUTER_PORTS);
        let taken: Vec<u16> = ports.filter(|port| host.ports_taken.contains(port)).collect();
        let shared = json!({
            "version": env!("CARGO_PKG_VERSION"), "agents": agents, "workers": workers,
            "supervisor": wishes.supervisor, "address": wishes.address,
            "folder": wishes.folder.to_string_lossy(),
            "token_file": wishes.etc().join(TOKEN_FILE).to_string_lossy(),
            "has_new_token": wishes.address.is_some() && wishes.token_file.is_none(),
            "host_name": host.name, "ports_taken": taken, "default_percent": PIN_BUDGET_PERCENT,
            "shim_fix": flags::SHIM_FIX,
            "wants_key": agents.iter().any(|agent| agent.engine.wants_key),
        });
        let environment = environment().expect("the templates are this program's own");
        Self { environment, shared }
    }

    pub(super) fn lines(&self, template: &str) -> Vec<String> {
        self.render(template, None).lines().map(str::to_owned).collect()
    }

    pub(super) fn files(&self, agents: &[AgentPlan], wishes: &Wishes) -> Vec<OutputFile> {
        let settings =
            |agent: &AgentPlan| text_file(&agent.file, self.of_agent("agent.toml", agent));
        let mut files: Vec<OutputFile> = agents.iter().map(settings).collect();
        files.push(text_file("router.toml", self.render("router.toml", None)));
        if wishes.address.is_some() {
            files.push(OutputFile { name: TOKEN_FILE.into(), content: Content::Token });
        }
        match wishes.supervisor {
            Supervisor::None => {}
            Supervisor::Systemd => {
                let units = self.units(agents);
                let names = units.iter().map(|unit| unit.name.trim_start_matches("systemd/"));
                let script = self.render("install.sh", Some(("units", names.collect())));
                files.extend(units);
                let content = Content::Script(script);
                files.push(OutputFile { name: "install.sh".into(), content });
            }
            Supervisor::Helm => {
                let values = |agent: &AgentPlan| {
                    text_file("values.yaml", self.of_agent("values.yaml", agent))
                };
                files.extend(agents.iter().map(values));
            }
        }
        files
    }

    fn units(&self, agents: &[AgentPlan]) -> Vec<OutputFile> {
        let mut files = vec![];
        if agents.len() > 1 {
            files.push(text_file("systemd/berth-agent@.service", unit_template()));
        }
        for agent in agents {
            let drop_in = self.of_agent("agent.conf", agent);
            if !drop_in.is_empty() {
                files.push(text_file(&format!("systemd/{}.d/init.conf", agent.unit), drop_in));
            }
            let Some(engine_unit) = &agent.engine_unit else { continue };
            // The drop-in sets the one variable that names an agent's socket to the shim.
            if agents.iter().filter(|it| it.engine_unit == agent.engine_unit).count() == 1 {
                let drop_in = self.of_agent("engine.conf", agent);
                files.push(text_file(&format!("systemd/{engine_unit}.d/berth.conf"), drop_in));
            }
        }
        files
    }

    fn of_agent(&self, template: &str, agent: &AgentPlan) -> String {
        self.render(template, Some(("agent", json!(agent))))
    }

    /// `own` is one more variable, for this template alone.
    fn render(&self, template: &str, own: Option<(&str, Value)>) -> String {
        let mut values = self.shared.clone();
        if let Some((name, value)) = own {
            values[name] = value;
        }
        let template = self.environment.get_template(template);
        let text = template.and_then(|it| it.render(Serde(values)));
        text.expect("each template takes all that a plan can have")
    }
}

/// Instances are named by their engines' ports.
fn unit_template() -> String {
    UNIT.replace("beside an SGLang engine", "beside the SGLang engine at port %i")
        .replace("/etc/berth/agent.toml", "/etc/berth/agent-%i.toml")
        .replace("StateDirectory=berth\n", "StateDirectory=berth/%i\n")
        .replace("RuntimeDirectory=berth\n", "RuntimeDirectory=berth/%i\n")
}

fn text_file(name: &str, text: String) -> OutputFile {
    OutputFile { name: name.to_owned(), content: Content::Text(text) }
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .keep_trailing_newline(true)
            .build()?,
    );
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    // What others chose, such as a model's name, can't leave its comment or string.
    environment.set_formatter(|out, _, value| match value.as_str() {
        Some(text) if !value.is_safe() => out.write_str(&clean(text)).map_err(Error::from),
        _ => write!(out, "{value}").map_err(Error::from),
    });
    environment.add_filter("quoted", |text: &str| Value::from(clean(text)).to_string());
    environment.add_filter("comment", |text: &str| {
        let lines = wrap(text, COMMENT_COLUMNS);
        minijinja::Value::from_safe_string(lines.iter().map(|line| format!("# {line}\n")).collect())
    });
    for (name, source) in TEMPLATES {
        environment.add_template(name, source)?;
    }
    Ok(environment)
}
