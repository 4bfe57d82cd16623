//! Runs `berth audit`: lets a running agent audit its engine's KV pages, and prints the result.
//!
//! A foreign session, which the agent didn't open, is listed by its id in the engine.

use std::{fmt::Write as _, time::Duration};

use contract::{id::SessionKey, load::PageAudit, v1};
use serde::Serialize;

use super::{Outcome, json_line, print};
use crate::{
    args::{AuditArgs, TargetArgs},
    connect::agent,
    error::Error,
    text::clean,
};

/// The engine makes the audit after its current step, which takes seconds at most.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(60);

struct RankAudit {
    dp_rank: u32,
    audit: Result<(PageAudit, Vec<v1::SessionPages>), String>,
}

/// A fault, or a rank without an audit, is not well.
pub async fn run(target: &TargetArgs, args: &AuditArgs) -> Result<Outcome, Error> {
    let mut client = agent::connect(target, ANSWER_WAIT_MAX).await?;
    let request = v1::AuditRequest { dp_rank: args.rank };
    let answer = client.audit(request).await;
    let answer = answer.map_err(|status| agent::call_error(target, &status))?;
    let ranks: Result<Vec<RankAudit>, contract::load::Error> =
        answer.into_inner().ranks.into_iter().map(parse_rank).collect();
    let ranks = ranks
        .map_err(|error| Error::Answer { url: target.agent.clone(), why: error.to_string() })?;
    if ranks.is_empty() {
        let why = "the engine has not answered yet".to_owned();
        return Err(Error::Failed { who: "agent", why });
    }
    let is_fault_free = |rank: &RankAudit| {
        rank.audit.as_ref().is_ok_and(|(page_audit, _)| page_audit.faults().count() == 0)
    };
    let text = if args.json { as_json(&ranks) } else { ranks.iter().map(rank_table).collect() };
    print(&text)?;
    Ok(Outcome::from_is_well(ranks.iter().all(is_fault_free)))
}

fn parse_rank(wire_audit: v1::RankAudit) -> Result<RankAudit, contract::load::Error> {
    let audit = match wire_audit.pages {
        Some(pages) if wire_audit.refusal.is_empty() => {
            Ok((pages.try_into()?, wire_audit.sessions))
        }
        _ => Err(wire_audit.refusal),
    };
    Ok(RankAudit { dp_rank: wire_audit.dp_rank, audit })
}

fn as_json(ranks: &[RankAudit]) -> String {
    let ranks = ranks.iter().map(|rank| {
        let dp_rank = rank.dp_rank;
        match &rank.audit {
            Ok((pages, sessions)) => {
                let sessions = sessions.iter().map(AuditedSession::new).collect();
                AuditedRank::Audited { dp_rank, pages, sessions }
            }
            Err(refusal) => AuditedRank::Refused { dp_rank, refusal },
        }
    });
    json_line(&AuditedRanks { ranks: ranks.collect() })
}

#[derive(Debug, Serialize)]
struct AuditedRanks<'a> {
    ranks: Vec<AuditedRank<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum AuditedRank<'a> {
    Audited { dp_rank: u32, pages: &'a PageAudit, sessions: Vec<AuditedSession<'a>> },
    Refused { dp_rank: u32, refusal: &'a str },
}

#[derive(Debug, Serialize)]
struct AuditedSession<'a> {
    session: Option<String>,
    incarnation: &'a str,
    pages: u64,
    exclusive_pages: u64,
    freed_by_close_pages: Option<u64>,
    share_milli: u64,
    runs: u64,
    tail_tokens: u64,
}

impl<'a> AuditedSession<'a> {
    fn new(session: &'a v1::SessionPages) -> Self {
        Self {
            session: key_digest(session),
            incarnation: &session.incarnation,
            pages: session.pages,
            exclusive_pages: session.exclusive_pages,
            freed_by_close_pages: session.freed_by_close_pages,
            share_milli: session.share_milli,
            runs: session.runs,
            tail_tokens: session.tail_tokens,
        }
    }
}

/// Logs name the session so. `None` for a session that the agent doesn't know.
fn key_digest(session: &v1::SessionPages) -> Option<String> {
    let key = SessionKey::try_from(session.key.clone()?).ok()?;
    Some(key.digest().to_string())
}

fn rank_table(rank: &RankAudit) -> String {
    let mut text = String::new();
    match &rank.audit {
        Err(refusal) => {
            let _ = writeln!(text, "rank {}: no audit: {}", rank.dp_rank, clean(refusal));
        }
        Ok((page_audit, sessions)) => {
            add_totals(&mut text, rank.dp_rank, page_audit);
            if !sessions.is_empty() {
                add_sessions(&mut text, sessions);
            }
            add_faults(&mut text, page_audit);
        }
    }
    text
}

fn add_totals(text: &mut String, dp_rank: u32, audit: &PageAudit) {
    let _ = writeln!(text, "rank {dp_rank}: {} pages, {} held", audit.pages, audit.held_pages);
    match &audit.classes {
        Some(page_counts) => {
            let _ = writeln!(
                text,
                "  free {} in {} runs, private {}, cached {}, cached in use {}, leaked {}, \
                 corrupt {}",
                page_counts.free,
                audit.free_runs.unwrap_or(0),
                page_counts.private,
                page_counts.cached,
                page_counts.cached_in_use,
                page_counts.leaked,
                page_counts.corrupt,
            );
        }
        None => {
            let rows_moved = audit.rows_moved;
            let _ =
                writeln!(text, "  {rows_moved} rows moved: the other pages' owners are unknown");
        }
    }
}

fn add_sessions(text: &mut String, sessions: &[v1::SessionPages]) {
    let _ = writeln!(
        text,
        "  {:<16}  {:>8}  {:>9}  {:>13}  {:>10}  {:>6}  {:>11}",
        "session", "pages", "exclusive", "freed by close", "share", "runs", "tail tokens"
    );
    for session in sessions {
        let session_name =
            key_digest(session).unwrap_or_else(|| match session.incarnation.as_str() {
                "" => "a turn".into(),
                foreign_id => format!("not ours: {}", clean(foreign_id)),
            });
        let freed_by_close =
            session.freed_by_close_pages.map_or("?".into(), |pages| pages.to_string());
        let share = format!("{}.{:03}", session.share_milli / 1000, session.share_milli % 1000);
        let _ = writeln!(
            text,
            "  {session_name:<16}  {:>8}  {:>9}  {freed_by_close:>13}  {share:>10}  {:>6}  {:>11}",
            session.pages, session.exclusive_pages, session.runs, session.tail_tokens
        );
    }
}

fn add_faults(text: &mut String, audit: &PageAudit) {
    if audit.faults().count() == 0 {
        let _ = writeln!(text, "  no faults; contents of {} pages compared", audit.compared_pages);
    }
    for finding in audit.faults() {
        let _ = writeln!(text, "  FAULT {}: {}", finding.kind, finding.count);
        for fault in &finding.named {
            let sessions = clean(&fault.sessions.join(", "));
            let _ = writeln!(text, "    {}  {sessions}", fault.at);
        }
    }
}
