//! Finds the engine's processes in `/proc`, starting from the scheduler processes that have a shim.
//!
//! An engine has one scheduler process per GPU. They have the same parent, and SGLang names each by
//! its ranks. A pid is valid only while its process has the start time with which it was found. A
//! scheduler in another pid namespace is identified by its pid there, if exactly one process has
//! that pid.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

/// The start of the process titles that SGLang gives to schedulers.
const TITLE: &str = "sglang::scheduler";
/// The machine's initial pid namespace, in which NVML's pids are those of all processes. A constant
/// of Linux.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";
/// The time between two searches of `/proc`, which cost about 10 µs a process. An engine's
/// processes don't change while it runs.
const SEARCH_INTERVAL: Duration = Duration::from_secs(30);

/// A rank's scheduler process, as its shim reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheduler {
    /// The data parallel rank.
    pub dp_rank: u32,
    /// The pid in the agent's namespace, from the kernel. `None` if the process isn't visible
    /// there.
    pub pid: Option<u32>,
    /// The pid in the scheduler's own namespace, as it reports itself.
    pub own_pid: u32,
}

/// A process of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// The pid in the agent's namespace.
    pub pid: u32,
    /// The data parallel rank that it works for, if known.
    pub dp_rank: Option<u32>,
    /// The process's start time, in clock ticks since the machine's start.
    pub start: u64,
}

/// The engine's known processes.
#[derive(Debug)]
pub struct Processes {
    proc: PathBuf,
    schedulers: Vec<Scheduler>,
    members: Vec<Member>,
    searched: Option<Instant>,
}

impl Processes {
    /// Creates the state for the process file system at `proc`.
    #[must_use]
    pub fn new(proc: PathBuf) -> Self {
        Self { proc, schedulers: vec![], members: vec![], searched: None }
    }

    /// Returns the engine's current processes, and whether the schedulers have changed since the
    /// last call.
    pub fn members(&mut self, now: Instant, schedulers: &[Scheduler]) -> (&[Member], bool) {
        let others = self.schedulers != schedulers;
        if others {
            self.schedulers = schedulers.to_vec();
            self.searched = None;
        }
        let known = self.members.len();
        let members = std::mem::take(&mut self.members);
        self.members = members.into_iter().filter(|member| self.is_alive(member)).collect();
        let due = self.searched.is_none_or(|at| now >= at + SEARCH_INTERVAL);
        if !schedulers.is_empty() && (due || self.members.len() < known) {
            self.members = self.search();
            self.searched = Some(now);
        }
        (&self.members, others)
    }

    /// Whether these pids from the driver are pids of the agent's namespace. In the initial
    /// namespace they always are. In another one only a newer driver translates them, and then it
    /// lists only processes of this namespace.
    pub fn are_in_our_namespace(&self, mut pids: impl Iterator<Item = u32>) -> bool {
        let own = fs::read_link(self.proc.join("self/ns/pid"));
        let first = own.is_ok_and(|own| own.as_os_str() == FIRST_NAMESPACE);
        first || pids.all(|pid| pid == 0 || self.proc.join(pid.to_string()).exists())
    }

    fn is_alive(&self, member: &Member) -> bool {
        self.stat(member.pid).is_some_and(|stat| stat.start == member.start)
    }

    fn search(&self) -> Vec<Member> {
        let all: Vec<Candidate> = self.pids().filter_map(|pid| self.read_candidate(pid)).collect();
        find_members(&all, &self.schedulers)
    }

    fn pids(&self) -> impl Iterator<Item = u32> {
        let entries = fs::read_dir(&self.proc).into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
    }

    fn read_candidate(&self, pid: u32) -> Option<Candidate> {
        let stat = self.stat(pid)?;
        let scheduler = self.read(pid, "cmdline").filter(|title| title.starts_with(TITLE));
        let named = self.schedulers.iter().any(|scheduler| scheduler.pid == Some(pid));
        if scheduler.is_none() && !named {
            return None;
        }
        let status = self.read(pid, "status").unwrap_or_default();
        Some(Candidate { pid, stat, title: scheduler, own_pid: parse_own_pid(&status) })
    }

    fn stat(&self, pid: u32) -> Option<Stat> {
        parse_stat(&self.read(pid, "stat")?)
    }

    fn read(&self, pid: u32, file: &str) -> Option<String> {
        let bytes = fs::read(self.proc.join(pid.to_string()).join(file)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// A process that may belong to the engine.
#[derive(Debug, Clone)]
struct Candidate {
    pid: u32,
    stat: Stat,
    /// The title of a scheduler. `None` if it has another title although a shim connected from it.
    title: Option<String>,
    /// The pid in its own namespace.
    own_pid: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    parent: u32,
    start: u64,
}

/// Returns the schedulers that have a shim, and all schedulers with the same parent.
fn find_members(all: &[Candidate], schedulers: &[Scheduler]) -> Vec<Member> {
    let reporting: Vec<(&Candidate, u32)> = schedulers
        .iter()
        .filter_map(|scheduler| Some((find_scheduler(all, scheduler)?, scheduler.dp_rank)))
        .collect();
    let only_rank = match schedulers {
        [one] => Some(one.dp_rank),
        _ => None,
    };
    let is_sibling = |seen: &Candidate| {
        // The parent of an orphaned engine is init, which is also the parent of other engines.
        let parent = seen.stat.parent;
        seen.title.is_some()
            && parent > 1
            && reporting.iter().any(|(one, _)| one.stat.parent == parent)
    };
    let member =
        |seen: &Candidate, dp_rank| Member { pid: seen.pid, dp_rank, start: seen.stat.start };
    let mut members: Vec<Member> =
        reporting.iter().map(|(seen, rank)| member(seen, Some(*rank))).collect();
    for seen in all.iter().filter(|seen| is_sibling(seen)) {
        if !members.iter().any(|known| known.pid == seen.pid) {
            let named = seen.title.as_deref().and_then(parse_rank);
            members.push(member(seen, named.or(only_rank)));
        }
    }
    members
}

/// Finds a scheduler by the pid from the kernel, or else by the pid in its own namespace if it is
/// unique.
fn find_scheduler<'a>(all: &'a [Candidate], scheduler: &Scheduler) -> Option<&'a Candidate> {
    if let Some(pid) = scheduler.pid {
        return all.iter().find(|seen| seen.pid == pid);
    }
    let mut same = all.iter().filter(|seen| {
        let inner = seen.own_pid.filter(|&own| own != seen.pid);
        seen.title.is_some() && inner == Some(scheduler.own_pid)
    });
    same.next().filter(|_| same.next().is_none())
}

/// Parses the DP rank of a title such as `sglang::scheduler_DP1_TP0`. A rank called `MOE_DP` is one
/// of experts.
fn parse_rank(title: &str) -> Option<u32> {
    let title = title.split('\0').next()?;
    let words: Vec<&str> = title.split('_').collect();
    let at = (1..words.len()).find(|&at| words[at].starts_with("DP") && words[at - 1] != "MOE")?;
    words[at].trim_start_matches("DP").parse().ok()
}

/// Parses `/proc/<pid>/stat`. The process's name is in brackets and may contain any character.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // The parent is the file's 4th field and the start time the 22nd; the first two are already
    // removed.
    Some(Stat { parent: fields.get(1)?.parse().ok()?, start: fields.get(19)?.parse().ok()? })
}

/// Returns the last pid of the line `NSpid`, which has one pid per namespace from the reader's
/// inwards.
fn parse_own_pid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `/proc` written by a test.
    struct Proc(tempfile::TempDir);

    impl Proc {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn process(&self, pid: u32, parent: u32, start: u64, title: &str, own_pid: u32) {
            let folder = self.0.path().join(pid.to_string());
            fs::create_dir_all(&folder).unwrap();
            // A name that breaks parsers that split at spaces.
            let zeros = "0 ".repeat(17);
            let stat = format!("{pid} (a) 9 (b) S {parent} {zeros}{start} 0 0\n");
            fs::write(folder.join("stat"), stat).unwrap();
            fs::write(folder.join("cmdline"), format!("{title}\0\0")).unwrap();
            let numbers = if own_pid == pid { String::new() } else { format!("\t{own_pid}") };
            let status = format!("Name:\tx\nNSpid:\t{pid}{numbers}\nThreads:\t1\n");
            fs::write(folder.join("status"), status).unwrap();
        }

        fn remove(&self, pid: u32) {
            fs::remove_dir_all(self.0.path().join(pid.to_string())).unwrap();
        }

        fn processes(&self) -> Processes {
            Processes::new(self.0.path().to_owned())
        }
    }

    fn scheduler(pid: u32) -> Scheduler {
        Scheduler { dp_rank: 0, pid: Some(pid), own_pid: pid }
    }

    fn pids(processes: &mut Processes, schedulers: &[Scheduler]) -> Vec<(u32, Option<u32>)> {
        let now = service::clock::now();
        let (members, _) = processes.members(now, schedulers);
        let mut pids: Vec<_> = members.iter().map(|one| (one.pid, one.dp_rank)).collect();
        pids.sort_unstable();
        pids
    }

    #[test]
    fn the_schedulers_of_one_parent_are_one_engine() {
        let proc = Proc::new();
        proc.process(10, 1, 5, "python -m sglang.launch_server", 10);
        proc.process(11, 10, 6, "sglang::scheduler_TP0", 11);
        proc.process(12, 10, 6, "sglang::scheduler_TP1", 12);
        proc.process(13, 10, 6, "sglang::detokenizer", 13);
        proc.process(21, 20, 6, "sglang::scheduler_TP0", 21);
        let found = pids(&mut proc.processes(), &[scheduler(11)]);
        assert_eq!(found, [(11, Some(0)), (12, Some(0))]);
    }

    #[test]
    fn an_orphaned_engine_has_no_siblings() {
        let proc = Proc::new();
        proc.process(11, 1, 6, "sglang::scheduler", 11);
        proc.process(21, 1, 6, "sglang::scheduler", 21);
        assert_eq!(pids(&mut proc.processes(), &[scheduler(11)]), [(11, Some(0))]);
    }

    #[test]
    fn a_name_tells_the_rank() {
        let proc = Proc::new();
        for (pid, title) in [
            (11, "sglang::scheduler_DP0_TP0"),
            (12, "sglang::scheduler_DP1_TP0"),
            (13, "sglang::scheduler_DP1_PP0_MOE_DP3_TP1_EP1"),
            (14, "sglang::scheduler_MOE_DP3"),
        ] {
            proc.process(pid, 10, 6, title, pid);
        }
        let schedulers = [scheduler(11), Scheduler { dp_rank: 1, ..scheduler(12) }];
        let found = pids(&mut proc.processes(), &schedulers);
        assert_eq!(found, [(11, Some(0)), (12, Some(1)), (13, Some(1)), (14, None)]);
    }

    #[test]
    fn a_pid_that_was_given_to_another_process_is_not_the_engine_s() {
        let proc = Proc::new();
        proc.process(11, 10, 6, "sglang::scheduler_TP0", 11);
        proc.process(12, 10, 6, "sglang::scheduler_TP1", 12);
        let mut processes = proc.processes();
        assert_eq!(pids(&mut processes, &[scheduler(11)]).len(), 2);
        proc.remove(12);
        proc.process(12, 99, 70, "someone", 12);
        assert_eq!(pids(&mut processes, &[scheduler(11)]), [(11, Some(0))]);
    }

    #[test]
    fn a_scheduler_of_another_namespace_is_known_by_its_number_there() {
        let unseen = Scheduler { dp_rank: 0, pid: None, own_pid: 7 };
        let proc = Proc::new();
        proc.process(11, 10, 6, "sglang::scheduler_TP0", 7);
        proc.process(12, 10, 6, "sglang::scheduler_TP1", 8);
        // A process that has pid 7 in this namespace is not the one that has it in the other.
        proc.process(7, 3, 6, "sglang::scheduler", 7);
        assert_eq!(pids(&mut proc.processes(), &[unseen]), [(11, Some(0)), (12, Some(0))]);
        proc.process(31, 30, 6, "sglang::scheduler", 7);
        assert_eq!(pids(&mut proc.processes(), &[unseen]), [], "two could be meant");
    }

    #[test]
    fn pids_of_another_namespace_are_noticed() {
        let proc = Proc::new();
        proc.process(11, 10, 6, "sglang::scheduler_TP0", 11);
        let processes = proc.processes();
        assert!(processes.are_in_our_namespace([11, 0].into_iter()));
        assert!(
            !processes.are_in_our_namespace([11, 48_211].into_iter()),
            "a process that isn't here"
        );
    }

    #[test]
    fn nothing_is_found_of_an_engine_that_has_gone() {
        let proc = Proc::new();
        assert_eq!(pids(&mut proc.processes(), &[scheduler(11)]), []);
        assert_eq!(pids(&mut proc.processes(), &[]), []);
    }
}
