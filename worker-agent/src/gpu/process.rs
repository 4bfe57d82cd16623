//! Finds the engine's processes in `/proc`, so that the agent can tell which GPUs they use.
//!
//! An engine has one *scheduler* process per GPU. All of them have the same parent, and SGLang puts
//! the ranks of each scheduler into its process title. Shims run in some schedulers and report
//! their pids: the search starts from these and adds the schedulers with the same parent.
//!
//! The kernel may give the pid of an ended process to a new one, so a process is identified by its
//! pid and its start time. A scheduler in another pid namespace (a container) is found by its pid
//! in that namespace, if exactly one scheduler has that pid.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

const SCHEDULER_TITLE: &str = "sglang::scheduler";
/// This is the machine's initial pid namespace on every Linux. In it, NVML's pids are always valid.
const INITIAL_NAMESPACE: &str = "pid:[4026531836]";
/// A search takes about 10 µs per process, and an engine's processes don't change while it runs.
const SEARCH_INTERVAL: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scheduler {
    pub dp_rank: u32,
    /// The pid in the agent's namespace, as the kernel reports it for the shim's connection. `None`
    /// if the process isn't visible there.
    pub pid: Option<u32>,
    pub pid_in_own_namespace: u32,
    /// The device of the KV pool: the UUID without NVML's prefix, or torch's device type.
    pub device: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineProcess {
    /// The pid in the agent's namespace.
    pub pid: u32,
    pub dp_rank: Option<u32>,
    /// Clock ticks since the machine's start.
    pub start_ticks: u64,
}

#[derive(Debug)]
pub struct ProcessFinder {
    proc_path: PathBuf,
    schedulers: Vec<Scheduler>,
    /// Lacks processes that have ended since the search.
    found: Vec<EngineProcess>,
    searched_at: Option<Instant>,
}

impl ProcessFinder {
    #[must_use]
    pub fn new(proc_path: PathBuf) -> Self {
        Self { proc_path, schedulers: vec![], found: vec![], searched_at: None }
    }

    /// Also returns whether `schedulers` differ from those of the last call. Searches `/proc` only
    /// if they differ, a known process has ended, or `SEARCH_INTERVAL` has passed.
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

    /// Whether the driver reports `pids` as pids of the agent's namespace. In the machine's initial
    /// namespace, it always does. In another one, older drivers still report pids of the initial
    /// namespace. Newer drivers translate them and list only processes of the agent's namespace, so
    /// each pid exists in `/proc`.
    pub fn are_in_agent_namespace(&self, mut pids: impl Iterator<Item = u32>) -> bool {
        let namespace = fs::read_link(self.proc_path.join("self/ns/pid"));
        let is_initial = namespace.is_ok_and(|name| name.as_os_str() == INITIAL_NAMESPACE);
        is_initial || pids.all(|pid| pid == 0 || self.proc_path.join(pid.to_string()).exists())
    }

    /// The pid may have gone to another process.
    fn is_alive(&self, process: &EngineProcess) -> bool {
        self.read_stat(process.pid).is_some_and(|stat| stat.start_ticks == process.start_ticks)
    }

    fn search(&self) -> Vec<EngineProcess> {
        let candidates: Vec<Candidate> =
            self.all_pids().filter_map(|pid| self.read_candidate(pid)).collect();
        find_engine_processes(&candidates, &self.schedulers)
    }

    fn all_pids(&self) -> impl Iterator<Item = u32> {
        let entries = fs::read_dir(&self.proc_path).into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
    }

    /// `None` if the process is gone, or can't belong to the engine.
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

#[derive(Debug, Clone)]
struct Candidate {
    pid: u32,
    stat: ProcessStat,
    /// Set only for a scheduler's title. A process with a shim may have another one.
    title: Option<String>,
    /// `None` if unreadable.
    pid_in_own_namespace: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessStat {
    parent_pid: u32,
    start_ticks: u64,
}

/// Adds all schedulers with the same parent as one of `schedulers`.
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
        // After the end of the schedulers' parent, their parent is init (pid 1). Schedulers of
        // other engines may have it too, so it doesn't show a common engine.
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

/// The pid in its own namespace counts only if exactly one scheduler has it.
fn find_scheduler<'a>(candidates: &'a [Candidate], scheduler: &Scheduler) -> Option<&'a Candidate> {
    if let Some(pid) = scheduler.pid {
        return candidates.iter().find(|process| process.pid == pid);
    }
    let mut matches = candidates.iter().filter(|process| {
        // Equal pids mean that the process is in the agent's namespace.
        let foreign_pid = process.pid_in_own_namespace.filter(|&pid| pid != process.pid);
        process.title.is_some() && foreign_pid == Some(scheduler.pid_in_own_namespace)
    });
    matches.next().filter(|_| matches.next().is_none())
}

/// `sglang::scheduler_DP1_TP0` is of rank 1. `MOE_DP` is a rank of experts and doesn't count.
fn parse_rank(title: &str) -> Option<u32> {
    let title = title.split('\0').next()?;
    let parts: Vec<&str> = title.split('_').collect();
    let index = (1..parts.len())
        .find(|&index| parts[index].starts_with("DP") && parts[index - 1] != "MOE")?;
    parts[index].trim_start_matches("DP").parse().ok()
}

/// The name in parentheses may contain any character, so fields count from the last parenthesis.
fn parse_stat(text: &str) -> Option<ProcessStat> {
    let (_, after_name) = text.rsplit_once(')')?;
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    // The parent is the file's 4th field, the start time the 22nd; `fields` lacks the first two.
    Some(ProcessStat {
        parent_pid: fields.get(1)?.parse().ok()?,
        start_ticks: fields.get(19)?.parse().ok()?,
    })
}

/// The last pid in the line `NSpid`; the first one is in the reader's namespace.
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
