//! Draws the picture into a buffer, at several sizes.

use std::time::Duration;

use contract::api::Workers;
use ratatui::{Terminal, backend::TestBackend, buffer::Buffer, style::Color};
use serde_json::json;

use super::*;
use crate::top::app::{Answers, Key};

fn fleet(workers: usize) -> Workers {
    let figure = |value: u64| json!({ "value": value, "source": "shim", "age_ms": 1 });
    let workers: Vec<_> = (0..workers)
        .map(|number| {
            let is_lost = number == 1;
            json!({
                "worker": format!("node-{number}/0"), "agent": format!("node-{number}"),
                "state": if is_lost { "lost" } else { "fresh" },
                "reason": if is_lost { "connection refused" } else { "" },
                "engine": { "page_tokens": 64 },
                "load": {
                    "turns_running": 12, "turns_queued": 3, "sessions": 4,
                    "pool_total_tokens": figure(100_000), "pool_used_tokens": figure(60_000),
                    "pinned_tokens": figure(40_000), "pool_evictable_tokens": figure(20_000),
                    "rows_held": figure(4), "rows_total": figure(64),
                    "devices": [{ "uuid": "GPU-a", "memory_used_bytes": 70_u64 << 30 }],
                },
            })
        })
        .collect();
    let fleet = json!({ "workers": workers, "unheard": [] });
    serde_json::from_value(fleet).unwrap()
}

fn app(workers: usize) -> (App, Instant) {
    let now = service::clock::now();
    let mut app = App::new("http://router:8080");
    let sessions = json!([
        { "digest": "c", "session_id": "child\u{1b}[2J", "parent": "p", "worker": "node-0/0",
          "retention": "tagged", "state": "idle", "turns": 2, "resident_tokens": 1_000 },
        { "digest": "l", "session_id": "x".repeat(200), "worker": "node-0/0",
          "retention": "tagged", "state": "idle", "turns": 123_456, "resident_tokens": 900 },
    ]);
    let parents = json!([
        { "digest": "p", "session_id": "parent", "worker": "node-0/0", "retention": "pinned",
          "state": "running", "turns": 9, "resident_tokens": 31_000 },
    ]);
    let sessions = json!({ "sessions": sessions, "parents": parents, "total": 2 });
    let placements =
        json!([{ "turn": "1", "worker": "node-0/0", "reason": "affinity", "age_ms": 5 }]);
    let answers = Answers {
        fleet: fleet(workers),
        sessions: serde_json::from_value(sessions).unwrap(),
        placements: Ok(serde_json::from_value(placements).unwrap()),
    };
    app.apply(now, Ok(answers));
    (app, now)
}

fn drawn(app: &App, now: Instant, size: (u16, u16), has_colours: bool) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
    terminal.draw(|frame| draw(frame, app, now, has_colours)).unwrap();
    terminal.backend().buffer().clone()
}

fn text(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width);
    let symbols: Vec<&str> = buffer.content().iter().map(|cell| cell.symbol()).collect();
    symbols.chunks(width).map(|line| line.concat() + "\n").collect()
}

#[test]
fn everything_is_there_at_80_by_24_and_at_200_by_60() {
    for size in [(80, 24), (200, 60)] {
        let (app, now) = app(4);
        let text = text(&drawn(&app, now, size, true));
        for shown in [
            "3/4 workers fresh",
            "2 sessions",
            "pinned",
            "evictable",
            "node-0/0",
            "node-3/0",
            "4/64",
            "70.0 GiB",
            "lost",
            "connection refused",
            "│parent ",
            "│└ child\\u{1b}",
            "x… ",
            "123k",
            "31.0k",
            "affinity",
            "q quit",
        ] {
            assert!(text.contains(shown), "{shown} at {size:?}:\n{text}");
        }
        assert!(!text.contains('\u{1b}'));
    }
}

#[test]
fn the_bar_has_the_share_of_each_part() {
    let (app, now) = app(1);
    let buffer = drawn(&app, now, (80, 24), true);
    let line = text(&buffer).lines().nth(3).unwrap().to_owned();
    let cells = |character: char| line.chars().filter(|it| *it == character).count();
    let bar: usize = PARTS.iter().map(|(_, character)| cells(*character)).sum();
    assert!(bar >= 15, "{line}");
    assert_eq!((cells('█') * 10 + bar / 2) / bar, 4, "40 % are pinned: {line}");
    assert_eq!(cells('▒'), cells('░'), "20 % run, 20 % are evictable: {line}");
}

#[test]
fn a_monochrome_terminal_gets_no_colours_and_the_same_text() {
    let (app, now) = app(2);
    let plain = drawn(&app, now, (80, 24), false);
    assert!(plain.content().iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    assert_eq!(text(&plain), text(&drawn(&app, now, (80, 24), true)));
}

#[test]
fn a_router_that_is_gone_is_named_above_its_last_figures() {
    let (mut app, now) = app(2);
    app.apply(now, Err("no router answers at http://router:8080".into()));
    let text = text(&drawn(&app, now + Duration::from_secs(7), (80, 24), true));
    assert!(text.starts_with("NO ANSWER for 7.0s, trying again: no router answers"), "{text}");
    assert!(text.contains("node-0/0"), "{text}");
}

#[test]
fn the_help_names_every_key() {
    let (mut app, now) = app(2);
    app.press(Key::Char('?'));
    let text = text(&drawn(&app, now, (80, 24), true));
    for (keys, what) in HELP {
        assert!(text.contains(keys) && text.contains(what), "{keys}:\n{text}");
    }
}

#[test]
fn no_size_and_no_number_of_workers_is_too_small_or_too_large() {
    for workers in [0, 1, 200] {
        let (mut app, now) = app(workers);
        app.worker_offset = workers.saturating_sub(1);
        for width in [0, 1, 7, 20, 79, 141, 300] {
            for height in [0, 1, 2, 5, 24, 100] {
                drop(drawn(&app, now, (width, height), true));
            }
        }
    }
}
