//! Keeps the guide's table of refusals complete.

use std::{fmt::Write as _, fs, path::PathBuf};

use super::{GROUPS, Origin, Repeat};

/// The lines between which the guide has the table.
const BEGIN: &str = "<!-- The table of refusals begins. It is made from the code. -->\n";
const END: &str = "<!-- The table of refusals ends. -->\n";

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the guide's table.
fn table() -> String {
    let mut text = String::new();
    for group in GROUPS {
        write!(text, "\n**{}**\n\n", group.title).expect("a string takes all");
        text.push_str("| code | status | by | meaning | do | again |\n|---|---|---|---|---|---|\n");
        for code in group.codes {
            let by = match code.origin() {
                Origin::Router => "router",
                Origin::Agent => "agent",
                Origin::Both => "both",
            };
            let again = match code.repeat() {
                Repeat::AfterChange => "no".to_owned(),
                Repeat::AfterSeconds(seconds) => format!("after {seconds} s"),
                Repeat::AfterCheck => "look first".to_owned(),
            };
            writeln!(
                text,
                "| `{code}` | {} | {by} | {} | {} | {again} |",
                code.status().as_u16(),
                code.meaning(),
                code.action(),
            )
            .expect("a string takes all");
        }
    }
    text.push('\n');
    text
}

#[test]
fn the_guide_has_the_table_of_the_code() {
    let path = repository().join("deploy/docs/sessions.md");
    let guide = fs::read_to_string(&path).expect("the guide");
    let (before, rest) = guide.split_once(BEGIN).expect("the guide has the table's begin");
    let (in_guide, after) = rest.split_once(END).expect("the guide has the table's end");
    let table = table();
    if in_guide == table {
        return;
    }
    if std::env::var_os("BERTH_WRITE_DOCS").is_some() {
        fs::write(&path, [before, BEGIN, &table, END, after].concat()).expect("the guide");
        return;
    }
    panic!(
        "deploy/docs/sessions.md lacks a change of the refusal codes; write the table with \
         `BERTH_WRITE_DOCS=1 cargo test -p service the_guide_has_the_table_of_the_code`"
    );
}
