//! Runs `berth init`: finds the engines on this host, and writes settings for agents and a router.

mod find;
mod look;
mod write;

use std::path::PathBuf;

use serde_json::{Value, json};
use service::router_token::Tokens;

use self::find::Found;
pub use self::find::ask_engine;
use super::{Outcome, print};
use crate::{
    args::{InitArgs, TargetArgs},
    connect::{is_loopback, normalize_url},
    error::Error,
    init::{self, AgentPlan, Content, MissingFlag, Plan, Wishes, engine::FoundEngine},
    text::{clean, count},
};

pub async fn run(target: &TargetArgs, args: &InitArgs) -> Result<Outcome, Error> {
    let wishes = wishes(target, args)?;
    let listening = look::listening();
    let Found { engines, passed_over } = find::find(target, args, &listening).await?;
    let with_process = engines.into_iter().map(|engine| {
        // Another host's port says nothing of this host's processes.
        let is_here = is_loopback(&engine.url);
        let process = is_here.then(|| look::process_at(engine.port, &listening)).flatten();
        (engine, process)
    });
    let host = look::host(&listening);
    let mut plan = init::plan(with_process.collect(), &host, &wishes).map_err(Error::Usage)?;
    plan.notes.extend(passed_over);
    if args.print {
        print(&write::as_text(&plan))?;
        return Ok(Outcome::Well);
    }
    write::write(&plan, &wishes, args.force)?;
    print(&match args.json {
        true => format!("{}\n", as_json(&plan, &wishes)),
        false => as_text(&plan, &wishes),
    })?;
    Ok(Outcome::Well)
}

fn wishes(target: &TargetArgs, args: &InitArgs) -> Result<Wishes, Error> {
    let folder = std::path::absolute(&args.out)?;
    let others = args.other_agent.iter().map(|url| normalize_url("--other-agent", url));
    let token_file = target.token_file.clone();
    if let Some(path) = &token_file {
        if args.address.is_none() {
            let text = "--token-file is for agents that other hosts reach: give --address too";
            return Err(Error::Usage(text.into()));
        }
        Tokens::source(PathBuf::from(path)).read()?;
    }
    Ok(Wishes {
        supervisor: args.supervisor,
        address: args.address.as_deref().map(parse_address).transpose()?,
        other_agents: others.collect::<Result<_, _>>()?,
        token_file,
        folder,
    })
}

/// Removes the brackets of an IPv6 address.
fn parse_address(text: &str) -> Result<String, Error> {
    let host = text.trim_matches(['[', ']']);
    let is_address = host.parse::<std::net::IpAddr>().is_ok();
    let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || b".-".contains(&byte);
    let is_name = !host.is_empty() && host.len() <= 253 && host.bytes().all(is_legal);
    let problem =
        || Error::Usage(format!("--address must be a host like node-1 or 10.0.0.7, not {text:?}"));
    (is_address || is_name).then(|| host.to_owned()).ok_or_else(problem)
}

fn as_json(plan: &Plan, wishes: &Wishes) -> Value {
    let engine = |agent: &AgentPlan| {
        let (engine, process) = (&agent.engine, agent.process.as_ref());
        json!({
            "url": engine.url, "version": engine.version, "model": engine.model,
            "page_tokens": engine.page_tokens, "pool_tokens": engine.pool_tokens,
            "context_tokens": engine.context_tokens, "rows": engine.rows,
            "ranks": engine.ranks, "wants_key": engine.wants_key, "missing": agent.missing,
            "devices": agent.devices, "devices_unknown": agent.devices_unknown,
            "pid": process.and_then(|it| it.pid), "user": process.and_then(|it| it.user.as_ref()),
            "agent": {
                "id": agent.worker_id, "settings": wishes.folder.join(&agent.file),
                "control": agent.control_url,
            },
        })
    };
    json!({
        "engines": plan.agents.iter().map(engine).collect::<Vec<Value>>(),
        "files": plan.paths(wishes), "notes": plan.notes, "next": plan.next,
    })
}

fn as_text(plan: &Plan, wishes: &Wishes) -> String {
    let mut lines = vec![];
    for AgentPlan { engine, missing, .. } in &plan.agents {
        let FoundEngine { url, version, model, rows, .. } = engine;
        let (version, model) = (clean(version), clean(model));
        let tokens = count(engine.pool_tokens);
        lines.push(format!(
            "engine {}: SGLang {version}, model {model}, {tokens} tokens of KV, {rows} rows",
            clean(url)
        ));
        for MissingFlag { flag, without } in missing {
            lines.push(format!("  lacks {flag}\n    {without}"));
        }
    }
    let paths = plan.paths(wishes);
    lines.extend(paths.iter().map(|path| format!("wrote {}", clean(&path.to_string_lossy()))));
    lines.extend(plan.notes.iter().map(|note| format!("note: {}", clean(note))));
    lines.extend(plan.next.iter().map(|step| format!("next: {step}")));
    lines.join("\n") + "\n"
}

fn shown(content: &Content) -> &str {
    match content {
        Content::Text(text) | Content::Script(text) => text,
        Content::Token => "# The token is made, or copied, when the files are written.\n",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_nothing_else() {
        for (given, host) in
            [("node-1.fleet", "node-1.fleet"), ("10.0.0.7", "10.0.0.7"), ("[::1]", "::1")]
        {
            assert_eq!(parse_address(given).unwrap(), host);
        }
        for wrong in ["", "a b", "http://a", "a:1", "a\"", "a/b"] {
            let error = parse_address(wrong).unwrap_err();
            assert_eq!(error.exit_status(), 64, "{wrong}");
        }
    }

    #[test]
    fn a_token_is_never_shown() {
        assert!(shown(&Content::Token).starts_with('#'));
    }
}
