//! Audits of a pool of torch by the shim's library, in torch's process: on its context and streams.

use crate::{Options, answers::Answers};
use anyhow::{Context, bail};
use kernels::report::Report;
use serde::Deserialize;
use serde_json::Value;
use std::{collections::BTreeMap, path::Path, process::Command};

const ABOUT: &str = "a pool of torch, audited by the shim's library";
/// How torch allocates: blocks of `cudaMalloc`, or expandable segments.
const ALLOCATIONS: [&str; 2] = ["blocks", "mapped"];
/// Where the shim's package is, from the root of the repository.
const SHIM: &str = "worker-agent/shim";

/// A line of `torch_pool.py`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Line {
    /// A report in hex, with the pages by owner and the faults that it must show.
    Audit {
        what: String,
        report: String,
        owners: Value,
        faults: BTreeMap<String, u64>,
    },
    Figure {
        what: String,
        result: String,
    },
}

/// Runs `torch_pool.py`, and compares each report with what the script knows of its pool.
pub(crate) fn audit_pool(options: &Options, answers: &mut Answers) -> anyhow::Result<()> {
    let (Some(python), Some(library)) = (&options.python, &options.library) else {
        answers.skip(ABOUT, "faults and times", "needs --python with torch, and --library");
        return Ok(());
    };
    for allocation in ALLOCATIONS {
        audit_pool_in(allocation, python, library, options, answers)?;
    }
    Ok(())
}

fn audit_pool_in(
    allocation: &str,
    python: &Path,
    library: &Path,
    options: &Options,
    answers: &mut Answers,
) -> anyhow::Result<()> {
    let (script, seconds) = (include_str!("../torch_pool.py"), options.seconds.to_string());
    let output = Command::new(python)
        .args(["-c", script, SHIM, &seconds, allocation])
        .env("BERTH_KV_LIBRARY", library)
        .env("BERTH_KV_FATBIN", &options.fatbin)
        .output()?;
    let named = |what: &str| format!("{what} ({allocation})");
    for line in String::from_utf8(output.stdout)?.lines() {
        match serde_json::from_str(line).with_context(|| format!("torch_pool.py wrote {line}"))? {
            Line::Figure { what, result } => {
                answers.add_figure(ABOUT, named(&what), result.clone(), result);
            }
            Line::Audit { what, report, owners, faults } => {
                let report = Report::decode(&bytes(&report)?)?;
                let found: BTreeMap<String, u64> = report
                    .findings
                    .iter()
                    .filter(|findings| findings.count > 0)
                    .map(|findings| (findings.kind.name().to_owned(), findings.count))
                    .collect();
                let found_owners = serde_json::to_value(report.pages_by_owner)?;
                let text = format!("{found:?}, {found_owners}, {:?}", report.digests);
                answers.check(ABOUT, named(&what), text, found == faults && found_owners == owners);
            }
        }
    }
    if !output.status.success() {
        bail!("torch_pool.py: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

fn bytes(hex: &str) -> anyhow::Result<Vec<u8>> {
    anyhow::ensure!(hex.is_ascii(), "a report is in hex");
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16);
    Ok((0..hex.len() / 2).map(|at| byte(2 * at)).collect::<Result<_, _>>()?)
}
