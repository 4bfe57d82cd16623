//! Finds the engine's processes in `/proc`, so that the agent can tell which GPUs they use.
//!
//! An engine has one *scheduler* process per GPU. All of them have the same parent, and SGLang puts
//! the ranks of each scheduler into its process title. The *shim*, which is the agent's part inside
//! the engine, runs in some schedulers and reports their pids. The search starts from these
//! processes and adds the schedulers with the same parent.
//!
//! The GPU thread in `gpu.rs` calls [`ProcessFinder::engine_processes`] at each reading. Which of
//! the processes use which GPU is not known here; `tracker` compares the pids with NVML's.
//!
//! The kernel may give the pid of an ended process to a new process, so a process is identified by
//! its pid and its start time. A scheduler in another pid namespace (a container) is found by its
//! pid in that namespace, if exactly one scheduler has that pid.

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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scheduler {
    /// The data parallel rank.
    pub dp_rank: u32,
    /// The pid in the agent's namespace, as the kernel reports it for the shim's connection. `None`
    /// if the process isn't visible in that namespace.
    pub pid: Option<u32>,
    /// The pid in the scheduler's own namespace, as its shim reports it.
    pub pid_in_own_namespace: u32,
    /// The device of the scheduler's KV pool, as its shim reports it: the UUID without NVML's
    /// prefix, or torch's device type.
    pub device: String,
}

/// A process of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineProcess {
    /// The pid in the agent's namespace.
    pub pid: u32,
    /// The data parallel rank that the process works for, if known.
    pub dp_rank: Option<u32>,
    /// The process's start time, in clock ticks since the machine's start.
    pub start_ticks: u64,
}

/// Finds the engine's processes in `/proc`, and remembers the last result.
#[derive(Debug)]
pub struct ProcessFinder {
    /// The path of the process file system, `/proc`.
    proc_path: PathBuf,
    /// The schedulers at the last call of [`Self::engine_processes`].
    schedulers: Vec<Scheduler>,
    /// The result of the last search, without processes that have ended since.
    found: Vec<EngineProcess>,
    /// When `/proc` was last searched for `schedulers`. `None` if it wasn't.
    searched_at: Option<Instant>,
}

impl ProcessFinder {
    /// Creates a finder without a result, for the process file system at `proc_path`.
    #[must_use]
    pub fn new(proc_path: PathBuf) -> Self {
        Self { proc_path, schedulers: vec![], found: vec![], searched_at: None }
    }

    /// Returns the engine's current processes, and whether `schedulers` differ from those of the
    /// last call. Searches `/proc` only if they differ, if a known process has ended, or if
    /// `SEARCH_INTERVAL` has passed.
    pub fn engine_processes(
        &mut self,
        now: Instant,
        schedulers: &[Scheduler],
    ) -> (&[EngineProcess], bool) {
        let has_new_schedulers = self.schedulers != schedulers;
        if has_new_schedulers {
            self.schedulers = schedulers.to_vec();
            self.searched_at = None;
        }
        let count_before = self.found.len();
        let found_before = std::mem::take(&mut self.found);
        self.found = found_before.into_iter().filter(|process| self.is_alive(process)).collect();
        let is_search_due =
            self.searched_at.is_none_or(|searched_at| now >= searched_at + SEARCH_INTERVAL);
        if !schedulers.is_empty() && (is_search_due || self.found.len() < count_before) {
            self.found = self.search();
            self.searched_at = Some(now);
        }
        (&self.found, has_new_schedulers)
    }

    /// Whether the driver reports `pids` as pids of the agent's pid namespace.
    ///
    /// If the agent runs in the machine's initial namespace, the driver always does. If the agent
    /// runs in another namespace, older drivers still report pids of the initial namespace. Newer
    /// drivers translate the pids and list only processes of the agent's namespace, so each pid
    /// exists in `/proc`.
    pub fn are_in_agent_namespace(&self, mut pids: impl Iterator<Item = u32>) -> bool {
        let namespace = fs::read_link(self.proc_path.join("self/ns/pid"));
        let is_initial = namespace.is_ok_and(|name| name.as_os_str() == INITIAL_NAMESPACE);
        is_initial || pids.all(|pid| pid == 0 || self.proc_path.join(pid.to_string()).exists())
    }

    /// Whether the process still runs: its pid exists and has not gone to another process.
    fn is_alive(&self, process: &EngineProcess) -> bool {
        self.read_stat(process.pid).is_some_and(|stat| stat.start_ticks == process.start_ticks)
    }

    /// Searches `/proc` for the engine's processes.
    fn search(&self) -> Vec<EngineProcess> {
        let candidates: Vec<Candidate> =
            self.all_pids().filter_map(|pid| self.read_candidate(pid)).collect();
        find_engine_processes(&candidates, &self.schedulers)
    }

    /// Iterates over the pids of all processes of the machine that the agent can see.
    fn all_pids(&self) -> impl Iterator<Item = u32> {
        let entries = fs::read_dir(&self.proc_path).into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
    }

    /// Reads a process. `None` if it is gone, or if it can't belong to the engine.
    fn read_candidate(&self, pid: u32) -> Option<Candidate> {
        let stat = self.read_stat(pid)?;
        let title =
            self.read_file(pid, "cmdline").filter(|title| title.starts_with(SCHEDULER_TITLE));
        let has_shim = self.schedulers.iter().any(|scheduler| scheduler.pid == Some(pid));
        if title.is_none() && !has_shim {
            return None;
        }
        let status = self.read_file(pid, "status").unwrap_or_default();
        Some(Candidate {
            pid,
            stat,
            title,
            pid_in_own_namespace: parse_pid_in_own_namespace(&status),
        })
    }

    fn read_stat(&self, pid: u32) -> Option<ProcessStat> {
        parse_stat(&self.read_file(pid, "stat")?)
    }

    fn read_file(&self, pid: u32, file_name: &str) -> Option<String> {
        let bytes = fs::read(self.proc_path.join(pid.to_string()).join(file_name)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// A process that may belong to the engine, as read from `/proc`.
#[derive(Debug, Clone)]
struct Candidate {
    /// The pid in the agent's namespace.
    pid: u32,
    stat: ProcessStat,
    /// The process title, if it is that of a scheduler. A process with a shim may have another
    /// title.
    title: Option<String>,
    /// The pid in the namespace of the process itself; `None` if unreadable.
    pid_in_own_namespace: Option<u32>,
}

/// The two values that are read from `/proc/<pid>/stat`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessStat {
    /// The parent's pid.
    parent_pid: u32,
    /// See [`EngineProcess::start_ticks`].
    start_ticks: u64,
}

/// Returns the processes of `schedulers`, and all schedulers with the same parent as one of them.
fn find_engine_processes(candidates: &[Candidate], schedulers: &[Scheduler]) -> Vec<EngineProcess> {
    let with_shim: Vec<(&Candidate, u32)> = schedulers
        .iter()
        .filter_map(|scheduler| Some((find_scheduler(candidates, scheduler)?, scheduler.dp_rank)))
        .collect();
    let only_rank = match schedulers {
        [scheduler] => Some(scheduler.dp_rank),
        _ => None,
    };
    let is_sibling = |process: &Candidate| {
        // If the schedulers' parent has ended, their new parent is init (pid 1). Schedulers of
        // other engines may have that parent too, so it doesn't show a common engine.
        let parent_pid = process.stat.parent_pid;
        process.title.is_some()
            && parent_pid > 1
            && with_shim.iter().any(|(scheduler, _)| scheduler.stat.parent_pid == parent_pid)
    };
    let to_engine_process = |process: &Candidate, dp_rank| EngineProcess {
        pid: process.pid,
        dp_rank,
        start_ticks: process.stat.start_ticks,
    };
    let mut found: Vec<EngineProcess> =
        with_shim.iter().map(|(process, rank)| to_engine_process(process, Some(*rank))).collect();
    for process in candidates.iter().filter(|process| is_sibling(process)) {
        if !found.iter().any(|earlier| earlier.pid == process.pid) {
            let titled_rank = process.title.as_deref().and_then(parse_rank);
            found.push(to_engine_process(process, titled_rank.or(only_rank)));
        }
    }
    found
}

/// Finds a scheduler's process by its pid in the agent's namespace. If that pid is unknown, finds
/// the process by its pid in its own namespace, provided that exactly one scheduler has that pid.
fn find_scheduler<'a>(candidates: &'a [Candidate], scheduler: &Scheduler) -> Option<&'a Candidate> {
    if let Some(pid) = scheduler.pid {
        return candidates.iter().find(|process| process.pid == pid);
    }
    let mut matches = candidates.iter().filter(|process| {
        // Equal pids mean that the process is in the agent's namespace, not in another.
        let foreign_pid = process.pid_in_own_namespace.filter(|&pid| pid != process.pid);
        process.title.is_some() && foreign_pid == Some(scheduler.pid_in_own_namespace)
    });
    matches.next().filter(|_| matches.next().is_none())
}

/// Parses the DP rank of a title such as `sglang::scheduler_DP1_TP0`. A rank called `MOE_DP` is a
/// rank of experts and doesn't count.
fn parse_rank(title: &str) -> Option<u32> {
    let title = title.split('\0').next()?;
    let parts: Vec<&str> = title.split('_').collect();
    let index = (1..parts.len())
        .find(|&index| parts[index].starts_with("DP") && parts[index - 1] != "MOE")?;
    parts[index].trim_start_matches("DP").parse().ok()
}

/// Parses `/proc/<pid>/stat`. The process's name is in parentheses and may contain any character,
/// so the fields are counted from the last closing parenthesis.
fn parse_stat(text: &str) -> Option<ProcessStat> {
    let (_, after_name) = text.rsplit_once(')')?;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    // In the file, the parent is the 4th field and the start time the 22nd. The first two fields
    // are not in `fields`.
    Some(ProcessStat {
        parent_pid: fields.get(1)?.parse().ok()?,
        start_ticks: fields.get(19)?.parse().ok()?,
    })
}

/// Parses `/proc/<pid>/status` and returns the process's pid in its own namespace: the last pid in
/// the line `NSpid`. The first pid of that line is the pid in the reader's namespace.
fn parse_pid_in_own_namespace(status: &str) -> Option<u32> {
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

        fn processes(&self) -> ProcessFinder {
            ProcessFinder::new(self.0.path().to_owned())
        }
    }

    fn scheduler(pid: u32) -> Scheduler {
        Scheduler { dp_rank: 0, pid: Some(pid), pid_in_own_namespace: pid, device: String::new() }
    }

    fn pids(processes: &mut ProcessFinder, schedulers: &[Scheduler]) -> Vec<(u32, Option<u32>)> {
        let now = service::clock::now();
        let (found, _) = processes.engine_processes(now, schedulers);
        let mut pids: Vec<_> = found.iter().map(|process| (process.pid, process.dp_rank)).collect();
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
        let unseen = [Scheduler { pid: None, ..scheduler(7) }];
        let proc = Proc::new();
        proc.process(11, 10, 6, "sglang::scheduler_TP0", 7);
        proc.process(12, 10, 6, "sglang::scheduler_TP1", 8);
        // A process that has pid 7 in this namespace is not the one that has it in the other.
        proc.process(7, 3, 6, "sglang::scheduler", 7);
        assert_eq!(pids(&mut proc.processes(), &unseen), [(11, Some(0)), (12, Some(0))]);
        proc.process(31, 30, 6, "sglang::scheduler", 7);
        assert_eq!(pids(&mut proc.processes(), &unseen), [], "two could be meant");
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
