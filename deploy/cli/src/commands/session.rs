//! Runs `berth session`: shows, closes, demotes or prefetches one session of the key's owner.

use contract::api::{Prefetch, Session};
use http::Method;
use serde::Deserialize as _;
use serde_json::json;

use super::{Outcome, print};
use crate::{
    args::{SessionArgs, SessionCommand, TargetArgs},
    connect::router::{RouterClient, encode},
    error::Error,
    text::{clean, count, known, millis, style::Style, style::state_tone},
};

pub async fn run(target: &TargetArgs, command: &SessionCommand) -> Result<Outcome, Error> {
    let router = RouterClient::new(target)?;
    match command {
        SessionCommand::Show(args) => show(&router, args).await,
        SessionCommand::Close(args) => {
            let path = format!("/v1/sessions/{}", encode(&args.id));
            change(&router, args, Method::DELETE, &path, "closed").await
        }
        SessionCommand::Demote(args) => {
            let path = format!("/v1/sessions/{}/demote", encode(&args.id));
            change(&router, args, Method::POST, &path, "demoted").await
        }
        SessionCommand::Prefetch(args) => prefetch(&router, args).await,
    }
}

async fn show(router: &RouterClient, args: &SessionArgs) -> Result<Outcome, Error> {
    let path = format!("/v1/sessions/{}", encode(&args.id));
    let value = router.get(&path).await?;
    if args.json {
        print(&format!("{value}\n"))?;
        return Ok(Outcome::Well);
    }
    let session = Session::deserialize(&value);
    let session = session.map_err(|error| router.answer_error(&path, error.to_string()))?;
    let style = Style::of_stdout();
    let mut lines = vec![
        ("session", clean(&session.session_id)),
        ("worker", clean(&session.worker)),
        ("state", style.paint(state_tone(&session.state), &clean(&session.state))),
    ];
    // A session that its agent hasn't reported yet has nothing else.
    if let Some(report) = session.report.filter(|report| !report.retention.is_empty()) {
        let history = if report.whole_history { "full histories" } else { "only what is new" };
        lines.extend([
            ("retention", clean(&report.retention)),
            ("turns", format!("{}, {} running", report.turns, report.turns_running)),
            ("resident", known(report.resident_tokens, |it| format!("{} tokens", count(it)))),
            ("idle", millis(report.idle_ms())),
            ("client sends", history.to_owned()),
        ]);
    }
    if let Some(prefix) = value.get("volatile_prefix") {
        lines.push(("volatile prefix", clean(&prefix.to_string())));
    }
    let text: String = lines.iter().map(|(name, value)| format!("{name:<16}{value}\n")).collect();
    print(&text)?;
    Ok(Outcome::Well)
}

async fn prefetch(router: &RouterClient, args: &SessionArgs) -> Result<Outcome, Error> {
    let path = format!("/v1/sessions/{}/prefetch", encode(&args.id));
    let answer = router.send(Method::POST, &path).await?;
    let value = router.accept(&path, answer).await?;
    if args.json {
        print(&format!("{value}\n"))?;
        return Ok(Outcome::Well);
    }
    let prefetch = Prefetch::deserialize(&value);
    let tokens = prefetch.map_err(|error| router.answer_error(&path, error.to_string()))?.tokens;
    let id = clean(&args.id);
    if tokens == 0 {
        print(&format!("session {id}: nothing to load\n"))?;
    } else {
        print(&format!("session {id}: {} tokens begin to be loaded\n", count(tokens)))?;
    }
    Ok(Outcome::Well)
}

async fn change(
    router: &RouterClient,
    args: &SessionArgs,
    method: Method,
    path: &str,
    done: &str,
) -> Result<Outcome, Error> {
    let answer = router.send(method, path).await?;
    router.accept(path, answer).await?;
    if args.json {
        print(&format!("{}\n", json!({ "session_id": args.id, done: true })))?;
    } else {
        print(&format!("session {}: {done}\n", clean(&args.id)))?;
    }
    Ok(Outcome::Well)
}
