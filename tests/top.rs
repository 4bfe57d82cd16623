//! Tests of `berth top` in a real terminal, which tmux emulates, and of the sessions that it lists.

#![expect(
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a test shows the screen, or why it is skipped"
)]
#![expect(clippy::unwrap_used, reason = "a test fails where it unwraps")]

use std::process::Stdio;

use harness::cluster::{Cluster, eventually, router_config, text_turn};
use serde_json::{Value, json};
use tokio::process::Command;

/// The id of a session that fits in a wide terminal and not in a narrow one.
const LONG_ID: &str = "a-session-whose-client-gave-it-a-name-of-fifty-nine-letters";

/// Starts a fleet with sessions: a person's, that of its helper, that of the helper's helper, and
/// others.
async fn start() -> Cluster {
    let cluster = Cluster::start(3, |_| {}).await.unwrap();
    let turns: [(&str, Option<&str>); 5] = [
        ("person", None),
        ("other", None),
        ("helper", Some("person")),
        ("helper-s-helper", Some("helper")),
        (LONG_ID, None),
    ];
    for (id, parent) in turns {
        let parent = parent.map(|parent| ("x-parent-session-id", parent));
        let headers: Vec<_> = [("x-session-id", id)].into_iter().chain(parent).collect();
        cluster.turn("/generate", &headers, &text_turn("hello", 2)).await;
    }
    cluster
}

/// Asks the newest router for the sessions with a text.
async fn find_sessions(cluster: &Cluster, text: &str) -> Value {
    let url = cluster.routers.last().unwrap().url(&format!("/v1/fleet/sessions?find={text}"));
    cluster.web.get(&url).await.unwrap().json()
}

#[tokio::test]
async fn a_router_that_saw_no_turn_of_a_sub_agent_knows_its_parents() {
    let mut cluster = start().await;
    cluster.start_router(router_config(&[])).await.unwrap();
    let listed = eventually("the helper's helper", || async {
        let listed = find_sessions(&cluster, "HELPER-S-HELPER").await;
        (listed["total"] == 1).then_some(listed)
    })
    .await;
    let [helper, person] = [0, 1].map(|number| &listed["parents"][number]);
    assert_eq!(listed["sessions"][0]["parent"], helper["digest"], "{listed}");
    assert_eq!(helper["session_id"], "helper");
    assert_eq!(helper["parent"], person["digest"]);
    assert_eq!((&person["session_id"], &person["parent"]), (&json!("person"), &Value::Null));
    // Turns that name no parent don't make the session an orphan.
    cluster.turn("/generate", &[("x-session-id", "helper")], &text_turn("hello you", 2)).await;
    eventually("the second turn of the helper", || async {
        let helper = &find_sessions(&cluster, "helper").await["sessions"][0];
        let is_newest = helper["session_id"] == "helper" && helper["turns"] == 2;
        is_newest.then(|| assert_eq!(helper["parent"], person["digest"]))
    })
    .await;
}

/// A terminal of tmux that runs `berth top`; killed when dropped.
struct Terminal {
    name: String,
    size: (usize, usize),
}

impl Terminal {
    /// Runs `berth top`. `None` if there is no tmux.
    async fn start(cluster: &Cluster, size: (usize, usize)) -> Option<Self> {
        let name = format!("berth-test-{}-{}x{}", std::process::id(), size.0, size.1);
        let terminal = Self { name, size };
        let router = format!("--router={}", cluster.routers[0].url(""));
        let (width, height) = (size.0.to_string(), size.1.to_string());
        let has_started = terminal
            .tmux(&["start-server", ";", "set", "-g", "status", "off", ";", "new-session", "-d"])
            .args(["-x", &width, "-y", &height, env!("CARGO_BIN_EXE_cli-process")])
            .args([&router, "top", "--interval=0.2"])
            .status()
            .await;
        match has_started {
            Ok(status) => assert!(status.success(), "tmux: {status}"),
            Err(error) => {
                eprintln!("skipped: tmux can't be started ({error}); install Debian's package");
                return None;
            }
        }
        Some(terminal)
    }

    fn tmux(&self, args: &[&str]) -> Command {
        let mut command = Command::new("tmux");
        command.args(["-u", "-L", &self.name, "-f", "/dev/null"]).args(args);
        command.env_remove("TMUX").stdin(Stdio::null());
        command
    }

    async fn press(&self, keys: &[&str]) {
        let mut command = self.tmux(&["send-keys"]);
        assert!(command.args(keys).status().await.unwrap().success());
    }

    /// Waits for a whole screen that has all these texts, and returns its lines.
    async fn wait_for(&self, texts: &[&str]) -> Vec<String> {
        let mut last = String::new();
        let deadline = tokio::time::Instant::now() + harness::cluster::PATIENCE;
        loop {
            let output = self.tmux(&["capture-pane", "-p"]).output().await.unwrap();
            let screen = String::from_utf8(output.stdout).unwrap();
            let lines: Vec<String> = screen.lines().map(str::to_owned).collect();
            let is_missing = |text: &&str| !screen.contains(text);
            let fault = match texts.iter().copied().find(is_missing) {
                Some(text) => Err(format!("no {text:?}")),
                None => self.check(&lines),
            };
            // A screen may be read while it is drawn.
            if fault.is_ok() && screen == last {
                return lines;
            }
            assert!(tokio::time::Instant::now() < deadline, "{fault:?} in:\n{screen}");
            last = screen;
        }
    }

    /// Checks that the picture fills the terminal, and that no frame is cut.
    fn check(&self, lines: &[String]) -> Result<(), String> {
        let (width, height) = self.size;
        if lines.len() != height || lines.iter().any(|line| line.chars().count() > width) {
            return Err(format!("not {width} by {height}"));
        }
        let is_closed = |line: &&String| {
            let ends = [('┌', '┐'), ('│', '│'), ('└', '┘')];
            ends.iter().all(|(begin, end)| !line.starts_with(*begin) || line.ends_with(*end))
        };
        match lines.iter().find(|line| !is_closed(line)) {
            None => Ok(()),
            Some(line) => Err(format!("not closed: {line:?}")),
        }
    }

    /// Waits until the program has ended, and tmux with it.
    async fn wait_for_end(&self) {
        eventually("the end", || async {
            let status = self.tmux(&["has-session"]).stderr(Stdio::null()).status().await;
            (!status.unwrap().success()).then_some(())
        })
        .await;
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let mut command = std::process::Command::new("tmux");
        command.args(["-L", &self.name, "kill-server"]).stderr(Stdio::null());
        // It fails if the program has ended, or if there is no tmux.
        let _ = command.status();
    }
}

/// Returns the place of the line that has a text.
fn place(lines: &[String], text: &str) -> usize {
    let place = lines.iter().position(|line| line.contains(text));
    place.unwrap_or_else(|| panic!("no {text} in:\n{}", lines.join("\n")))
}

#[tokio::test]
async fn top_shows_the_fleet_in_a_terminal_of_80_by_24_and_of_200_by_60() {
    let cluster = start().await;
    for (size, long_id) in [((80, 24), "a-session-whose-client-gave"), ((200, 60), LONG_ID)] {
        let Some(terminal) = Terminal::start(&cluster, size).await else { return };
        let lines = terminal.wait_for(&["3/3 workers fresh", "5 sessions", "least_cost"]).await;
        println!("{}", lines.join("\n"));
        assert!(lines[0].starts_with("berth top  http://127."), "{}", lines[0]);
        assert!(lines[1].ends_with("░░ evictable   ·· free"), "{}", lines[1]);
        assert!(lines[size.1 - 1].starts_with("q quit  ? help"), "{}", lines[size.1 - 1]);
        for column in ["WORKER", "KV POOL", "RUN", "WAIT", "ROWS", "HBM", "TOKENS"] {
            assert!(lines[2].contains(column), "{column}: {}", lines[2]);
        }
        for worker in ["w0/0", "w1/0", "w2/0"] {
            assert!(lines[place(&lines, worker)].contains("fresh"));
        }
        // Each below the session that started it.
        let person = place(&lines, "│person ");
        assert!(lines[person + 1].starts_with("│└ helper "), "{}", lines[person + 1]);
        assert!(lines[person + 2].starts_with("│  └ helper-s-helper "), "{}", lines[person + 2]);
        let long = &lines[place(&lines, long_id)];
        assert_eq!(long.contains('…'), size.0 == 80, "only what has no room is cut: {long}");
        assert!(long.contains("tagged idle"), "{long}");

        terminal.press(&["s"]).await;
        terminal.wait_for(&["sessions by turns"]).await;
        terminal.press(&["/", "S-HELPER", "Enter"]).await;
        let lines = terminal.wait_for(&["sessions with: S-HELPER ", "1 sessions"]).await;
        assert_eq!(place(&lines, "│person "), place(&lines, "helper-s-helper") - 2);
        assert!(!lines.iter().any(|line| line.contains("│other")), "{lines:?}");
        terminal.press(&["?"]).await;
        terminal.wait_for(&["let the arrows move the workers", "this help"]).await;
        terminal.press(&["x", "q"]).await;
        terminal.wait_for_end().await;
    }
}
