//! Keeps the sessions of the table, their incarnation ids, and what they hold on each rank.
//!
//! Each change of a session goes through [`Sessions::update`], which keeps figures and deadlines
//! right, so no message costs more than the sessions that it concerns. This owner decides which
//! session must close before a principal may have another, and when sessions expire.

pub(super) mod keys_by_time;
pub(super) mod principals;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::{AddAssign, Index, SubAssign},
    sync::Arc,
    time::{Duration, Instant},
};

use contract::id::SessionKey;
use service::refusal::Code;

use self::{
    keys_by_time::KeysByTime,
    principals::{Principals, RestingSession},
};
use super::{EngineCapacity, Error, Guard, Session, State, Step, TableSettings, room::Room};

/// Added to an `Instant`, a longer one might overflow.
const IDLE_LIMIT_MAX: Duration = Duration::from_secs(365 * 86_400);

/// Has an index for each way in which the table looks for sessions, so that the table need not look
/// at all of them.
#[derive(Debug)]
pub struct Sessions {
    /// Ordered by key, so that the same events always produce the same effects. Boxed: of a map's
    /// places, four in ten are empty.
    sessions: BTreeMap<SessionKey, Box<Session>>,
    /// By the id of the present incarnation.
    keys_by_incarnation: HashMap<String, SessionKey>,
    /// By rank. Includes ranks that no longer exist, as turns there may still have to end.
    ranks: Vec<RankSessions>,
    principals: Principals,
    page_tokens: u64,
    incarnation_prefix: String,
    /// Of earlier agent processes that handed over sessions.
    adopted_prefixes: BTreeSet<String>,
    is_incarnation_fresh: bool,
    incarnation_count: u64,
    generation_count: u64,
    /// When something must be done about each session if nothing happens to it before.
    deadlines: KeysByTime,
    settings: Arc<TableSettings>,
    /// By rank: whether its shim can.
    can_demote: Vec<bool>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShareFigures {
    pub principals: usize,
    /// Of one principal.
    pub sessions_max: usize,
    /// Of one principal on one rank.
    pub pinned_rows_max: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RankSessions {
    pub(super) sessions: u32,
    pub(super) held: Room,
    /// An estimate of what unpinned sessions have in the radix tree.
    pub(super) tree_tokens: u64,
    pub(super) opening: usize,
    /// Sessions that close when their last running turn has ended.
    pub(super) closing: usize,
    pub(super) await_shim: usize,
    /// The part of `held` that demotions in progress will free.
    pub(super) being_demoted: Room,
}

/// What the table keeps of a session outside of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Indexed {
    counted: RankSessions,
    deadline: Option<Instant>,
    resting: Option<RestingSession>,
}

impl Sessions {
    pub(super) fn new(settings: &Arc<TableSettings>, engine: &EngineCapacity) -> Self {
        let mut sessions = Self {
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
            deadlines: KeysByTime::default(),
            settings: Arc::clone(settings),
            can_demote: vec![],
        };
        sessions.set_engine(engine);
        sessions
    }

    /// The sessions must hold nothing.
    pub(super) fn set_engine(&mut self, engine: &EngineCapacity) {
        self.page_tokens = engine.page_tokens;
        let rank_count = engine.ranks.len().max(self.ranks.len());
        self.ranks.resize(rank_count, RankSessions::default());
        self.can_demote.resize(rank_count, false);
    }

    pub(super) fn set_can_demote(&mut self, dp_rank: u32, can_demote: bool) {
        if self.can_demote[dp_rank as usize] == can_demote {
            return;
        }
        // Only sessions that hold a row have a deadline that depends on the shim.
        let keys: Vec<SessionKey> = self.principals.row_holders(dp_rank).cloned().collect();
        let before = keys.iter().map(|key| self.deadline(&self.sessions[key])).collect::<Vec<_>>();
        self.can_demote[dp_rank as usize] = can_demote;
        for (key, before) in keys.iter().zip(before) {
            let after = self.deadline(&self.sessions[key]);
            self.deadlines.change(key, before, after);
        }
    }

    pub(super) fn can_demote(&self, session: &Session) -> bool {
        self.can_demote[session.dp_rank as usize]
    }

    #[must_use]
    pub fn get(&self, key: &SessionKey) -> Option<&Session> {
        self.sessions.get(key).map(AsRef::as_ref)
    }

    pub(super) fn has(&self, key: &SessionKey) -> bool {
        self.sessions.contains_key(key)
    }

    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&SessionKey, &Session)> {
        self.sessions.iter().map(|(key, session)| (key, &**session))
    }

    pub(super) fn keys(&self, is_wanted: impl Fn(&Session) -> bool) -> Vec<SessionKey> {
        let wanted = self.sessions.iter().filter(|(_, session)| is_wanted(session));
        wanted.map(|(key, _)| key.clone()).collect()
    }

    #[must_use]
    pub fn key_of(&self, incarnation: &str) -> Option<&SessionKey> {
        self.keys_by_incarnation.get(incarnation)
    }

    /// Sessions that hold a row, and may be closed or demoted.
    pub fn pins_at_rest(&self, dp_rank: u32) -> impl Iterator<Item = (&SessionKey, &Session)> {
        let holders = self.principals.row_holders(dp_rank);
        let of_key = |key| (key, &self[key]);
        holders.map(of_key).filter(|(_, session)| session.state.is_open() && session.can_expire())
    }

    /// `None` while the shim is asked. The owner task looks after each change of the session, and
    /// takes [`SessionEvent::Demoted`] as success: the session's next turn may run by now.
    #[must_use]
    pub fn demotion_result(&self, key: &SessionKey) -> Option<Result<(), Error>> {
        let state = self.sessions.get(key).map(|session| &session.state);
        Some(match state {
            Some(State::Demoting { .. }) => return None,
            Some(State::Demoted) => Ok(()),
            Some(State::Gone { reason, .. }) => Err(reason.to_error()),
            Some(State::Closing(_)) => Err(Error::Closing),
            Some(_) => Err(Error::DemotionRefused),
            None => Err(Error::UnknownSession),
        })
    }

    /// The rank where the session's KV may have to be loaded from the host, and its incarnation.
    /// `None` if it holds its KV, the engine knows none of it, or a turn of it loads it.
    pub fn prefetch_target(&self, key: &SessionKey) -> Result<Option<(u32, &str)>, Error> {
        let session = self.sessions.get(key).ok_or(Error::UnknownSession)?;
        match &session.state {
            State::Closing(_) => Err(Error::Closing),
            State::Gone { reason, .. } => Err(reason.to_error()),
            _ if session.has_turns() => Ok(None),
            State::Demoted => Ok(Some((session.dp_rank, &session.incarnation))),
            State::InTree(tree) if tree.has_tag => {
                Ok(Some((session.dp_rank, &session.incarnation)))
            }
            State::InTree(_)
            | State::Planned
            | State::Opening(_)
            | State::Open(_)
            | State::Demoting { .. }
            | State::Suspect { .. } => Ok(None),
        }
    }

    #[must_use]
    pub fn share_figures(&self) -> ShareFigures {
        let ranks = 0..u32::try_from(self.ranks.len()).unwrap_or(u32::MAX);
        let most_rows = ranks.map(|dp_rank| self.principals.most_rows(dp_rank));
        ShareFigures {
            principals: self.principals.count(),
            sessions_max: self.principals.largest(),
            pinned_rows_max: most_rows.max().unwrap_or(0),
        }
    }

    pub(super) fn principals(&self) -> &Principals {
        &self.principals
    }

    pub(super) fn all_ranks(&self) -> impl Iterator<Item = &RankSessions> {
        self.ranks.iter()
    }

    pub(super) fn rank(&self, dp_rank: u32) -> RankSessions {
        self.ranks[dp_rank as usize]
    }

    /// `make` gets a new incarnation id and generation.
    pub(super) fn insert(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        make: impl FnOnce(String, u64) -> Session,
    ) {
        self.generation_count += 1;
        let session = make(self.next_incarnation(key), self.generation_count);
        let indexed = self.indexed(&session);
        self.principals.add_session(key);
        self.index(key, session.dp_rank, None, Some(indexed));
        self.keys_by_incarnation.insert(session.incarnation.clone(), key.clone());
        self.sessions.insert(key.clone(), Box::new(session));
        step.report_change(key);
    }

    pub(super) fn remove(&mut self, step: &mut Step, key: &SessionKey) {
        if let Some(session) = self.sessions.remove(key) {
            let indexed = self.indexed(&session);
            self.index(key, session.dp_rank, Some(indexed), None);
            self.principals.remove_session(key);
            self.keys_by_incarnation.remove(&session.incarnation);
            step.report_change(key);
        }
    }

    /// Reports the change; see [`Self::update`].
    pub(super) fn change<T>(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
        change: impl FnOnce(&mut Session) -> T,
    ) -> T {
        let result = self.update(key, change);
        step.report_change(key);
        result
    }

    /// The caller reports the change, or it concerns nothing that is reported.
    pub(super) fn update<T>(
        &mut self,
        key: &SessionKey,
        change: impl FnOnce(&mut Session) -> T,
    ) -> T {
        let before = self.indexed(&self[key]);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let (dp_rank, result) = (session.dp_rank, change(session));
        let after = self.indexed(&self[key]);
        self.index(key, dp_rank, Some(before), Some(after));
        result
    }

    fn indexed(&self, session: &Session) -> Indexed {
        Indexed {
            counted: RankSessions::from_session(session, self.page_tokens),
            deadline: self.deadline(session),
            resting: RestingSession::from_session(session),
        }
    }

    /// `None`: the session is not there.
    fn index(
        &mut self,
        key: &SessionKey,
        dp_rank: u32,
        from: Option<Indexed>,
        to: Option<Indexed>,
    ) {
        if from == to {
            return;
        }
        let held = |indexed: Option<Indexed>| indexed.map_or(Room::default(), |it| it.counted.held);
        let deadline = |indexed: Option<Indexed>| indexed.and_then(|it| it.deadline);
        let resting = |indexed: Option<Indexed>| indexed.and_then(|it| it.resting);
        let rank = &mut self.ranks[dp_rank as usize];
        from.iter().for_each(|from| *rank -= from.counted);
        to.iter().for_each(|to| *rank += to.counted);
        self.deadlines.change(key, deadline(from), deadline(to));
        self.principals.change_held(key, dp_rank, held(from), held(to));
        self.principals.change_resting(key, resting(from), resting(to));
    }

    pub(super) fn idle_cap(&self) -> Duration {
        let is_guard_on = self.settings.guards.is_on(Guard::IdleCapped);
        if is_guard_on { self.settings.shares.idle_cap } else { IDLE_LIMIT_MAX }
    }

    /// Returns the session that must close before `principal` may have one more, if it has as many
    /// as it may. Fails if none may close.
    pub(super) fn beyond_share(&self, principal: &str) -> Result<Option<SessionKey>, Error> {
        let own = self.principals.sessions(principal);
        let is_share_used = own >= self.settings.shares.principal_sessions_max;
        if !is_share_used || !self.settings.guards.is_on(Guard::SessionShare) {
            return Ok(None);
        }
        // Only a session that isn't exclusive. No client has pinned such a session or sends deltas
        // to it, so none relies on it. A later turn may still find its KV in the radix tree.
        let longest_idle = self.principals.longest_shared_rest(Some(principal)).cloned();
        let detail = || format!("this client has {own} open, and may have no more; close some");
        longest_idle.map(Some).ok_or_else(|| Error::OutOfRoom {
            resource: Code::PrincipalSessions,
            detail: detail(),
            wait: None,
        })
    }

    /// Returns the session that must close before `principal` may have one more, if the table is
    /// full. Fails if none may close.
    pub(super) fn beyond_limit(
        &self,
        now: Instant,
        principal: &str,
    ) -> Result<Option<SessionKey>, Error> {
        let sessions_max = self.settings.shares.sessions_max;
        if self.sessions.len() < sessions_max {
            return Ok(None);
        }
        let longest_idle = self.principals.longest_shared_rest(None).cloned();
        let closable = longest_idle.or_else(|| self.idle_of_larger_principal(now, principal));
        let detail = || format!("{sessions_max} are open; close some");
        closable.map(Some).ok_or_else(|| Error::OutOfRoom {
            resource: Code::Sessions,
            detail: detail(),
            wait: None,
        })
    }

    /// Comes last, because a client may rely on the session: one idle for `demote_idle`, of the
    /// principal with the most sessions, more than `principal` would have.
    fn idle_of_larger_principal(&self, now: Instant, principal: &str) -> Option<SessionKey> {
        let own = self.principals.sessions(principal);
        let mut longest_idle = self.principals.longest_rests_beyond(own + 1);
        let is_idle = |(since, _): &&(Instant, _)| *since + self.settings.demote_idle <= now;
        longest_idle.find(is_idle).map(|(_, key)| key.clone())
    }

    /// When to close a session, because the shim has not answered or its idle limit has passed, or
    /// to demote it. `None`, for example, while a turn of it runs.
    fn deadline(&self, session: &Session) -> Option<Instant> {
        if let Some(request) = session.state.shim_request() {
            return request.until;
        }
        let demote_at = self.is_idle_auto_pin(session).then(|| self.demotes_at(session));
        let expires_at = self.may_expire(session).then(|| session.expires_at());
        [demote_at, expires_at].into_iter().flatten().min()
    }

    pub(super) fn may_expire(&self, session: &Session) -> bool {
        self.settings.guards.is_on(Guard::Expiry) && session.can_expire()
    }

    /// Whether the shim can demote a session at rest that the agent pinned on its own.
    pub(super) fn is_idle_auto_pin(&self, session: &Session) -> bool {
        let is_at_rest = session.state.is_open() && session.can_expire();
        is_at_rest && session.has_auto_retention() && self.can_demote(session)
    }

    /// From then on, the engine may evict the session's KV when it is used least.
    pub(super) fn demotes_at(&self, session: &Session) -> Instant {
        session.turns.last_end + self.settings.demote_idle
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// The earliest deadline first.
    pub(super) fn due(&self, now: Instant) -> Vec<SessionKey> {
        self.deadlines.until(now)
    }

    /// Makes a new id, so that a late close of the old incarnation can't close the session.
    pub(super) fn reincarnate(&mut self, key: &SessionKey) {
        let new_id = self.next_incarnation(key);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        self.keys_by_incarnation.remove(&session.incarnation);
        session.incarnation.clone_from(&new_id);
        self.keys_by_incarnation.insert(new_id, key.clone());
    }

    fn next_incarnation(&mut self, key: &SessionKey) -> String {
        if !self.is_incarnation_fresh {
            return format!("{}-{}", self.incarnation_prefix, key.digest());
        }
        self.incarnation_count += 1;
        format!("{}-{}", self.incarnation_prefix, self.incarnation_count)
    }

    /// Whether this agent process, or one that handed over to it, made the id, also for a session
    /// that was removed.
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

    pub(super) fn check_invariants(&self) {
        let (shares, guards) = (self.settings.shares, self.settings.guards);
        assert!(self.sessions.len() <= shares.sessions_max, "too many sessions");
        let most = self.principals.largest();
        assert!(
            most <= shares.principal_sessions_max || !guards.is_on(Guard::SessionShare),
            "a principal has {most} sessions"
        );
        self.sessions.iter().for_each(|(key, session)| self.check_session(key, session));
        self.check_indexes();
    }

    fn check_session(&self, key: &SessionKey, session: &Session) {
        let (shares, guards) = (self.settings.shares, self.settings.guards);
        assert!(
            session.idle_max <= shares.idle_cap || !guards.is_on(Guard::IdleCapped),
            "a session may be idle longer than the cap"
        );
        let runs_before_open = session.state == State::Planned && session.turns.running > 0;
        assert!(!runs_before_open, "a turn runs in a session that isn't open");
        let respects_exclusivity = !session.is_exclusive() || session.turns.running <= 1;
        assert!(
            respects_exclusivity || !guards.is_on(Guard::OneTurn),
            "two turns of one exclusive session are inside"
        );
        let is_shared_pin = session.is_pinned() && !session.is_exclusive();
        assert!(
            !is_shared_pin || session.has_auto_retention(),
            "a session that its client pinned is shared"
        );
        assert!(
            !session.is_open_for_nothing(),
            "{key:?} was opened for a turn that never reached the engine, and is still open"
        );
    }

    fn check_indexes(&self) {
        let mut counted = vec![RankSessions::default(); self.ranks.len()];
        let (mut principals, mut deadlines) = (Principals::default(), KeysByTime::default());
        for (key, session) in &self.sessions {
            let indexed = self.indexed(session);
            counted[session.dp_rank as usize] += indexed.counted;
            principals.add_session(key);
            principals.change_held(key, session.dp_rank, Room::default(), indexed.counted.held);
            principals.change_resting(key, None, indexed.resting);
            deadlines.change(key, None, indexed.deadline);
            let known_key = self.keys_by_incarnation.get(&session.incarnation);
            assert_eq!(known_key, Some(key), "`keys_by_incarnation` names another session");
        }
        assert_eq!(counted, self.ranks, "the totals differ from a fresh count");
        assert_eq!(deadlines, self.deadlines, "the deadlines differ from a fresh list");
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
        let state = &session.state;
        let resident_tokens = session.resident_tokens().next_multiple_of(page_tokens);
        let being_demoted = match state {
            State::Demoting { .. } => Room { rows: 1, tokens: resident_tokens },
            _ => Room::default(),
        };
        Self {
            sessions: 1,
            held: Room::from_row(state.row(), page_tokens),
            tree_tokens: state.tree().map_or(0, |tree| tree.resident_tokens),
            opening: usize::from(matches!(state, State::Opening(_))),
            closing: usize::from(state.is_closing()),
            await_shim: usize::from(state.shim_request().is_some()),
            being_demoted,
        }
    }
}

impl AddAssign for RankSessions {
    fn add_assign(&mut self, other: Self) {
        self.sessions += other.sessions;
        self.held = self.held + other.held;
        self.tree_tokens += other.tree_tokens;
        self.opening += other.opening;
        self.closing += other.closing;
        self.await_shim += other.await_shim;
        self.being_demoted = self.being_demoted + other.being_demoted;
    }
}

impl SubAssign for RankSessions {
    fn sub_assign(&mut self, other: Self) {
        self.sessions -= other.sessions;
        self.held = self.held - other.held;
        self.tree_tokens -= other.tree_tokens;
        self.opening -= other.opening;
        self.closing -= other.closing;
        self.await_shim -= other.await_shim;
        self.being_demoted = self.being_demoted - other.being_demoted;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::table::{
        Tree,
        tests::{key, owners::Owners},
    };

    #[test]
    fn a_principal_at_its_limit_loses_the_session_at_rest_longest_if_no_client_relies_on_it() {
        let mut owners = Owners::with(|settings| settings.shares.principal_sessions_max = 2);
        assert_eq!(owners.sessions().beyond_share("p"), Ok(None));
        owners.insert("first", State::InTree(Tree::default()), 10);
        owners.now += Duration::from_millis(1);
        owners.insert("second", State::InTree(Tree::default()), 10);
        assert_eq!(owners.sessions().beyond_share("p"), Ok(Some(key("first"))));
        assert_eq!(owners.sessions().beyond_share("other"), Ok(None), "it has none");

        let mut owners = Owners::with(|settings| settings.shares.principal_sessions_max = 1);
        owners.insert_open("pinned", 10);
        assert!(matches!(
            owners.sessions().beyond_share("p"),
            Err(Error::OutOfRoom { resource: Code::PrincipalSessions, .. })
        ));
    }

    #[test]
    fn each_change_keeps_the_deadline_and_what_is_held() {
        let mut owners = Owners::new();
        owners.insert_open("s", 100);
        assert_eq!(owners.sessions().rank(0).held, Room { rows: 1, tokens: 112 });
        let expires_at = owners.sessions()[&key("s")].expires_at();
        assert_eq!(owners.sessions().next_deadline(), Some(expires_at));
        let sessions = &mut owners.table.queue.histories.pins.sessions;
        sessions.update(&key("s"), |session| {
            session.turns.running = 1;
            session.state.reserve(200);
        });
        assert_eq!(sessions.rank(0).held, Room { rows: 1, tokens: 208 });
        assert_eq!(sessions.next_deadline(), None, "a turn runs");
        sessions.check_invariants();
    }
}
