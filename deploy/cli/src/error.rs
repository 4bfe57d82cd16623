//! Defines why a command fails, and the exit status that tells programs so.

use std::{fmt::Write as _, io};

/// The statuses above 1 are the numbers of `sysexits.h`.
pub mod exit {
    pub const WELL: u8 = 0;
    /// A fault was found, turns are left, or a session is unknown.
    pub const NOT_WELL: u8 = 1;
    pub const USAGE: u8 = 64;
    pub const FILE: u8 = 66;
    pub const UNREACHABLE: u8 = 69;
    /// An answer can't be understood: the versions differ.
    pub const ANSWER: u8 = 70;
    pub const OUTPUT: u8 = 74;
    pub const REFUSED: u8 = 77;
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text says what to give.
    #[error("{0}")]
    Usage(String),
    #[error(
        "berth-serve can't be started: {source}; install it beside berth, as the wheel \
         berth-sglang does"
    )]
    Serve { source: io::Error },
    #[error("can't use a file that an argument names")]
    File(#[from] service::reload::Error),
    #[error("can't read the key from {path}: {why}")]
    KeyFile {
        /// The file of the key.
        path: String,
        why: String,
    },
    #[error(
        "no SGLang engine answers on this host; asked were {asked}: start the engine, or name it \
         with --engine"
    )]
    NoEngine {
        /// The ports that were asked, and what answered there.
        asked: String,
    },
    #[error("{url} is no SGLang engine: {why}; give the engine's own port with --engine")]
    NotAnEngine {
        /// The URL that was called.
        url: String,
        why: String,
    },
    #[error("{path} exists; give --force to replace it, or another folder with --out")]
    FileExists {
        /// The file that would be written.
        path: String,
    },
    #[error("can't write {path}; give another folder with --out")]
    FileWrite {
        path: String,
        /// Why the file can't be written.
        #[source]
        error: io::Error,
    },
    #[error("no {who} answers at {url}: {why}; {hint}")]
    Unreachable {
        /// "router", "agent" or "engine".
        who: &'static str,
        url: String,
        /// What the connection failed with.
        why: String,
        hint: &'static str,
    },
    #[error("the {who} refused: {why}")]
    Refused {
        /// "router", "agent" or "engine".
        who: &'static str,
        /// The words of the one who refused.
        why: String,
    },
    #[error("the {who} can't do this: {why}")]
    Failed {
        /// "router" or "agent".
        who: &'static str,
        /// The words of the one who was asked.
        why: String,
    },
    #[error(
        "the router at {url}, version {version}, has no {route}; this berth is version {own}: \
             install the same version of both"
    )]
    RouteAbsent {
        url: String,
        /// The version that the router says it has.
        version: String,
        route: String,
        /// This program's version.
        own: &'static str,
    },
    /// A port of Berth that isn't the one that was meant.
    #[error("an admin port answers at {url}; give the router's data port with --router")]
    AdminPort {
        /// The URL that was called.
        url: String,
    },
    #[error("the answer of {url} can't be understood: {why}; install the same version of both")]
    Answer {
        /// The URL that was called.
        url: String,
        why: String,
    },
    #[error("can't write the output")]
    Output(#[from] io::Error),
}

impl Error {
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Usage(_) => exit::USAGE,
            Self::File(_) | Self::KeyFile { .. } | Self::FileExists { .. } | Self::Serve { .. } => {
                exit::FILE
            }
            Self::Unreachable { .. } | Self::NoEngine { .. } => exit::UNREACHABLE,
            Self::Refused { .. } => exit::REFUSED,
            Self::Failed { .. } => exit::NOT_WELL,
            Self::RouteAbsent { .. }
            | Self::AdminPort { .. }
            | Self::Answer { .. }
            | Self::NotAnEngine { .. } => exit::ANSWER,
            Self::Output(_) | Self::FileWrite { .. } => exit::OUTPUT,
        }
    }

    /// `berth workers | head -1` closes its pipe.
    #[must_use]
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

#[must_use]
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some libraries repeat their cause in their own text.
        if !text.ends_with(&cause_text) {
            let _ = write!(text, ": {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_reader_that_is_gone_is_no_fault() {
        let gone = Error::Output(io::ErrorKind::BrokenPipe.into());
        let full = Error::Output(io::ErrorKind::StorageFull.into());
        assert!(gone.is_broken_pipe() && !full.is_broken_pipe());
        assert_eq!(full.exit_status(), 74);
        assert!(!Error::Usage("x".into()).is_broken_pipe());
    }

    #[test]
    fn causes_are_in_the_line_once() {
        let inner = io::Error::other("the disk is full");
        assert_eq!(chain(&Error::Output(inner)), "can't write the output: the disk is full");
    }
}
