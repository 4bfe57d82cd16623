//! The engine's processes: who they are in `/proc`, found from the scheduler that the shim speaks
//! from. One scheduler per GPU; they have the same parent, and SGLang names each by its ranks.
//!
//! A pid is good as long as its process has the start time it was found with. A scheduler of
//! another pid namespace is known by the number it has there, if exactly one process has it.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

/// What SGLang names its schedulers, before their ranks.
const TITLE: &str = "sglang::scheduler";
/// The machine's first pid namespace, in which NVML's pids are everyone's. A constant of Linux.
const FIRST_NAMESPACE: &str = "pid:[4026531836]";
/// Looking through `/proc` costs some 10 µs a process; the engine's don't change while it runs.
const SEARCH_INTERVAL: Duration = Duration::from_secs(30);

/// A rank's scheduler, as its shim has said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheduler {
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// In the agent's namespace, as the kernel says. None: it isn't seen from here.
    pub pid: Option<u32>,
    /// In its own namespace, as itself says.
    pub own_pid: u32,
}

/// One of the engine's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// In the agent's namespace.
    pub pid: u32,
    /// The data-parallel rank that it works for, where that is known.
    pub dp_rank: Option<u32>,
    /// Clock ticks from the machine's start to its own.
    pub start: u64,
}

/// The engine's processes as they are known.
#[derive(Debug)]
pub struct Processes {
    proc: PathBuf,
    schedulers: Vec<Scheduler>,
    members: Vec<Member>,
    searched: Option<Instant>,
}

impl Processes {
    /// Looks into the process file system at `proc`.
    #[must_use]
    pub fn new(proc: PathBuf) -> Self {
        Self { proc, schedulers: vec![], members: vec![], searched: None }
    }

    /// The engine's processes now. Answers too whether the schedulers are others than before.
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

    /// Are these pids of the driver's those that the agent sees? In the first namespace they are;
    /// in another one only a newer driver translates, and then knows no process that isn't here.
    pub fn are_ours(&self, mut pids: impl Iterator<Item = u32>) -> bool {
        let own = fs::read_link(self.proc.join("self/ns/pid"));
        let first = own.is_ok_and(|own| own.as_os_str() == FIRST_NAMESPACE);
        first || pids.all(|pid| pid == 0 || self.proc.join(pid.to_string()).exists())
    }

    fn is_alive(&self, member: &Member) -> bool {
        self.stat(member.pid).is_some_and(|stat| stat.start == member.start)
    }

    fn search(&self) -> Vec<Member> {
        let all: Vec<Seen> = self.pids().filter_map(|pid| self.seen(pid)).collect();
        members(&all, &self.schedulers)
    }

    fn pids(&self) -> impl Iterator<Item = u32> {
        let entries = fs::read_dir(&self.proc).into_iter().flatten();
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
    }

    fn seen(&self, pid: u32) -> Option<Seen> {
        let stat = self.stat(pid)?;
        let scheduler = self.read(pid, "cmdline").filter(|title| title.starts_with(TITLE));
        let named = self.schedulers.iter().any(|scheduler| scheduler.pid == Some(pid));
        if scheduler.is_none() && !named {
            return None;
        }
        let status = self.read(pid, "status").unwrap_or_default();
        Some(Seen { pid, stat, title: scheduler, own_pid: own_pid(&status) })
    }

    fn stat(&self, pid: u32) -> Option<Stat> {
        parse_stat(&self.read(pid, "stat")?)
    }

    fn read(&self, pid: u32, file: &str) -> Option<String> {
        let bytes = fs::read(self.proc.join(pid.to_string()).join(file)).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// A process that may be the engine's.
#[derive(Debug, Clone)]
struct Seen {
    pid: u32,
    stat: Stat,
    /// None: it has no scheduler's name, though a shim speaks from it.
    title: Option<String>,
    /// Its number in its own namespace.
    own_pid: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    parent: u32,
    start: u64,
}

/// The schedulers that speak, and those with the same parent.
fn members(all: &[Seen], schedulers: &[Scheduler]) -> Vec<Member> {
    let spoken: Vec<(&Seen, u32)> = schedulers
        .iter()
        .filter_map(|scheduler| Some((find(all, scheduler)?, scheduler.dp_rank)))
        .collect();
    let only_rank = match schedulers {
        [one] => Some(one.dp_rank),
        _ => None,
    };
    let is_sibling = |seen: &Seen| {
        // Of an engine that was orphaned, init is the parent, and of others too.
        let parent = seen.stat.parent;
        seen.title.is_some()
            && parent > 1
            && spoken.iter().any(|(one, _)| one.stat.parent == parent)
    };
    let member = |seen: &Seen, dp_rank| Member { pid: seen.pid, dp_rank, start: seen.stat.start };
    let mut members: Vec<Member> =
        spoken.iter().map(|(seen, rank)| member(seen, Some(*rank))).collect();
    for seen in all.iter().filter(|seen| is_sibling(seen)) {
        if !members.iter().any(|known| known.pid == seen.pid) {
            let named = seen.title.as_deref().and_then(rank_of);
            members.push(member(seen, named.or(only_rank)));
        }
    }
    members
}

/// By the kernel's word, else by the number in its own namespace if no other has it.
fn find<'a>(all: &'a [Seen], scheduler: &Scheduler) -> Option<&'a Seen> {
    if let Some(pid) = scheduler.pid {
        return all.iter().find(|seen| seen.pid == pid);
    }
    let mut same = all.iter().filter(|seen| {
        let inner = seen.own_pid.filter(|&own| own != seen.pid);
        seen.title.is_some() && inner == Some(scheduler.own_pid)
    });
    same.next().filter(|_| same.next().is_none())
}

/// `sglang::scheduler_DP1_TP0`; experts have a rank called `MOE_DP`.
fn rank_of(title: &str) -> Option<u32> {
    let title = title.split('\0').next()?;
    let words: Vec<&str> = title.split('_').collect();
    let at = (1..words.len()).find(|&at| words[at].starts_with("DP") && words[at - 1] != "MOE")?;
    words[at].trim_start_matches("DP").parse().ok()
}

/// The name before the other fields is in brackets, and may hold anything.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // The parent is the file's 4th field, the start its 22nd; the first two are gone.
    Some(Stat { parent: fields.get(1)?.parse().ok()?, start: fields.get(19)?.parse().ok()? })
}

/// The last of its numbers: one for each namespace, from the reader's inwards.
fn own_pid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `/proc` that a test writes.
    struct Proc(tempfile::TempDir);

    impl Proc {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn process(&self, pid: u32, parent: u32, start: u64, title: &str, own_pid: u32) {
            let folder = self.0.path().join(pid.to_string());
            fs::create_dir_all(&folder).unwrap();
            // A name that would mislead who splits at blanks.
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
        let now = tokio::time::Instant::now().into_std();
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
        // Its number is 7 here: another process than the one that is 7 there.
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
        assert!(processes.are_ours([11, 0].into_iter()));
        assert!(!processes.are_ours([11, 48_211].into_iter()), "a process that isn't here");
    }

    #[test]
    fn nothing_is_found_of_an_engine_that_has_gone() {
        let proc = Proc::new();
        assert_eq!(pids(&mut proc.processes(), &[scheduler(11)]), []);
        assert_eq!(pids(&mut proc.processes(), &[]), []);
    }
}
