//! The state of `berth top`, changed by answers of the router and by keys. Pure.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use contract::api::{FleetSession, FleetSessions, RecentPlacement, Workers};

use super::tree::{self, SessionLine};
use crate::connect::router::encode;

/// The router tells no more.
const SESSIONS_MAX: usize = 1_000;
const PLACEMENTS_MAX: usize = 200;
const FILTER_CHARS_MAX: usize = 100;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SortKey {
    /// Most KV first.
    #[default]
    Tokens,
    /// Most turns first.
    Turns,
    /// Used last first.
    Idle,
    Id,
}

impl SortKey {
    #[must_use]
    pub fn next(self) -> Self {
        match self {
            Self::Tokens => Self::Turns,
            Self::Turns => Self::Idle,
            Self::Idle => Self::Id,
            Self::Id => Self::Tokens,
        }
    }

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Turns => "turns",
            Self::Idle => "idle",
            Self::Id => "id",
        }
    }

    fn as_query(self) -> &'static str {
        match self {
            Self::Tokens => "resident",
            Self::Turns => "turns",
            Self::Idle => "recent",
            Self::Id => "id",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    Char(char),
    Up,
    Down,
    PageUp,
    PageDown,
    /// Ends an input.
    Enter,
    /// Abandons an input.
    Escape,
    Backspace,
    /// Ends the program, whatever is shown.
    Interrupt,
}

#[derive(Debug, Clone)]
pub struct Answers {
    pub fleet: Workers,
    pub sessions: FleetSessions,
    /// Those since the last round; `Err` says why there are none.
    pub placements: Result<Vec<RecentPlacement>, String>,
}

impl Default for Answers {
    fn default() -> Self {
        let (fleet, sessions) = (Workers::default(), FleetSessions::default());
        Self { fleet, sessions, placements: Ok(vec![]) }
    }
}

/// What the router answered, and what the user chose.
#[derive(Debug)]
pub struct App {
    pub router: String,
    pub fleet: Workers,
    sessions: FleetSessions,
    /// The newest is first, with the time at which each was answered.
    pub placements: VecDeque<(Instant, RecentPlacement)>,
    pub placements_problem: Option<String>,
    pub answered_at: Option<Instant>,
    pub problem: Option<String>,
    pub sort_key: SortKey,
    /// Only sessions that have this text in any letter case are shown, and their parents.
    pub filter: String,
    pub is_typing: bool,
    pub shows_help: bool,
    pub worker_offset: usize,
    pub session_offset: usize,
    /// The arrows move the workers instead of the sessions.
    pub moves_workers: bool,
    pub is_paused: bool,
}

impl App {
    #[must_use]
    pub fn new(router: impl Into<String>) -> Self {
        Self {
            router: router.into(),
            fleet: Workers::default(),
            sessions: FleetSessions::default(),
            placements: VecDeque::new(),
            placements_problem: None,
            answered_at: None,
            problem: None,
            sort_key: SortKey::default(),
            filter: String::new(),
            is_typing: false,
            shows_help: false,
            worker_offset: 0,
            session_offset: 0,
            moves_workers: false,
            is_paused: false,
        }
    }

    /// After a failure the last figures stay, and the failure is shown.
    pub fn apply(&mut self, now: Instant, answers: Result<Answers, String>) {
        let answers = match answers {
            Ok(answers) => answers,
            Err(problem) => {
                self.problem = Some(problem);
                return;
            }
        };
        self.problem = None;
        self.answered_at = Some(now);
        if self.is_paused {
            return;
        }
        (self.fleet, self.sessions) = (answers.fleet, answers.sessions);
        match answers.placements {
            Ok(placements) => {
                for placement in placements {
                    self.placements.push_front((now, placement));
                }
                self.placements.truncate(PLACEMENTS_MAX);
                self.placements_problem = None;
            }
            Err(problem) => self.placements_problem = Some(problem),
        }
    }

    /// Returns whether the program goes on.
    pub fn press(&mut self, key: Key) -> bool {
        if key == Key::Interrupt {
            return false;
        }
        if self.is_typing {
            self.type_filter(key);
            return true;
        }
        if self.shows_help {
            self.shows_help = false;
            return true;
        }
        let offset =
            if self.moves_workers { &mut self.worker_offset } else { &mut self.session_offset };
        match key {
            Key::Char('q') => return false,
            Key::Char('?' | 'h') => self.shows_help = true,
            Key::Char('/') => self.is_typing = true,
            Key::Char('s') => self.sort_key = self.sort_key.next(),
            Key::Char('p') => self.is_paused = !self.is_paused,
            Key::Char('w') => self.moves_workers = !self.moves_workers,
            Key::Escape => self.filter.clear(),
            Key::Up | Key::Char('k') => *offset = offset.saturating_sub(1),
            Key::Down | Key::Char('j') => *offset += 1,
            Key::PageUp => *offset = offset.saturating_sub(10),
            Key::PageDown => *offset += 10,
            Key::Char(_) | Key::Enter | Key::Backspace | Key::Interrupt => {}
        }
        self.bound_offsets();
        true
    }

    fn type_filter(&mut self, key: Key) {
        match key {
            Key::Char(character) if self.filter.chars().count() < FILTER_CHARS_MAX => {
                self.filter.push(character);
            }
            Key::Backspace => drop(self.filter.pop()),
            Key::Enter => self.is_typing = false,
            Key::Escape => {
                self.filter.clear();
                self.is_typing = false;
            }
            _ => {}
        }
        self.session_offset = 0;
    }

    /// Keeps a line in view, however far the keys went.
    fn bound_offsets(&mut self) {
        let (workers, sessions) = (self.fleet.workers.len(), self.sessions().len());
        self.worker_offset = self.worker_offset.min(workers.saturating_sub(1));
        self.session_offset = self.session_offset.min(sessions.saturating_sub(1));
    }

    #[must_use]
    pub fn sessions_query(&self) -> String {
        let (sort, find) = (self.sort_key.as_query(), encode(&self.filter));
        format!("/v1/fleet/sessions?limit={SESSIONS_MAX}&sort={sort}&find={find}")
    }

    /// There may be more than are listed.
    #[must_use]
    pub fn sessions_total(&self) -> u64 {
        self.sessions.total
    }

    /// The router has filtered and sorted the sessions; between a key and its next answer, this
    /// does.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionLine<'_>> {
        let filter = self.filter.to_lowercase();
        let is_found = |session: &FleetSession| {
            let texts = [
                &session.session_id,
                &session.principal,
                &session.worker,
                &session.state,
                &session.retention,
            ];
            session.digest == filter
                || texts.iter().any(|text| text.to_lowercase().contains(&filter))
        };
        let listed = self.sessions.sessions.iter();
        let (mut found, others): (Vec<&FleetSession>, Vec<&FleetSession>) =
            listed.partition(|session| is_found(session));
        found.sort_by(|one, other| {
            let order = match self.sort_key {
                SortKey::Tokens => other.resident_tokens.cmp(&one.resident_tokens),
                SortKey::Turns => other.turns.cmp(&one.turns),
                SortKey::Idle => one.idle_ms().cmp(&other.idle_ms()),
                SortKey::Id => std::cmp::Ordering::Equal,
            };
            let order = order.then_with(|| one.session_id.cmp(&other.session_id));
            order.then_with(|| one.digest.cmp(&other.digest))
        });
        let parents: Vec<&FleetSession> =
            others.into_iter().chain(&self.sessions.parents).collect();
        tree::below_parents(&found, &parents)
    }

    /// `None` if the router answers.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Option<Duration> {
        self.problem.as_ref()?;
        Some(self.answered_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(id: &str, tokens: u64, parent: Option<&str>) -> FleetSession {
        FleetSession {
            digest: format!("digest of {id}"),
            session_id: id.into(),
            worker: "w0/0".into(),
            resident_tokens: Some(tokens),
            turns: 100 - tokens,
            idle_ms: Some(tokens),
            parent: parent.map(|parent| format!("digest of {parent}")),
            ..FleetSession::default()
        }
    }

    fn app(sessions: Vec<FleetSession>) -> App {
        let mut app = App::new("http://r");
        let total = sessions.len() as u64;
        let sessions = FleetSessions { sessions, total, ..FleetSessions::default() };
        let answers = Answers { sessions, ..Answers::default() };
        app.apply(service::clock::now(), Ok(answers));
        app
    }

    fn ids(app: &App) -> Vec<(usize, String)> {
        let lines = app.sessions().into_iter();
        lines.map(|line| (line.depth, line.session.session_id.clone())).collect()
    }

    #[test]
    fn sessions_are_sorted_and_filtered_by_keys() {
        let mut app =
            app(vec![session("a", 1, None), session("b", 3, None), session("c", 2, None)]);
        let order = |app: &App| ids(app).into_iter().map(|(_, id)| id).collect::<String>();
        assert_eq!(order(&app), "bca");
        for expected in ["acb", "acb", "abc", "bca"] {
            app.press(Key::Char('s'));
            assert_eq!(order(&app), expected, "{:?}", app.sort_key);
        }
        for key in ['/', 'C'] {
            app.press(Key::Char(key));
        }
        assert_eq!(order(&app), "c", "any letter case");
        // While a filter is typed, letters are no commands.
        assert!(app.press(Key::Char('q')) && app.is_typing);
        app.press(Key::Backspace);
        app.press(Key::Enter);
        assert_eq!(order(&app), "c");
        app.press(Key::Escape);
        assert_eq!(order(&app).len(), 3);
    }

    #[test]
    fn a_filter_finds_a_child_and_shows_its_parents_until_and_after_the_router_s_answer() {
        let sessions = [
            session("root", 1, None),
            session("child", 9, Some("root")),
            session("other", 5, None),
        ];
        let mut app = app(sessions.to_vec());
        for key in "/CHILD".chars() {
            app.press(Key::Char(key));
        }
        let shown = [(0, "root".to_owned()), (1, "child".to_owned())];
        assert_eq!(ids(&app), shown);
        assert_eq!(app.sessions().iter().filter(|line| line.is_found).count(), 1);
        app.press(Key::Char('&'));
        assert_eq!(
            app.sessions_query(),
            "/v1/fleet/sessions?limit=1000&sort=resident&find=CHILD%26"
        );
        app.press(Key::Backspace);
        let [root, child, _] = sessions;
        let sessions = FleetSessions { sessions: vec![child], parents: vec![root], total: 1 };
        app.apply(service::clock::now(), Ok(Answers { sessions, ..Answers::default() }));
        assert_eq!(ids(&app), shown);
    }

    #[test]
    fn a_router_that_is_gone_leaves_its_last_figures_and_comes_back() {
        let mut app = app(vec![session("a", 1, None)]);
        let now = app.answered_at.unwrap();
        app.apply(now, Err("no router answers".into()));
        let later = now + Duration::from_secs(3);
        assert_eq!(app.silence(later), Some(Duration::from_secs(3)));
        assert_eq!(app.sessions().len(), 1);
        app.apply(later, Ok(Answers::default()));
        assert_eq!((app.silence(later), app.sessions().len()), (None, 0));
    }

    #[test]
    fn a_pause_keeps_the_picture_and_keys_never_leave_it() {
        let mut app = app(vec![session("a", 1, None), session("b", 2, None)]);
        app.press(Key::Char('p'));
        app.apply(service::clock::now(), Ok(Answers::default()));
        assert_eq!(app.sessions().len(), 2);
        for _ in 0..5 {
            app.press(Key::PageDown);
        }
        assert_eq!(app.session_offset, 1, "a line stays in view");
        assert!(!app.press(Key::Char('q')) && !app.press(Key::Interrupt));
    }
}
