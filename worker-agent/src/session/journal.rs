//! Keeps the journal: a file that tells the next agent which incarnations this agent left open.
//!
//! An incarnation is recorded before it is opened, and a tag before its first turn is sent: the
//! next agent can close what is left. The lock also keeps a second agent off the engine.
//!
//! The file is not synced: a killed process loses nothing that it wrote, and with the machine the
//! engine's sessions are gone too. An incomplete last line is skipped, as the agent acts on a
//! record only after its write. A record that can't be written leaves the file *behind*: the next
//! write or [`Journal::retry`] writes the whole file anew. Any record after a hand-over voids it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
};

use service::{
    clock::BootTime,
    private_folder::{self, PrivateFolder},
};

use super::handover::{HANDOVER_VERSION, HandedSession, Handover, Moment};

/// The file is rewritten when it has more than this many lines per open incarnation, and more than
/// [`LINES_KEPT_MAX`] lines.
const LINES_PER_INCARNATION_MAX: usize = 8;
const LINES_KEPT_MAX: usize = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// All following records refer to this engine process.
    Engine {
        instance: String,
    },
    Opening {
        incarnation: String,
        dp_rank: u32,
    },
    /// A turn is about to be sent. The incarnation's earlier turns have ended.
    Turn {
        incarnation: String,
        rid: String,
    },
    /// A tag's first turn is about to be sent. An incarnation that was opened needs no such record.
    Tag {
        incarnation: String,
    },
    /// The engine holds nothing of an incarnation any more, and has no tag of it.
    Closed {
        incarnation: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenIncarnation {
    pub dp_rank: u32,
    /// The newest turn, which may still run.
    pub rid: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "another agent is in charge of this engine: it holds {0}. Stop that one, or give this one \
         another engine"
    )]
    Locked(PathBuf),
    #[error(
        "can't keep the journal of open sessions: set `files.state_dir` to a folder of this \
         agent's own user"
    )]
    Folder(#[from] private_folder::Error),
}

#[derive(Debug)]
pub struct Journal {
    folder: PrivateFolder,
    name: String,
    file: File,
    /// Held until the process ends in any way.
    _lock: File,
    /// What the records say together, written or not.
    state: JournalState,
    /// Lines since the file was last rewritten, or since that was last tried.
    line_count: usize,
    /// Whether the file lacks a record or ends with a torn one. It is rewritten before the next.
    is_behind: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct JournalState {
    instance: Option<String>,
    open_incarnations: BTreeMap<String, OpenIncarnation>,
    tags: BTreeSet<String>,
    /// Set if these are the agent's last words.
    handover: Option<Handover>,
}

struct PartialHandover {
    handover: Handover,
    sessions_left: usize,
}

impl JournalState {
    fn apply(&mut self, record: &Record) {
        self.handover = None;
        match record {
            Record::Engine { instance } => {
                if self.instance.as_ref() != Some(instance) {
                    // The sessions of the previous engine process are gone with it.
                    self.open_incarnations.clear();
                    self.tags.clear();
                    self.instance = Some(instance.clone());
                }
            }
            Record::Opening { incarnation, dp_rank } => {
                let open_incarnation = OpenIncarnation { dp_rank: *dp_rank, rid: None };
                self.open_incarnations.insert(incarnation.clone(), open_incarnation);
            }
            Record::Turn { incarnation, rid } => {
                if let Some(open_incarnation) = self.open_incarnations.get_mut(incarnation) {
                    open_incarnation.rid = Some(rid.clone());
                }
            }
            Record::Tag { incarnation } => {
                self.tags.insert(incarnation.clone());
            }
            Record::Closed { incarnation } => {
                self.open_incarnations.remove(incarnation);
                self.tags.remove(incarnation);
            }
        }
    }

    fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.records().map(|record| record.to_line()).collect();
        if let Some(Handover { at, sessions }) = &self.handover {
            let (unix_ms, count) = (at.unix_ms, sessions.len());
            let boot = at.boot.as_ref().map(|boot| format!(" {} {}", boot.boot_id, boot.ms));
            let boot = boot.unwrap_or_default();
            lines.push(format!("handover {HANDOVER_VERSION} {unix_ms} {count}{boot}\n"));
            let json = |session| {
                serde_json::to_string(session).expect("it has numbers, flags and short texts")
            };
            lines.extend(sessions.iter().map(|session| format!("session {}\n", json(session))));
        }
        lines
    }

    fn records(&self) -> impl Iterator<Item = Record> {
        let engine =
            self.instance.iter().map(|instance| Record::Engine { instance: instance.clone() });
        let open = self.open_incarnations.iter().flat_map(|(incarnation, open_incarnation)| {
            let turn = open_incarnation
                .rid
                .iter()
                .map(|rid| Record::Turn { incarnation: incarnation.clone(), rid: rid.clone() });
            let opening = Record::Opening {
                incarnation: incarnation.clone(),
                dp_rank: open_incarnation.dp_rank,
            };
            std::iter::once(opening).chain(turn)
        });
        let tag = |incarnation: &String| Record::Tag { incarnation: incarnation.clone() };
        engine.chain(open).chain(self.tags.iter().map(tag))
    }
}

impl Record {
    fn to_line(&self) -> String {
        match self {
            Self::Engine { instance } => format!("engine {instance}\n"),
            Self::Opening { incarnation, dp_rank } => format!("opening {incarnation} {dp_rank}\n"),
            Self::Turn { incarnation, rid } => format!("turn {incarnation} {rid}\n"),
            Self::Tag { incarnation } => format!("tag {incarnation}\n"),
            Self::Closed { incarnation } => format!("closed {incarnation}\n"),
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split(' ');
        let (kind, id) = (fields.next()?, fields.next()?.to_owned());
        let record = match kind {
            "engine" => Self::Engine { instance: id },
            "opening" => Self::Opening { incarnation: id, dp_rank: fields.next()?.parse().ok()? },
            "turn" => Self::Turn { incarnation: id, rid: fields.next()?.to_owned() },
            "tag" => Self::Tag { incarnation: id },
            "closed" => Self::Closed { incarnation: id },
            _ => return None,
        };
        fields.next().is_none().then_some(record)
    }
}

impl PartialHandover {
    /// `None` if the line begins no hand-over of a known version.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.strip_prefix("handover ")?.split(' ');
        let mut number = || fields.next()?.parse::<u64>().ok();
        let is_known = number()? == u64::from(HANDOVER_VERSION);
        let (unix_ms, sessions_left) = (number()?, usize::try_from(number()?).ok()?);
        let boot = fields.next().zip(fields.next()).and_then(|(boot_id, ms)| {
            Some(BootTime { boot_id: boot_id.to_owned(), ms: ms.parse().ok()? })
        });
        let handover = Handover { at: Moment { unix_ms, boot }, sessions: vec![] };
        is_known.then_some(Self { handover, sessions_left })
    }

    fn add(mut self, line: &str) -> Option<Self> {
        let session = serde_json::from_str::<HandedSession>(line.strip_prefix("session ")?).ok()?;
        self.sessions_left = self.sessions_left.checked_sub(1)?;
        self.handover.sessions.push(session);
        Some(self)
    }
}

/// Applies all complete lines. Returns the resulting state and the number of lines.
fn replay(text: &[u8]) -> (JournalState, usize) {
    let mut state = JournalState::default();
    let mut line_count = 0;
    let mut partial: Option<PartialHandover> = None;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        let Some(line) = line.strip_suffix(b"\n") else { continue };
        line_count += 1;
        let Ok(line) = std::str::from_utf8(line) else { continue };
        if let Some(record) = Record::parse(line) {
            state.apply(&record);
        }
        // A hand-over counts if it is whole and nothing follows it.
        partial = match partial {
            Some(partial) => partial.add(line),
            None => PartialHandover::parse(line),
        };
        let is_whole = partial.as_ref().is_some_and(|partial| partial.sessions_left == 0);
        state.handover = partial.take_if(|_| is_whole).map(|partial| partial.handover);
    }
    (state, line_count)
}

impl Journal {
    /// Opens and locks the journal of the engine called `name`. Fails if another process holds the
    /// lock or another user could change the folder.
    pub fn open(dir: &Path, name: &str) -> Result<Self, Error> {
        let folder = PrivateFolder::open(dir)?;
        let (lock_name, name) = (format!("{name}.lock"), format!("{name}.journal"));
        let lock = folder.open_file(&lock_name)?;
        let io_error = |name: &str, error| private_folder::Error::Io(dir.join(name), error);
        match lock.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(Error::Locked(dir.join(lock_name)));
            }
            Err(std::fs::TryLockError::Error(error)) => {
                return Err(io_error(&lock_name, error).into());
            }
        }
        let mut text = vec![];
        let mut file = folder.open_file(&name)?;
        file.read_to_end(&mut text).map_err(|error| io_error(&name, error))?;
        let (state, line_count) = replay(&text);
        let mut journal =
            Self { folder, name, file, _lock: lock, state, line_count, is_behind: true };
        journal.rewrite()?;
        Ok(journal)
    }

    #[must_use]
    pub fn is_about(&self, instance: &str) -> bool {
        self.state.instance.as_deref() == Some(instance)
    }

    /// Empty if the journal is about another engine process.
    #[must_use]
    pub fn incarnations_left_open(&self, instance: &str) -> BTreeMap<String, OpenIncarnation> {
        if self.is_about(instance) { self.state.open_incarnations.clone() } else { BTreeMap::new() }
    }

    /// Incarnation ids; empty if the journal is about another engine process.
    #[must_use]
    pub fn tags_left_open(&self, instance: &str) -> BTreeSet<String> {
        if self.is_about(instance) { self.state.tags.clone() } else { BTreeSet::new() }
    }

    /// Writes the sessions' state for the next agent; this one must change nothing more. If that
    /// fails, the next agent closes the sessions.
    pub fn hand_over(&mut self, handover: Handover) -> Result<(), private_folder::Error> {
        self.state.handover = Some(handover);
        self.rewrite()
    }

    pub fn take_handover(&mut self) -> Option<Handover> {
        let handover = self.state.handover.take()?;
        self.is_behind = true;
        // A hand-over that can't be removed is not used: a later agent could take it up again.
        self.rewrite().is_ok().then_some(handover)
    }

    /// Writes a record, and those that could not be written before.
    ///
    /// # Errors
    /// Nothing that relies on the record may be done then.
    pub fn write(&mut self, record: &Record) -> Result<(), private_folder::Error> {
        self.state.apply(record);
        if self.is_behind {
            return self.rewrite();
        }
        self.is_behind = true;
        self.file
            .write_all(record.to_line().as_bytes())
            .map_err(|error| private_folder::Error::Io(self.path(), error))?;
        self.is_behind = false;
        self.line_count += 1;
        let incarnation_count = self.state.open_incarnations.len() + self.state.tags.len();
        if self.line_count > LINES_KEPT_MAX.max(incarnation_count * LINES_PER_INCARNATION_MAX) {
            // The file is complete, only long. If it can't be shortened now, it may be later.
            self.line_count = 0;
            let _ = self.rewrite();
            self.is_behind = false;
        }
        Ok(())
    }

    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.is_behind
    }

    pub fn retry(&mut self) -> Result<(), private_folder::Error> {
        if self.is_behind { self.rewrite() } else { Ok(()) }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join(&self.name)
    }

    /// Atomically replaces the file by the shortest one that says the same.
    fn rewrite(&mut self) -> Result<(), private_folder::Error> {
        let lines = self.state.lines();
        self.file = self.folder.replace_file(&self.name, lines.concat().as_bytes())?;
        self.line_count = lines.len();
        self.is_behind = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opening(incarnation: &str) -> Record {
        Record::Opening { incarnation: incarnation.into(), dp_rank: 1 }
    }

    fn engine(instance: &str) -> Record {
        Record::Engine { instance: instance.into() }
    }

    fn turn(incarnation: &str, rid: &str) -> Record {
        Record::Turn { incarnation: incarnation.into(), rid: rid.into() }
    }

    fn closed(incarnation: &str) -> Record {
        Record::Closed { incarnation: incarnation.into() }
    }

    fn open(dir: &Path) -> Journal {
        Journal::open(dir, "engine").unwrap()
    }

    #[test]
    fn the_next_agent_finds_what_was_left_open() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = open(dir.path());
        let records = [engine("E"), opening("a"), opening("b"), turn("b", "r1"), turn("b", "r2")];
        for record in records.iter().chain([&closed("a")]) {
            journal.write(record).unwrap();
        }
        drop(journal);
        let left = open(dir.path()).incarnations_left_open("E");
        let want = OpenIncarnation { dp_rank: 1, rid: Some("r2".into()) };
        assert_eq!(left, BTreeMap::from([("b".to_owned(), want)]));
        assert!(
            open(dir.path()).incarnations_left_open("F").is_empty(),
            "another process has none of them"
        );
    }

    #[test]
    fn the_next_agent_finds_the_tags_that_were_not_closed() {
        let dir = tempfile::tempdir().unwrap();
        let tag = |incarnation: &str| Record::Tag { incarnation: incarnation.into() };
        let mut journal = open(dir.path());
        for record in [engine("E"), tag("a"), opening("b"), tag("c"), closed("a")] {
            journal.write(&record).unwrap();
        }
        drop(journal);
        let mut journal = open(dir.path());
        assert_eq!(journal.tags_left_open("E").iter().collect::<Vec<_>>(), ["c"]);
        assert!(!journal.incarnations_left_open("E").contains_key("c"), "it holds no row");
        assert!(journal.tags_left_open("F").is_empty());
        // The file stays short while tags come and go.
        for number in 0..10 * LINES_KEPT_MAX {
            journal.write(&tag(&number.to_string())).unwrap();
            journal.write(&closed(&number.to_string())).unwrap();
            assert!(journal.line_count <= LINES_KEPT_MAX);
        }
        journal.write(&engine("F")).unwrap();
        assert!(journal.tags_left_open("F").is_empty(), "they are gone with their engine");
    }

    #[test]
    fn another_engine_has_nothing_of_the_last_one() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = open(dir.path());
        for record in [engine("E"), opening("a"), engine("F"), opening("b")] {
            journal.write(&record).unwrap();
        }
        assert_eq!(journal.incarnations_left_open("F").keys().collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn a_second_agent_is_kept_off() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(dir.path());
        let second = Journal::open(dir.path(), "engine");
        assert!(matches!(second, Err(Error::Locked(_))), "{second:?}");
        drop(first);
        open(dir.path());
    }

    #[test]
    fn a_file_cut_anywhere_forgets_only_what_was_never_done() {
        let records = [engine("E"), opening("a"), turn("a", "r"), opening("b"), closed("a")];
        let text: String = records.iter().map(Record::to_line).collect();
        for cut in 0..=text.len() {
            let whole = text[..cut].matches('\n').count();
            let mut want = JournalState::default();
            records[..whole].iter().for_each(|record| want.apply(record));
            assert_eq!(replay(&text.as_bytes()[..cut]).0, want, "cut at {cut}");
        }
    }

    #[test]
    fn after_a_cut_line_the_next_agent_writes_lines_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.journal");
        std::fs::write(&path, "engine E\nopening a 0\nopeni").unwrap();
        open(dir.path()).write(&opening("b")).unwrap();
        assert_eq!(
            open(dir.path()).incarnations_left_open("E").keys().collect::<Vec<_>>(),
            ["a", "b"]
        );
    }

    #[test]
    fn history_is_thrown_away_and_what_is_open_stays() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = open(dir.path());
        journal.write(&engine("E")).unwrap();
        journal.write(&opening("stays")).unwrap();
        for n in 0..3 * LINES_KEPT_MAX {
            journal.write(&opening(&n.to_string())).unwrap();
            journal.write(&closed(&n.to_string())).unwrap();
        }
        let lines = std::fs::read_to_string(dir.path().join("engine.journal")).unwrap();
        assert!(lines.lines().count() <= LINES_KEPT_MAX + 2, "{} lines", lines.lines().count());
        drop(journal);
        assert_eq!(
            open(dir.path()).incarnations_left_open("E").keys().collect::<Vec<_>>(),
            ["stays"]
        );
    }

    #[test]
    fn a_record_after_a_torn_one_is_a_line_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = open(dir.path());
        journal.write(&engine("E")).unwrap();
        // The remains of a record after its write failed on a full disk.
        journal.file.write_all(b"opening a").unwrap();
        journal.is_behind = true;
        journal.write(&opening("b")).unwrap();
        drop(journal);
        assert_eq!(open(dir.path()).incarnations_left_open("E").keys().collect::<Vec<_>>(), ["b"]);
    }

    /// Makes every write fail as on a full disk, until the returned folder is removed.
    fn fill_disk(journal: &mut Journal, dir: &Path) -> PathBuf {
        journal.file = File::options().append(true).open("/dev/full").unwrap();
        let in_the_way = dir.join("engine.journal.new");
        std::fs::create_dir(&in_the_way).unwrap();
        in_the_way
    }

    #[test]
    fn what_a_full_disk_refused_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = open(dir.path());
        for record in [engine("E"), opening("a"), turn("a", "r")] {
            journal.write(&record).unwrap();
        }
        let full = fill_disk(&mut journal, dir.path());
        for record in [engine("F"), opening("b")] {
            assert!(journal.write(&record).is_err(), "{record:?} on a full disk");
        }
        assert!(journal.retry().is_err() && journal.is_behind());
        std::fs::remove_dir(full).unwrap();
        journal.retry().unwrap();
        assert!(!journal.is_behind());
        drop(journal);
        let left = open(dir.path()).incarnations_left_open("F");
        assert_eq!(left.keys().collect::<Vec<_>>(), ["b"], "of the engine that is there now");
    }

    fn handed(id: &str) -> HandedSession {
        serde_json::from_value(serde_json::json!({
            "principal": "p \n", "id": id, "dp_rank": 0, "incarnation": "a",
            "state": {"open": {"resident_tokens": 7}}, "chooser": "client", "sharing": "exclusive",
            "turns_finished": 1, "idle_ms": 2, "idle_ms_max": 3, "history_tokens": 8,
            "client": {
                "deltas": "taken", "sends_full": false, "may_be_ahead": false,
                "last_measured": {"prompt_tokens_bound": 1, "tokens": 2},
                "longest_answer_tokens": 4, "divergence_streak": 0, "hidden_end_tokens_from": null,
            },
            "weights": {"epoch": 0, "counted": null},
        }))
        .unwrap()
    }

    fn handover(ids: &[&str]) -> Handover {
        let boot = Some(BootTime { boot_id: "b-1".into(), ms: 7 });
        let at = Moment { unix_ms: 5, boot };
        Handover { at, sessions: ids.iter().map(|id| handed(id)).collect() }
    }

    #[test]
    fn what_is_handed_over_is_taken_once_and_not_after_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = open(dir.path());
        journal.write(&engine("E")).unwrap();
        journal.write(&opening("a")).unwrap();
        journal.hand_over(handover(&["one", "two"])).unwrap();
        drop(journal);
        drop(open(dir.path()));
        // A successor that ended before it acted has not used it up.
        let mut journal = open(dir.path());
        assert_eq!(journal.take_handover(), Some(handover(&["one", "two"])));
        drop(journal);
        let mut journal = open(dir.path());
        assert_eq!(journal.take_handover(), None, "taken once");
        assert_eq!(journal.incarnations_left_open("E").len(), 1, "and the incarnation is known");
        journal.hand_over(handover(&[])).unwrap();
        journal.write(&engine("E")).unwrap();
        drop(journal);
        assert_eq!(open(dir.path()).take_handover(), None, "a later record voids it");
    }

    #[test]
    fn what_can_t_be_removed_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = open(dir.path());
        journal.hand_over(handover(&["one"])).unwrap();
        fill_disk(&mut journal, dir.path());
        assert_eq!(journal.take_handover(), None);
        assert!(journal.is_behind(), "and it is removed before the next record");
    }

    #[test]
    fn a_hand_over_that_is_cut_or_of_another_version_is_none() {
        let mut state =
            JournalState { handover: Some(handover(&["a", "b"])), ..Default::default() };
        let text = state.lines().concat();
        assert_eq!(replay(text.as_bytes()).0.handover, state.handover.take());
        for cut in 0..text.len() {
            assert_eq!(replay(&text.as_bytes()[..cut]).0.handover, None, "cut at {cut}");
        }
        let unread = text.replace(" b-1 7\n", "\n");
        let read = replay(unread.as_bytes()).0.handover.map(|handover| handover.at);
        let at = Moment { unix_ms: 5, boot: None };
        assert_eq!(read, Some(at), "the boot's clock could not be read");
        let next_version = text.replace("handover 1 ", "handover 2 ");
        assert_eq!(replay(next_version.as_bytes()).0.handover, None);
        let with_more = text.replace("\"dp_rank\"", "\"unknown\":0,\"dp_rank\"");
        assert_eq!(replay(with_more.as_bytes()).0.handover, None, "what it means isn't known");
    }

    #[test]
    fn absurd_counts_in_a_hand_over_can_be_added() {
        let mut session = serde_json::to_value(handed("s")).unwrap();
        session["state"]["open"]["resident_tokens"] = u64::MAX.into();
        for key in ["history_tokens", "turns_finished"] {
            session[key] = u64::MAX.into();
        }
        session["client"]["longest_answer_tokens"] = u64::MAX.into();
        session["client"]["last_measured"]["tokens"] = u64::MAX.into();
        session["weights"] = serde_json::json!({"epoch": u64::MAX, "counted": u64::MAX});
        let session: HandedSession = serde_json::from_value(session).unwrap();
        let text = serde_json::to_string(&session).unwrap();
        let bounded = text.matches(&contract::count::COUNT_MAX.to_string()).count();
        assert_eq!((bounded, text.contains(&u64::MAX.to_string())), (7, false), "{text}");
    }

    #[test]
    fn a_file_that_is_not_this_user_s_own_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        for name in ["engine.lock", "engine.journal"] {
            let state = dir.path().join(name.replace('.', "-"));
            drop(Journal::open(&state, "engine").unwrap());
            std::fs::remove_file(state.join(name)).unwrap();
            std::os::unix::fs::symlink(&victim, state.join(name)).unwrap();
            let opened = Journal::open(&state, "engine");
            assert!(matches!(opened, Err(Error::Folder(_))), "{name}: {opened:?}");
        }
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    }
}
