//! Draws `berth top` for a terminal of any size, with and without colours. Pure.
//!
//! Every figure is readable without colours: the bar's parts have characters of their own, and
//! states are words.

use std::time::Instant;

use contract::{api::Worker, load::Figure};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph, Row, Table},
};

use super::{
    app::App,
    bar::{self, PARTS},
    tree::SessionLine,
};
use crate::{
    pool_parts::PoolParts,
    text::{
        bytes, clean, count, known, millis,
        style::{Tone, state_tone},
        table::cut,
    },
};

/// From this width, sessions and placements stand side by side.
const WIDE_COLUMNS: u16 = 140;
/// In the order of [`PARTS`].
const PART_COLOURS: [Color; 5] =
    [Color::Magenta, Color::Blue, Color::Green, Color::Yellow, Color::DarkGray];
const NAME_WIDTH_MAX: u16 = 24;
const HELP: [(&str, &str); 9] = [
    ("q, ctrl-c", "quit"),
    ("up, down, j, k", "move the sessions, or the workers after w"),
    ("page up, down", "move by ten"),
    ("w", "let the arrows move the workers, or the sessions"),
    ("s", "sort the sessions by tokens, turns, idle time, id"),
    ("/", "show sessions with this text: id, client, worker, state"),
    ("enter, esc", "end the text; show all sessions again"),
    ("p", "pause, or go on"),
    ("?, h", "this help; any key ends it"),
];

pub fn draw(frame: &mut Frame<'_>, app: &App, now: Instant, has_colours: bool) {
    let area = frame.area();
    let painter = Painter { has_colours };
    let workers = u16::try_from(app.fleet.workers.len()).unwrap_or(u16::MAX);
    let unheard = u16::try_from(app.fleet.unheard.len()).unwrap_or(u16::MAX);
    // The workers have what they need, and at most half of the rest.
    let wanted = workers.saturating_add(unheard).saturating_add(1);
    let worker_lines = wanted.clamp(2, (area.height.saturating_sub(4) / 2).max(2));
    let [head, legend, top, bottom, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(worker_lines),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(painter.head(app, now, head.width), head);
    frame.render_widget(painter.legend(), legend);
    painter.draw_workers(frame, app, top);
    let (sessions, placements) = if area.width >= WIDE_COLUMNS {
        let [left, right] =
            Layout::horizontal([Constraint::Fill(3), Constraint::Fill(2)]).areas(bottom);
        (left, right)
    } else {
        let below = (bottom.height / 3).min(8);
        let [upper, lower] =
            Layout::vertical([Constraint::Min(0), Constraint::Length(below)]).areas(bottom);
        (upper, lower)
    };
    painter.draw_sessions(frame, app, sessions);
    painter.draw_placements(frame, app, now, placements);
    frame.render_widget(painter.foot(app), foot);
    if app.shows_help {
        draw_help(frame, area);
    }
}

#[derive(Clone, Copy)]
struct Painter {
    has_colours: bool,
}

impl Painter {
    fn colour(self, colour: Color) -> Style {
        if self.has_colours { Style::new().fg(colour) } else { Style::new() }
    }

    fn tone(self, tone: Tone) -> Style {
        match tone {
            Tone::Plain => Style::new(),
            Tone::Good => self.colour(Color::Green),
            Tone::Warn => self.colour(Color::Yellow),
            Tone::Bad => self.colour(Color::Red).add_modifier(Modifier::BOLD),
            Tone::Faint => Style::new().add_modifier(Modifier::DIM),
            Tone::Strong => Style::new().add_modifier(Modifier::BOLD),
        }
    }

    fn head(self, app: &App, now: Instant, width: u16) -> Line<'static> {
        let workers = app.fleet.workers.len();
        let fresh = app.fleet.workers.iter().filter(|worker| worker.is_fresh()).count();
        let text = format!(
            "berth top  {}  {fresh}/{workers} workers fresh  {} sessions",
            clean(&app.router),
            app.sessions_total(),
        );
        let mut spans = vec![Span::styled(text, self.tone(Tone::Strong))];
        if let Some(problem) = &app.problem {
            let silence =
                app.silence(now).map(|silence| millis(service::clock::whole_millis(silence)));
            let text = format!(
                "NO ANSWER for {}, trying again: {}",
                known(silence, |it| it),
                clean(problem)
            );
            // What is wrong matters more than the sums.
            let text = cut(&text, usize::from(width));
            return Line::styled(text, self.tone(Tone::Bad).add_modifier(Modifier::REVERSED));
        }
        match app.answered_at {
            None => spans.push(Span::raw("  connecting")),
            Some(_) if app.is_paused => {
                spans.push(Span::styled("  PAUSED", self.tone(Tone::Warn)));
            }
            Some(_) => {}
        }
        Line::from(spans)
    }

    fn legend(self) -> Line<'static> {
        let parts = PARTS.iter().zip(PART_COLOURS).flat_map(|((name, character), colour)| {
            let mark = Span::styled(character.to_string().repeat(2), self.colour(colour));
            [mark, Span::raw(format!(" {name}   "))]
        });
        Line::from_iter([Span::raw("KV pool: ")].into_iter().chain(parts))
    }

    fn draw_workers(self, frame: &mut Frame<'_>, app: &App, area: Rect) {
        let name_width =
            column_width(app.fleet.workers.iter().map(|it| &it.worker), 6, NAME_WIDTH_MAX);
        let fixed = name_width + 9 + 4 + 4 + 9 + 9 + 7;
        let left = area.width.saturating_sub(fixed + 8);
        // On wide terminals the reason has its place; on narrow ones it takes the bar's.
        let reason_width = if left > 60 { left / 2 } else { 0 };
        let bar_width = left.saturating_sub(reason_width);
        let rows = app
            .fleet
            .workers
            .iter()
            .skip(app.worker_offset)
            .map(|worker| self.worker_row(worker, usize::from(bar_width), reason_width > 0));
        let unheard = app.fleet.unheard.iter().map(|agent| {
            let reason = Line::raw(clean(&agent.reason));
            let (name, state) = (clean(&agent.control), "unheard".to_owned());
            Row::new(vec![Line::raw(name), Line::styled(state, self.tone(Tone::Bad)), reason])
        });
        let titles =
            ["WORKER", "STATE", "KV POOL", "RUN", "WAIT", "ROWS", "HBM", "TOKENS", "REASON"];
        let widths = [name_width, 9, bar_width, 4, 4, 9, 9, 7, reason_width];
        let table = Table::new(rows.chain(unheard), widths.map(Constraint::Length))
            .header(Row::new(titles).style(self.tone(Tone::Strong)));
        frame.render_widget(table, area);
    }

    fn worker_row(self, worker: &Worker, bar_width: usize, has_reason: bool) -> Row<'static> {
        let load = worker.load.clone().unwrap_or_default();
        let value = |figure: Option<Figure>| figure.map(|figure| figure.value);
        let rows = value(load.rows_held).zip(value(load.rows_total));
        let used = load.devices.iter().filter_map(|device| device.memory_used_bytes).sum::<u64>();
        let parts = PoolParts::read(worker);
        let reason = clean(&worker.reason);
        let bar = match parts {
            _ if !worker.is_fresh() && !has_reason => {
                Line::styled(cut(&reason, bar_width), self.tone(state_tone(&worker.state)))
            }
            Some(parts) => self.bar(bar::cells(&parts, bar_width)),
            None => Line::raw("unknown"),
        };
        Row::new(vec![
            Line::raw(cut(&clean(&worker.worker), usize::from(NAME_WIDTH_MAX))),
            Line::styled(clean(&worker.state), self.tone(state_tone(&worker.state))),
            bar,
            Line::raw(format!("{:>4}", load.turns_running)),
            Line::raw(format!("{:>4}", load.turns_queued)),
            Line::raw(known(rows, |(held, total)| format!("{held}/{total}"))),
            Line::raw(if used > 0 { bytes(used) } else { "-".to_owned() }),
            Line::raw(known(parts, |parts| count(parts.total()))),
            Line::raw(reason),
        ])
    }

    fn bar(self, cells: [usize; 5]) -> Line<'static> {
        let parts = PARTS.iter().zip(PART_COLOURS).zip(cells);
        Line::from_iter(parts.map(|(((_, character), colour), cells)| {
            Span::styled(character.to_string().repeat(cells), self.colour(colour))
        }))
    }

    fn draw_sessions(self, frame: &mut Frame<'_>, app: &App, area: Rect) {
        let sessions = app.sessions();
        let title = match app.filter.as_str() {
            "" if app.is_typing => " sessions with: _ ".to_owned(),
            "" => format!(" sessions by {} ", app.sort_key.as_str()),
            filter => format!(
                " sessions with: {}{} ",
                clean(filter),
                if app.is_typing { "_" } else { "" }
            ),
        };
        let block = Block::bordered().title(title);
        let workers = sessions.iter().map(|line| &line.session.worker);
        let worker_width = column_width(workers, 6, NAME_WIDTH_MAX);
        let fixed = [worker_width, 6, 8, 5, 6, 6];
        // Both borders, and the space after each column but the last.
        let taken = fixed.iter().sum::<u16>() + 2 + 6;
        let name_width = area.width.saturating_sub(taken).max(8);
        let rows = sessions
            .iter()
            .skip(app.session_offset)
            .map(|line| self.session_row(line, usize::from(name_width), usize::from(worker_width)));
        let widths = [name_width].into_iter().chain(fixed).map(Constraint::Length);
        let titles = ["SESSION", "WORKER", "KEPT", "STATE", "TURNS", "TOKENS", "IDLE"];
        let table = Table::new(rows, widths)
            .header(Row::new(titles).style(self.tone(Tone::Strong)))
            .block(block);
        frame.render_widget(table, area);
    }

    fn session_row(
        self,
        line: &SessionLine<'_>,
        name_width: usize,
        worker_width: usize,
    ) -> Row<'static> {
        let SessionLine { depth, session, is_found } = *line;
        // Deep families must leave room for the name.
        let indent = 2 * depth.saturating_sub(1).min(name_width / 6);
        let branch = if depth > 0 { " ".repeat(indent) + "└ " } else { String::new() };
        let name = cut(&format!("{branch}{}", clean(&session.session_id)), name_width);
        let row = Row::new(vec![
            Line::raw(name),
            Line::raw(cut(&clean(&session.worker), worker_width)),
            Line::raw(clean(&session.retention)),
            Line::styled(clean(&session.state), self.tone(state_tone(&session.state))),
            Line::raw(format!("{:>5}", count(session.turns))),
            Line::raw(format!("{:>6}", known(session.resident_tokens, count))),
            Line::raw(format!("{:>6}", millis(session.idle_ms()))),
        ]);
        if is_found { row } else { row.style(self.tone(Tone::Faint)) }
    }

    fn draw_placements(self, frame: &mut Frame<'_>, app: &App, now: Instant, area: Rect) {
        let block = Block::bordered().title(" placements, newest first ");
        if let Some(problem) = &app.placements_problem {
            let text = Paragraph::new(clean(problem)).wrap(ratatui::widgets::Wrap { trim: true });
            frame.render_widget(text.block(block), area);
            return;
        }
        // Both borders, three spaces, the time and the tokens: the rest is for worker and reason.
        let text_width = usize::from(area.width.saturating_sub(2 + 3 + 6 + 8) / 2);
        let rows = app.placements.iter().map(|(answered_at, placement)| {
            let since = service::clock::whole_millis(now.saturating_duration_since(*answered_at));
            Row::new(vec![
                format!("{:>6}", millis(placement.age_ms.saturating_add(since))),
                cut(&clean(&placement.worker), text_width),
                cut(&clean(&placement.reason), text_width),
                format!("{:>6}", known(placement.uncached_tokens, count)),
            ])
        });
        let widths = [
            Constraint::Length(6),
            Constraint::Fill(1),
            Constraint::Fill(1),
            Constraint::Length(8),
        ];
        let header =
            Row::new(["AGO", "WORKER", "REASON", "COMPUTES"]).style(self.tone(Tone::Strong));
        frame.render_widget(Table::new(rows, widths).header(header).block(block), area);
    }

    fn foot(self, app: &App) -> Line<'static> {
        let moved = if app.moves_workers { "sessions" } else { "workers" };
        let text = format!("q quit  ? help  s sort  / filter  w move {moved}  p pause");
        Line::styled(text, self.tone(Tone::Faint))
    }
}

fn column_width<'a>(texts: impl Iterator<Item = &'a String>, min: u16, max: u16) -> u16 {
    let longest = texts.map(|text| text.chars().count()).max().unwrap_or(0);
    u16::try_from(longest).unwrap_or(max).clamp(min, max)
}

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let lines: Vec<Line<'_>> =
        HELP.iter().map(|(keys, what)| Line::raw(format!("{keys:<16}{what}"))).collect();
    let height = u16::try_from(lines.len() + 2).unwrap_or(area.height).min(area.height);
    let width = 78.min(area.width);
    let [_, middle, _] =
        Layout::vertical([Constraint::Fill(1), Constraint::Length(height), Constraint::Fill(1)])
            .areas(area);
    let [_, middle, _] =
        Layout::horizontal([Constraint::Fill(1), Constraint::Length(width), Constraint::Fill(1)])
            .areas(middle);
    frame.render_widget(Clear, middle);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" keys ")), middle);
}

#[cfg(test)]
mod tests;
