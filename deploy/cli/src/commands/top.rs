//! Runs `berth top`: asks the router, reads keys, and draws, until the user quits.
//!
//! The terminal is restored however the program ends.

use std::{
    io::{self, IsTerminal as _},
    time::Duration,
};

use contract::api::{FleetSessions, RecentPlacement, Workers};
use crossterm::{
    event::{self, Event, KeyCode, KeyEventKind, KeyModifiers},
    execute,
    terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode},
};
use ratatui::{Terminal, backend::CrosstermBackend};
use serde::Deserialize as _;
use service::clock::now;
use tokio::{sync::mpsc, time::MissedTickBehavior};

use super::{Outcome, pages::PagedList};
use crate::{
    args::{TargetArgs, TopArgs},
    connect::router::RouterClient,
    error::{Error, chain},
    text::style::Style,
    top::{
        app::{Answers, App, Key},
        view,
    },
};

const PLACEMENTS_MAX: usize = 200;
const KEYS_WAITING_MAX: usize = 64;

pub async fn run(target: &TargetArgs, args: &TopArgs) -> Result<Outcome, Error> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let text = "top needs a terminal; for programs there is `berth workers --json --watch`";
        return Err(Error::Usage(text.to_owned()));
    }
    let router = RouterClient::new(target)?;
    let mut list = PagedList::new(&router, "/v1/placements", "placements");
    let mut app = App::new(router.url());
    // Wrong arguments and keys are said before the screen is taken.
    let mut asked = app.sessions_query();
    let answers = ask(&router, &mut list, &asked).await?;
    app.apply(now(), Ok(answers));
    let has_colours = Style::of_stdout().has_colours;
    let mut screen = Screen::take()?;
    let mut keys = read_keys()?;
    let mut rounds = tokio::time::interval(Duration::from_secs_f64(args.interval));
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        screen.terminal.draw(|frame| view::draw(frame, &app, now(), has_colours))?;
        tokio::select! {
            biased;
            input = keys.recv() => match input {
                // A resize only draws again.
                Some(None) => {}
                Some(Some(key)) if app.press(key) => {
                    // Another order or filter isn't worth the rest of a long interval.
                    if app.sessions_query() != asked {
                        rounds.reset_immediately();
                    }
                }
                Some(Some(_)) | None => return Ok(Outcome::Well),
            },
            _ = rounds.tick() => {
                asked = app.sessions_query();
                let answers = ask(&router, &mut list, &asked).await;
                app.apply(now(), answers.map_err(|error| chain(&error)));
            }
        }
    }
}

async fn ask(
    router: &RouterClient,
    list: &mut PagedList<'_>,
    sessions: &str,
) -> Result<Answers, Error> {
    let (fleet, _) = router.get_as::<Workers>("/v1/workers").await?;
    let (sessions, _) = router.get_as::<FleetSessions>(sessions).await?;
    let placements = match list.read_newest(PLACEMENTS_MAX).await {
        Ok(entries) => {
            Ok(entries.iter().filter_map(|it| RecentPlacement::deserialize(it).ok()).collect())
        }
        Err(error @ Error::RouteAbsent { .. }) => Err(chain(&error)),
        Err(error) => return Err(error),
    };
    Ok(Answers { fleet, sessions, placements })
}

/// `None` is a change of the terminal's size.
fn read_keys() -> io::Result<mpsc::Receiver<Option<Key>>> {
    let (sender, receiver) = mpsc::channel(KEYS_WAITING_MAX);
    let read = move || {
        // The thread ends when the terminal is gone, or with the program.
        while let Ok(event) = event::read() {
            let input = match event {
                Event::Key(key) if key.kind != KeyEventKind::Release => to_key(key).map(Some),
                Event::Resize(..) => Some(None),
                _ => None,
            };
            if input.is_some_and(|input| sender.blocking_send(input).is_err()) {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keys".into()).spawn(read)?;
    Ok(receiver)
}

fn to_key(event: event::KeyEvent) -> Option<Key> {
    Some(match event.code {
        KeyCode::Char('c' | 'd') if event.modifiers.contains(KeyModifiers::CONTROL) => {
            Key::Interrupt
        }
        KeyCode::Char(character) => Key::Char(character),
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        _ => return None,
    })
}

/// The terminal is restored when this is dropped, and before a panic says what happened.
struct Screen {
    terminal: Terminal<CrosstermBackend<io::Stdout>>,
}

impl Screen {
    fn take() -> io::Result<Self> {
        let earlier = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            earlier(panic);
        }));
        enable_raw_mode()?;
        // From here on, whatever fails restores the terminal.
        let entered = execute!(io::stdout(), EnterAlternateScreen);
        let made = entered.and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        made.map(|terminal| Self { terminal }).inspect_err(|_| restore())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.terminal.show_cursor();
        restore();
    }
}

/// If that fails, the terminal is gone.
fn restore() {
    let _ = execute!(io::stdout(), LeaveAlternateScreen, crossterm::cursor::Show);
    let _ = disable_raw_mode();
}
