//! Keeps the sessions of the table, their incarnation ids, and what they hold on each rank.
//!
//! A session is a conversation of ordered turns. An incarnation is one life of a session in the
//! engine. Each change of a session goes through [`Sessions::update`], which keeps the figures of
//! the session's rank right. This module decides nothing. It knows neither turns nor closes, except
//! for the counts that a session keeps of its turns.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::{AddAssign, Index, SubAssign},
    time::Instant,
};

use proto::id::SessionKey;

use super::{Effects, Guard, Session, TableSettings, held::Held, principals::Principals};

/// All sessions of the table.
#[derive(Debug)]
pub(super) struct Sessions {
    /// Ordered by key, so that the same events always produce the same effects.
    sessions: BTreeMap<SessionKey, Session>,
    /// The key of each session, by the id of its present incarnation.
    keys_by_incarnation: HashMap<String, SessionKey>,
    /// By rank. Includes ranks that no longer exist, as turns there may still have to end.
    ranks: Vec<RankSessions>,
    principals: Principals,
    page_tokens: u64,
    incarnation_prefix: String,
    /// The prefixes of earlier agent processes that handed over sessions.
    adopted_prefixes: BTreeSet<String>,
    is_incarnation_fresh: bool,
    /// The number of incarnation ids made so far.
    incarnation_count: u64,
    /// The number of sessions inserted so far.
    generation_count: u64,
    /// No session has a deadline before this time. `None`: no session has a deadline.
    earliest_deadline: Option<Instant>,
}

/// What the sessions of one rank hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RankSessions {
    pub(super) sessions: u32,
    /// What pinned sessions hold or have reserved.
    pub(super) held: Held,
    /// Estimated KV tokens that unpinned sessions have in the radix tree.
    pub(super) tree_tokens: u64,
}

impl Sessions {
    pub(super) fn new(settings: &TableSettings) -> Self {
        Self {
            sessions: BTreeMap::new(),
            keys_by_incarnation: HashMap::new(),
            ranks: vec![],
            principals: Principals::default(),
            page_tokens: 1,
            incarnation_prefix: settings.incarnation_prefix.clone(),
            adopted_prefixes: BTreeSet::new(),
            is_incarnation_fresh: settings.guards.is_on(Guard::FreshIncarnation),
            incarnation_count: 0,
            generation_count: 0,
            earliest_deadline: None,
        }
    }

    /// Sets the engine's ranks and page size. The sessions must hold nothing.
    pub(super) fn set_engine(&mut self, rank_count: usize, page_tokens: u64) {
        self.page_tokens = page_tokens;
        self.ranks.resize(rank_count.max(self.ranks.len()), RankSessions::default());
    }

    pub(super) fn get(&self, key: &SessionKey) -> Option<&Session> {
        self.sessions.get(key)
    }

    pub(super) fn has(&self, key: &SessionKey) -> bool {
        self.sessions.contains_key(key)
    }

    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&SessionKey, &Session)> {
        self.sessions.iter()
    }

    /// Returns the keys of the sessions for which `is_wanted` holds.
    pub(super) fn keys(&self, is_wanted: impl Fn(&Session) -> bool) -> Vec<SessionKey> {
        let wanted = self.sessions.iter().filter(|(_, session)| is_wanted(session));
        wanted.map(|(key, _)| key.clone()).collect()
    }

    /// Returns the key of the session that has this incarnation.
    pub(super) fn key_of(&self, incarnation: &str) -> Option<&SessionKey> {
        self.keys_by_incarnation.get(incarnation)
    }

    /// Returns what each principal has.
    pub(super) fn principals(&self) -> &Principals {
        &self.principals
    }

    /// Returns what the sessions of a rank hold.
    pub(super) fn rank(&self, dp_rank: u32) -> RankSessions {
        self.ranks[dp_rank as usize]
    }

    /// Inserts the session that `make` returns for a new incarnation id and generation.
    pub(super) fn insert(
        &mut self,
        effects: &mut Effects,
        key: &SessionKey,
        make: impl FnOnce(String, u64) -> Session,
    ) {
        self.generation_count += 1;
        let session = make(self.next_incarnation(key), self.generation_count);
        self.schedule(session.expires_at());
        let counted = RankSessions::from_session(&session, self.page_tokens);
        self.ranks[session.dp_rank as usize] += counted;
        self.principals.add_session(key);
        self.principals.change_held(key, session.dp_rank, Held::default(), counted.held);
        self.keys_by_incarnation.insert(session.incarnation.clone(), key.clone());
        self.sessions.insert(key.clone(), session);
        effects.report_change(key);
    }

    /// Removes a session.
    pub(super) fn remove(&mut self, effects: &mut Effects, key: &SessionKey) {
        if let Some(session) = self.sessions.remove(key) {
            let counted = RankSessions::from_session(&session, self.page_tokens);
            self.ranks[session.dp_rank as usize] -= counted;
            self.principals.change_held(key, session.dp_rank, counted.held, Held::default());
            self.principals.remove_session(key);
            self.keys_by_incarnation.remove(&session.incarnation);
            effects.report_change(key);
        }
    }

    /// Changes a session, and reports that.
    pub(super) fn change<T>(
        &mut self,
        effects: &mut Effects,
        key: &SessionKey,
        change: impl FnOnce(&mut Session) -> T,
    ) -> T {
        let result = self.update(key, change);
        effects.report_change(key);
        result
    }

    /// Changes a session. The caller reports the change, or it concerns nothing that is reported.
    pub(super) fn update<T>(
        &mut self,
        key: &SessionKey,
        change: impl FnOnce(&mut Session) -> T,
    ) -> T {
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let rank = &mut self.ranks[session.dp_rank as usize];
        let before = RankSessions::from_session(session, self.page_tokens);
        *rank -= before;
        let result = change(session);
        let after = RankSessions::from_session(session, self.page_tokens);
        *rank += after;
        self.principals.change_held(key, session.dp_rank, before.held, after.held);
        result
    }

    /// Gives a session a new incarnation id, so that a late close of the old incarnation can't
    /// close the session.
    pub(super) fn reincarnate(&mut self, key: &SessionKey) {
        let new_id = self.next_incarnation(key);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        self.keys_by_incarnation.remove(&session.incarnation);
        session.incarnation.clone_from(&new_id);
        self.keys_by_incarnation.insert(new_id, key.clone());
    }

    /// Returns a new incarnation id.
    fn next_incarnation(&mut self, key: &SessionKey) -> String {
        if !self.is_incarnation_fresh {
            return format!("{}-{}", self.incarnation_prefix, key.digest());
        }
        self.incarnation_count += 1;
        format!("{}-{}", self.incarnation_prefix, self.incarnation_count)
    }

    /// Whether this agent process, or one that handed over to it, made an incarnation id, even if
    /// its session was removed.
    pub(super) fn has_made(&self, incarnation: &str) -> bool {
        let Some((prefix, _)) = incarnation.rsplit_once('-') else { return false };
        prefix == self.incarnation_prefix || self.adopted_prefixes.contains(prefix)
    }

    /// Counts the ids of the process that made `incarnation` among the agent's own.
    pub(super) fn adopt_prefix(&mut self, incarnation: &str) {
        if let Some((prefix, _)) = incarnation.rsplit_once('-') {
            self.adopted_prefixes.insert(prefix.to_owned());
        }
    }

    /// Makes sure that the sessions are looked at when `deadline` passes.
    pub(super) fn schedule(&mut self, deadline: Instant) {
        let earliest = self.earliest_deadline.map_or(deadline, |before| before.min(deadline));
        self.earliest_deadline = Some(earliest);
    }

    pub(super) fn earliest_deadline(&self) -> Option<Instant> {
        self.earliest_deadline
    }

    /// Replaces all deadlines.
    pub(super) fn set_earliest_deadline(&mut self, deadline: Option<Instant>) {
        self.earliest_deadline = deadline;
    }

    /// Checks that the figures of each rank match a fresh count, and that each session is known by
    /// its incarnation id.
    pub(super) fn check_invariants(&self) {
        let mut counted = vec![RankSessions::default(); self.ranks.len()];
        let mut principals = Principals::default();
        for (key, session) in &self.sessions {
            let of_session = RankSessions::from_session(session, self.page_tokens);
            counted[session.dp_rank as usize] += of_session;
            principals.add_session(key);
            principals.change_held(key, session.dp_rank, Held::default(), of_session.held);
            let known_key = self.keys_by_incarnation.get(&session.incarnation);
            assert_eq!(known_key, Some(key), "`keys_by_incarnation` names another session");
        }
        assert_eq!(counted, self.ranks, "the totals differ from a fresh count");
        self.principals.check_invariants(&principals);
        let known_count = self.keys_by_incarnation.len();
        assert_eq!(known_count, self.sessions.len(), "an incarnation of no session is known");
    }
}

impl Index<&SessionKey> for Sessions {
    type Output = Session;

    fn index(&self, key: &SessionKey) -> &Session {
        &self.sessions[key]
    }
}

impl RankSessions {
    fn from_session(session: &Session, page_tokens: u64) -> Self {
        let tree_tokens = session.state.tree().map_or(0, |tree| tree.resident_tokens);
        Self { sessions: 1, held: Held::from_row(session.state.row(), page_tokens), tree_tokens }
    }
}

impl AddAssign for RankSessions {
    fn add_assign(&mut self, other: Self) {
        self.sessions += other.sessions;
        self.held = self.held + other.held;
        self.tree_tokens += other.tree_tokens;
    }
}

impl SubAssign for RankSessions {
    fn sub_assign(&mut self, other: Self) {
        self.sessions -= other.sessions;
        self.held.rows -= other.held.rows;
        self.held.tokens -= other.held.tokens;
        self.tree_tokens -= other.tree_tokens;
    }
}
