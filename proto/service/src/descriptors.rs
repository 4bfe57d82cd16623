//! The process's file descriptors: raises their limit, and divides them among their uses.
//!
//! A process without a free descriptor can accept no connection, open no file, and reach neither
//! engine nor agent. So limits on connections are derived from the limit on descriptors.

use std::error::Error;

use rustix::{
    io::Errno,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use tracing::{info, warn};

/// Listeners, runtimes, files, the shim's sockets and the loaded libraries: about 40 in a process.
const OTHER_USES: usize = 96;
/// One part in this many is for connections between routers and agents that carry no turn: control
/// ports, and a router's idle connections.
const FLEET_PART: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorPlan {
    /// Turns whose client's connection and onward connection both have a descriptor.
    pub turns: usize,
    pub fleet: usize,
}

impl DescriptorPlan {
    /// `reserved` are for ports that the caller limits by itself.
    #[must_use]
    pub fn new(descriptors: usize, reserved: usize) -> Self {
        let fleet = descriptors / FLEET_PART;
        let rest = descriptors.saturating_sub(fleet + reserved + OTHER_USES);
        // A process with very few descriptors takes some turns all the same: it works while few
        // clients come.
        Self { turns: (rest / 2).max(4), fleet: fleet.max(4) }
    }
}

/// Returns the limit in effect.
pub fn raise_limit() -> usize {
    let before = getrlimit(Resource::Nofile);
    if before.current != before.maximum {
        let raised = Rlimit { current: before.maximum, maximum: before.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            warn!(%error, "can't raise the limit on file descriptors");
        }
    }
    let limit = getrlimit(Resource::Nofile).current;
    info!(limit, before = before.current, "limit on file descriptors");
    limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Whether an error, or a cause of it, says that this process or this host has no descriptor or
/// port left for a connection. Then the fault isn't at the other end.
#[must_use]
pub fn is_shortage(error: &(dyn Error + 'static)) -> bool {
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::ADDRNOTAVAIL, Errno::NOBUFS];
    let code = system_error(error).and_then(std::io::Error::raw_os_error);
    code.is_some_and(|code| shortages.iter().any(|errno| errno.raw_os_error() == code))
}

#[must_use]
pub fn system_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a std::io::Error> {
    let mut causes = std::iter::successors(Some(error), |&error| error.source());
    causes.find_map(|error| error.downcast_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_never_exceed_the_whole() {
        for descriptors in [256, 512, 1024, 4096, 65_536, 1 << 20] {
            let plan = DescriptorPlan::new(descriptors, 96);
            assert!(2 * plan.turns + plan.fleet + 96 + OTHER_USES <= descriptors.max(264));
            assert!(plan.turns >= 4, "{plan:?}");
        }
        assert_eq!(DescriptorPlan::new(1024, 96).turns, 352);
    }

    #[test]
    fn an_own_shortage_is_told_apart_from_a_refused_connection() {
        let of = |code| std::io::Error::from_raw_os_error(code);
        assert!(is_shortage(&of(24)), "EMFILE");
        assert!(!is_shortage(&of(111)), "ECONNREFUSED");
        assert!(!is_shortage(&std::io::Error::other("no code")));
    }
}
