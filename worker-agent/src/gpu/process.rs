//! Finds the engine's processes in `/proc`, so that the agent can tell which GPUs they use.
//!
//! An engine has one *scheduler* process per GPU. All have the same parent, and SGLang puts the
//! ranks of each into its process title. The *shim*, which is the agent's part inside the engine,
//! runs in some of them and reports its process. The search starts from these processes and adds
//! the schedulers with the same parent.
//!
//! The kernel may give a pid to a new process, so a process is known by its pid and its start time.
//! A scheduler in another pid namespace (a container) is found by its pid there, if exactly one
//! scheduler has that pid.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

/// The start of the process titles that SGLang gives to schedulers.
const SCHEDULER_TITLE: &str = "sglang::scheduler";
/// The machine's initial pid namespace, as `/proc/self/ns/pid` names it on every Linux. In this
/// namespace, the pids that NVML reports are always valid.
const INITIAL_NAMESPACE: &str = "pid:[4026531836]";
/// The time between two searches of `/proc`. A search takes about 10 µs per process, and an
/// engine's processes don't change while it runs.
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
    pub start_ticks: u64,
}

/// The engine's known processes.
#[derive(Debug)]
pub struct Processes {
    /// The path of the process file system, `/proc`.
    proc_path: PathBuf,
    /// The schedulers at the last call of [`Self::members`].
    schedulers: Vec<Scheduler>,
    members: Vec<Member>,
    /// When `/proc` was last searched for these schedulers.
    searched_at: Option<Instant>,
}

impl Processes {
    /// Creates the state for the process file system at `proc_path`.
    #[must_use]
    pub fn new(proc_path: PathBuf) -> Self {
        Self { proc_path, schedulers: vec![], members: vec![], searched_at: None }
    }

    /// Returns the engine's current processes, and whether the schedulers have changed since the
    /// last call.
    pub fn members(&mut self, now: Instant, schedulers: &[Scheduler]) -> (&[Member], bool) {
        let has_new_schedulers = self.schedulers != schedulers;
        if has_new_schedulers {
            self.schedulers = schedulers.to_vec();
            self.searched_at = None;
        }
        let count_before = self.members.len();
        let members = std::mem::take(&mut self.members);
        self.members = members.into_iter().filter(|member| self.is_alive(member)).collect();
        let is_due = self.searched_at.is_none_or(|at| now >= at + SEARCH_INTERVAL);
        if !schedulers.is_empty() && (is_due || self.members.len() < count_before) {
            self.members = self.search();
            self.searched_at = Some(now);
        }
        (&self.members, has_new_schedulers)
    }

    /// Whether these pids from the driver are pids of the agent's pid namespace.
    ///
    /// In the machine's initial namespace, they always are. In another namespace, older drivers
    /// report the pids of the initial namespace. Newer drivers translate them and list only
    /// processes of the agent's namespace, so each pid exists in `/proc`.
    pub fn are_in_agent_namespace(&self, mut pids: impl Iterator<Item = u32>) -> bool {
        let namespace = fs::read_link(self.proc_path.join("self/ns/pid"));
        let is_initial = namespace.is_ok_and(|name| name.as_os_str() == INITIAL_NAMESPACE);
        is_initial || pids.all(|pid| pid == 0 || self.proc_path.join(pid.to_string()).exists())
    }

    /// Whether the member's pid still belongs to the same process.
    fn is_alive(&self, member: &Member) -> bool {
        self.stat(member.pid).is_some_and(|stat| stat.start_ticks == member.start_ticks)
    }

    /// Searches `/proc` for the engine's processes.
    fn search(&self) -> Vec<Member> {
        let candidates: Vec<Candidate> =
            self.pids().filter_map(|pid| self.read_candidate(pid)).collect();
        find_members(&candidates, &self.schedulers)
    }

    /// Iterates over the pids of all processes.
    fn pids(&self) -> impl Iterator<Item = u32> {
        let entries = fs::read_dir(&self.proc_path).into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
    }

    /// Reads a process. `None` if it is gone, or if it can't belong to the engine.
    fn read_candidate(&self, pid: u32) -> Option<Candidate> {
        let stat = self.stat(pid)?;
        let title = self.read(pid, "cmdline").filter(|title| title.starts_with(SCHEDULER_TITLE));
        let has_shim = self.schedulers.iter().any(|scheduler| scheduler.pid == Some(pid));
        if title.is_none() && !has_shim {
            return None;
        }
        let status = self.read(pid, "status").unwrap_or_default();
        Some(Candidate { pid, stat, title, own_pid: parse_own_pid(&status) })
    }

    fn stat(&self, pid: u32) -> Option<Stat> {
        parse_stat(&self.read(pid, "stat")?)
    }

    fn read(&self, pid: u32, file: &str) -> Option<String> {
        let bytes = fs::read(self.proc_path.join(pid.to_string()).join(file)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// A process that may belong to the engine.
#[derive(Debug, Clone)]
struct Candidate {
    pid: u32,
    stat: Stat,
    /// The process title, if it is that of a scheduler. A process with a shim may have another
    /// title.
    title: Option<String>,
    /// The pid in its own namespace.
    own_pid: Option<u32>,
}

/// What is read from `/proc/<pid>/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    /// The parent's pid.
    parent_pid: u32,
    /// See [`Member::start_ticks`].
    start_ticks: u64,
}

/// Returns the schedulers that have a shim, and all schedulers with the same parent as one of them.
fn find_members(candidates: &[Candidate], schedulers: &[Scheduler]) -> Vec<Member> {
    let with_shim: Vec<(&Candidate, u32)> = schedulers
        .iter()
        .filter_map(|scheduler| Some((find_scheduler(candidates, scheduler)?, scheduler.dp_rank)))
        .collect();
    let only_rank = match schedulers {
        [scheduler] => Some(scheduler.dp_rank),
        _ => None,
    };
    let is_sibling = |process: &Candidate| {
        // If an engine's parent has died, its new parent is init (pid 1). Schedulers of other
        // engines may have that parent too, so it says nothing.
        let parent_pid = process.stat.parent_pid;
        process.title.is_some()
            && parent_pid > 1
            && with_shim.iter().any(|(scheduler, _)| scheduler.stat.parent_pid == parent_pid)
    };
    let to_member = |process: &Candidate, dp_rank| Member {
        pid: process.pid,
        dp_rank,
        start_ticks: process.stat.start_ticks,
    };
    let mut members: Vec<Member> =
        with_shim.iter().map(|(process, rank)| to_member(process, Some(*rank))).collect();
    for process in candidates.iter().filter(|process| is_sibling(process)) {
        if !members.iter().any(|known| known.pid == process.pid) {
            let titled_rank = process.title.as_deref().and_then(parse_rank);
            members.push(to_member(process, titled_rank.or(only_rank)));
        }
    }
    members
}

/// Finds a scheduler's process by its pid in the agent's namespace. If that is unknown, finds it by
/// its pid in its own namespace, if exactly one scheduler has that pid.
fn find_scheduler<'a>(candidates: &'a [Candidate], scheduler: &Scheduler) -> Option<&'a Candidate> {
    if let Some(pid) = scheduler.pid {
        return candidates.iter().find(|process| process.pid == pid);
    }
    let mut matches = candidates.iter().filter(|process| {
        let pid_elsewhere = process.own_pid.filter(|&own| own != process.pid);
        process.title.is_some() && pid_elsewhere == Some(scheduler.own_pid)
    });
    matches.next().filter(|_| matches.next().is_none())
}

/// Parses the DP rank of a title such as `sglang::scheduler_DP1_TP0`. A rank called `MOE_DP` is a
/// rank of experts and doesn't count.
fn parse_rank(title: &str) -> Option<u32> {
    let title = title.split('\0').next()?;
    let words: Vec<&str> = title.split('_').collect();
    let index = (1..words.len())
        .find(|&index| words[index].starts_with("DP") && words[index - 1] != "MOE")?;
    words[index].trim_start_matches("DP").parse().ok()
}

/// Parses `/proc/<pid>/stat`. The process's name is in parentheses and may contain any character,
/// so the fields are counted from the last parenthesis.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // In the file, the parent is the 4th field and the start time the 22nd. The first two fields
    // are not in `fields`.
    Some(Stat {
        parent_pid: fields.get(1)?.parse().ok()?,
        start_ticks: fields.get(19)?.parse().ok()?,
    })
}

/// Parses `/proc/<pid>/status` and returns the process's pid in its own namespace. That is the last
/// pid in the line `NSpid`. The first is the pid in the reader's namespace.
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
        assert!(processes.are_in_agent_namespace([11, 0].into_iter()));
        assert!(
            !processes.are_in_agent_namespace([11, 48_211].into_iter()),
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
