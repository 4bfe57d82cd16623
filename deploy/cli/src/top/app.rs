//! The state of `berth top`, changed by answers of the router and by keys. Pure.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use crate::api::{Fleet, Placement, Session};

/// Placements that are kept.
const PLACEMENTS_MAX: usize = 200;
/// Characters of a filter.
const FILTER_CHARS_MAX: usize = 100;

/// By what sessions are sorted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SortKey {
    /// Most KV first.
    #[default]
    Tokens,
    /// Most turns first.
    Turns,
    /// Used last first.
    Idle,
    /// By id.
    Id,
}

impl SortKey {
    /// Returns the next key, in a circle.
    #[must_use]
    pub fn next(self) -> Self {
        match self {
            Self::Tokens => Self::Turns,
            Self::Turns => Self::Idle,
            Self::Idle => Self::Id,
            Self::Id => Self::Tokens,
        }
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Turns => "turns",
            Self::Idle => "idle",
            Self::Id => "id",
        }
    }
}

/// A key that the user pressed, as far as `berth top` knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// A character.
    Char(char),
    /// One line up, or down.
    Up,
    /// One line down.
    Down,
    /// One page up.
    PageUp,
    /// One page down.
    PageDown,
    /// Ends an input.
    Enter,
    /// Abandons an input.
    Escape,
    /// Removes the last character of an input.
    Backspace,
    /// Ends the program, whatever is shown.
    Interrupt,
}

/// What the router answered to one round of questions.
#[derive(Debug, Clone)]
pub struct Answers {
    /// The workers.
    pub fleet: Fleet,
    /// The sessions of the key's owner.
    pub sessions: Vec<Session>,
    /// The placements since the last round, or why there are none.
    pub placements: Result<Vec<Placement>, String>,
}

impl Default for Answers {
    fn default() -> Self {
        Self { fleet: Fleet::default(), sessions: vec![], placements: Ok(vec![]) }
    }
}

/// What is shown. Its many fields: what was answered, and what the user chose.
#[derive(Debug)]
pub struct App {
    /// The router's URL.
    pub router: String,
    /// The workers.
    pub fleet: Fleet,
    sessions: Vec<Session>,
    /// The placements, newest first, with the time at which each was answered.
    pub placements: VecDeque<(Instant, Placement)>,
    /// Why there are no placements.
    pub placements_problem: Option<String>,
    /// When the router answered last.
    pub answered_at: Option<Instant>,
    /// Why the router doesn't answer now.
    pub problem: Option<String>,
    /// By what sessions are sorted.
    pub sort_key: SortKey,
    /// Only sessions whose id, worker or state contains this text are shown.
    pub filter: String,
    /// Whether keys go into the filter.
    pub is_typing: bool,
    /// Whether the keys are explained.
    pub shows_help: bool,
    /// The first worker that is shown.
    pub worker_offset: usize,
    /// The first session that is shown.
    pub session_offset: usize,
    /// Whether the arrows move the workers instead of the sessions.
    pub moves_workers: bool,
    /// Whether answers are ignored.
    pub is_paused: bool,
}

impl App {
    /// Creates the state before the first answer.
    #[must_use]
    pub fn new(router: impl Into<String>) -> Self {
        Self {
            router: router.into(),
            fleet: Fleet::default(),
            sessions: vec![],
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

    /// Takes the answers of one round, or why the router didn't answer. After a failure the last
    /// figures stay, and the failure is shown.
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

    /// Handles a key. Returns whether the program goes on.
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

    /// Returns the sessions that the filter lets pass, sorted, each with its depth: the children of
    /// a session stand below it.
    #[must_use]
    pub fn sessions(&self) -> Vec<(usize, &Session)> {
        let filter = self.filter.to_lowercase();
        let is_shown = |session: &&Session| {
            let texts = [&session.session_id, &session.worker, &session.state];
            texts.iter().any(|text| text.to_lowercase().contains(&filter))
        };
        let mut shown: Vec<&Session> = self.sessions.iter().filter(is_shown).collect();
        shown.sort_by(|one, other| {
            let order = match self.sort_key {
                SortKey::Tokens => other.resident_tokens.cmp(&one.resident_tokens),
                SortKey::Turns => other.turns.cmp(&one.turns),
                SortKey::Idle => one.idle_ms_at_report.cmp(&other.idle_ms_at_report),
                SortKey::Id => std::cmp::Ordering::Equal,
            };
            order.then_with(|| one.session_id.cmp(&other.session_id))
        });
        below_parents(&shown)
    }

    /// Returns how long the router has not answered, if it doesn't.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Option<Duration> {
        self.problem.as_ref()?;
        Some(self.answered_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at)))
    }
}

/// Returns the sessions with each child after its parent. A session whose parent isn't shown stands
/// alone, and so do sessions that name each other in a circle.
fn below_parents<'a>(sessions: &[&'a Session]) -> Vec<(usize, &'a Session)> {
    let ids: BTreeMap<&str, usize> =
        sessions.iter().enumerate().map(|(index, it)| (it.session_id.as_str(), index)).collect();
    let parent = |index: usize| {
        let parent = ids.get(sessions[index].parent.as_deref()?).copied()?;
        (parent != index).then_some(parent)
    };
    let mut children: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for index in 0..sessions.len() {
        if let Some(parent) = parent(index) {
            children.entry(parent).or_default().push(index);
        }
    }
    let mut ordered = vec![];
    let mut is_placed = vec![false; sessions.len()];
    let roots = (0..sessions.len()).filter(|index| parent(*index).is_none());
    // Whatever no root leads to is in a circle.
    for start in roots.chain(0..sessions.len()) {
        let mut next = vec![(0, start)];
        while let Some((depth, index)) = next.pop() {
            if std::mem::replace(&mut is_placed[index], true) {
                continue;
            }
            ordered.push((depth, sessions[index]));
            let below = children.get(&index).into_iter().flatten().rev();
            next.extend(below.map(|child| (depth + 1, *child)));
        }
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(id: &str, tokens: u64, parent: Option<&str>) -> Session {
        Session {
            session_id: id.into(),
            worker: "w0/0".into(),
            resident_tokens: Some(tokens),
            turns: 100 - tokens,
            idle_ms_at_report: tokens,
            parent: parent.map(str::to_owned),
            ..Session::default()
        }
    }

    fn app(sessions: Vec<Session>) -> App {
        let mut app = App::new("http://r");
        let answers = Answers { sessions, ..Answers::default() };
        app.apply(service::clock::now(), Ok(answers));
        app
    }

    fn ids(app: &App) -> Vec<(usize, String)> {
        app.sessions().into_iter().map(|(depth, it)| (depth, it.session_id.clone())).collect()
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
    fn children_stand_below_their_parents_and_a_circle_hides_nothing() {
        let sessions = vec![
            session("root", 1, None),
            session("child", 9, Some("root")),
            session("grandchild", 5, Some("child")),
            session("orphan", 3, Some("gone")),
            session("x", 2, Some("y")),
            session("y", 2, Some("x")),
            session("self", 0, Some("self")),
        ];
        let shown = ids(&app(sessions));
        assert_eq!(shown.len(), 7, "{shown:?}");
        let at = |id: &str| shown.iter().position(|(_, it)| it == id).unwrap();
        assert_eq!(at("child"), at("root") + 1);
        assert_eq!(shown[at("grandchild")], (2, "grandchild".to_owned()));
        assert_eq!(shown[at("orphan")].0, 0);
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
