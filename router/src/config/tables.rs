//! Defines the tables of the router's settings file, with the default of each key and its reason.
//!
//! [`super::Config`] has one field for each table, under the table's name in the file. A key is
//! named `table.key` in messages. `super` loads and checks the settings.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

use http::HeaderName;

/// The most aliases of models, and the most headers that the settings add. Each costs a look at
/// every request that nothing before it fits.
const NAMES_MAX: usize = 256;

/// Headers that can't name sessions: they are secrets, or a connection's own.
const NO_SESSION_HEADERS: [&str; 6] =
    ["authorization", "connection", "content-length", "cookie", "host", "x-api-key"];

service::settings! {
    /// What the router does with a volatile preamble: text at the beginning of a prompt that the
    /// client changes with each request (see [`crate::turn::preamble`]).
    pub enum PreamblePolicy {
        /// Removes the preamble from the body, because an engine's cache misses everything after
        /// it.
        Strip = "strip",
        /// Leaves the body as it is, for engines or models that need the preamble.
        Keep = "keep",
    }
}

service::settings! {
    /// The addresses of the router's ports.
    pub struct ListenTable {
        /// Address for clients.
        ///
        /// It is loopback, so that nothing is exposed by accident.
        data_addr: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8080));
        /// Address for `/metrics`, `/healthz`, `/readyz`, `/config`.
        ///
        /// Loopback too, and the next port after that for clients.
        admin_addr: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8081));
        /// Origins whose pages may call the router from a browser, such as
        /// `https://chat.example.com`; `*` allows all. Empty, the default, allows none: browsers
        /// protect what only they can reach.
        cors_origins: Vec<String>;
        /// Names of hosts under which a router without keys may be reached, besides `localhost`, IP
        /// addresses and containers' names of their host: those of a proxy that keeps the header
        /// `Host`. Empty, the default, allows no other on loopback, and all elsewhere.
        allowed_hosts: Vec<String>;
    }

    /// The bounds on turns, bodies, sessions and memory.
    pub struct LimitsTable {
        /// Most turns at once; a turn beyond that is answered with 429.
        ///
        /// Each turn has a client's connection, which takes about 40 KiB, and a connection to an
        /// agent. The clients' connections of this many turns take 160 MiB.
        turns_in_flight_max: usize = 4_096;
        /// Largest request body in bytes; a larger body is answered with 413.
        ///
        /// A transcript of 1M tokens is about 5 MiB of JSON, and ten times as much with images.
        body_bytes_max: usize = 64 << 20;
        /// Most bytes of all request bodies in memory; a body beyond that is answered with 429.
        ///
        /// It is enough for eight of the largest bodies, or for a thousand usual ones.
        body_bytes_in_flight_max: usize = 512 << 20;
        /// Most sessions that the router binds to workers. Also the most sessions that it takes
        /// over from each agent's session table.
        ///
        /// A session that this router binds takes about 520 bytes, and one that an agent reports
        /// 440 more (measured with keys of 68 bytes). So this many take about 96 MB; with the
        /// longest keys, 270 MB.
        sessions_max: usize = 100_000;
        /// Most bytes of memory for tokenizing prompts; a prompt beyond that is placed without
        /// knowing which worker has its KV.
        ///
        /// A prompt takes up to 320 times its new text, so this is enough for 1.6 MB of new text at
        /// once. One turn adds a few kilobytes, and a coding agent begins a conversation with 100
        /// KB.
        tokenizer_bytes_max: usize = 512 << 20;
        /// Most bytes of the index of resident blocks; beyond that the oldest blocks are forgotten.
        ///
        /// A block on a worker takes about 9 bytes, so the index holds 60 million blocks. They fill
        /// 480 KV pools of 8 million tokens.
        overlap_bytes_max: usize = 512 << 20;
    }
}

impl LimitsTable {
    /// Lowers the limit on turns so that a quarter of `connections` of clients is left for requests
    /// that are refused, lists and probes. Returns whether the limit was lowered.
    ///
    /// A port that is full can't say whose turns are too many, and refuses any. The pool of turns
    /// refuses those of the client that has most.
    pub fn fit_to_connections(&mut self, connections: usize) -> bool {
        let before = self.turns_in_flight_max;
        self.turns_in_flight_max = before.min((connections - connections / 4).max(1));
        before != self.turns_in_flight_max
    }
}

service::settings! {
    /// The time limits.
    pub struct TimeoutsTable {
        /// Time limit of a turn, from its arrival to the end of its answer, retry included.
        ///
        /// Some reasoning turns take half an hour. Longer turns are stuck.
        turn_ms_max: u64 = 30 * 60 * 1000;
        /// Time limit of connecting to an agent, and of waiting at the start for the agents' first
        /// session tables.
        ///
        /// Inside one data centre a connection takes less than 1 ms. If the first SYN is lost, TCP
        /// would need a second to send another.
        connect_ms_max: u64 = 1_000;
        /// Time limit of the hand-off of a turn's KV from a prefill to a decode engine: from
        /// sending the turn to both until either has answered.
        ///
        /// It is the engine's own limit of waiting for its partner. A long queue of prompts is
        /// within it, so that a shorter time would end turns that only wait.
        bootstrap_ms_max: u64 = 300_000;
        /// A worker whose last load report is older than this gets no new sessions, unless every
        /// worker's report is older.
        ///
        /// Agents report every 500 ms by default, so a stale worker has missed six reports. With a
        /// shorter time, the workers of a busy agent would be stale. With a longer time, the router
        /// would trust a dead agent.
        load_report_age_ms_max: u64 = 3_000;
        /// Time for which the router serves on after it was told to stop, while its health routes
        /// say that it isn't ready, so that balancers send nothing more.
        ///
        /// Balancers ask every one to three seconds, and take some hundred milliseconds to tell
        /// their own processes.
        lame_duck_ms: u64 = 5_000;
        /// Time for running turns to end after that.
        ///
        /// Most turns end within 30 s. Longer turns are cut off when the process ends.
        drain_ms_max: u64 = 30_000;
        /// A stream gets a comment each time that it has waited so long for its first event. 0:
        /// none, for clients that can't read comments, such as SGLang's `bench_serving`.
        ///
        /// Many proxies and clients give up a connection that is silent for 30 s or 60 s.
        waiting_comment_ms: u64 = 10_000;
    }

    /// How turns and sessions are placed.
    pub struct PlacementTable {
        /// A session without a turn for longer than this is placed again, unless its agent
        /// remembers it.
        ///
        /// It is an agent's default, too.
        affinity_idle_ms_max: u64 = 60 * 60 * 1000;
        /// A session moves to another worker if its turn is faster there by at least this time.
        ///
        /// Users don't notice less. A move also has a cost: the KV that it leaves behind occupies
        /// the old worker for minutes.
        rebind_gain_ms_min: u64 = 500;
        /// Bytes of KV that a prefill engine hands to a decode engine in a second.
        ///
        /// An RDMA adapter of 200 Gb/s, less a fifth. With NVLink it is ten times as fast, over TCP
        /// a tenth.
        transfer_bytes_per_s: u64 = 20_000_000_000;
        /// Whether the router removes a preamble that a coding agent changes with each request.
        ///
        /// A preamble makes an engine compute the whole prompt with every turn.
        preamble: PreamblePolicy = PreamblePolicy::Strip;
        /// Further headers by which clients name their sessions on their own. They count before
        /// those that Berth knows.
        session_headers: Vec<String>;
    }
}

impl PlacementTable {
    /// Returns the added headers that name sessions. [`Self::problems`] names those left out.
    pub(crate) fn session_header_names(&self) -> Vec<HeaderName> {
        self.session_headers.iter().filter_map(|name| session_header(name)).collect()
    }

    /// Adds the problems of these settings.
    pub(super) fn check(&self, problems: &mut Vec<String>) {
        if self.transfer_bytes_per_s == 0 {
            problems.push("placement.transfer_bytes_per_s: must be at least 1".to_owned());
        }
        for name in self.session_headers.iter().filter(|name| session_header(name).is_none()) {
            problems.push(format!(
                "placement.session_headers: {name:?} is no header that can name a session"
            ));
        }
        if self.session_headers.len() > NAMES_MAX {
            problems.push(format!("placement.session_headers: more than {NAMES_MAX} are named"));
        }
    }
}

/// Returns the header of this name, if it can name sessions. Those of Berth mean something else.
fn session_header(name: &str) -> Option<HeaderName> {
    let header: HeaderName = name.parse().ok()?;
    let has_meaning =
        NO_SESSION_HEADERS.contains(&header.as_str()) || header.as_str().starts_with("x-berth-");
    (!has_meaning).then_some(header)
}

service::settings! {
    /// The names of models, besides those that the engines serve.
    ///
    /// The engine gets the name that the client wrote, unless one of both has an adapter.
    pub struct ModelsTable {
        /// The model of a turn whose model no engine serves and no alias names. Empty, the default:
        /// such a turn is answered 404.
        default: String;
        /// Other names of models, each with the real one: `"claude-*" = "qwen3-coder"`. A `*`
        /// stands for any characters but a colon. A name that an engine serves stands for itself.
        aliases: BTreeMap<String, String>;
    }
}

impl ModelsTable {
    /// Adds the problems of these settings.
    pub(super) fn check(&self, problems: &mut Vec<String>) {
        if self.aliases.len() > NAMES_MAX {
            problems.push(format!("models.aliases: more than {NAMES_MAX} are named"));
        }
        let is_name = |name: &str| {
            (1..=256).contains(&name.len())
                && !name.starts_with(':')
                && !name.chars().any(char::is_control)
        };
        let is_real_name = |name: &str| is_name(name) && !name.contains('*');
        for (alias, model) in &self.aliases {
            if !is_name(alias) || !is_real_name(model) {
                problems.push(format!(
                    "models.aliases: {alias:?} = {model:?}: write a name or a pattern of 1 to 256 \
                     bytes, and a model's name without *"
                ));
            }
        }
        if !self.default.is_empty() && !is_real_name(&self.default) {
            let default = &self.default;
            problems.push(format!("models.default: {default:?} is no model's name"));
        }
    }
}

service::settings! {
    /// What the router writes of each request.
    ///
    /// Logs of the process itself go to standard error in any case.
    pub struct LogTable {
        /// The file to which the access log adds a line of JSON for each request; `-`: standard
        /// output. Empty, the default: no access log, because the lines say who works when.
        access: PathBuf;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_leave_connections_to_spare_if_there_are_few() {
        let mut limits = LimitsTable::default();
        assert!(!limits.fit_to_connections(8_192), "enough for the default");
        assert_eq!(limits, LimitsTable::default());
        // 1,024 descriptors.
        assert!(limits.fit_to_connections(352));
        assert_eq!(limits.turns_in_flight_max, 264);
        assert!(limits.fit_to_connections(0));
        assert_eq!(limits.turns_in_flight_max, 1);
    }

    #[test]
    fn names_that_cannot_work_are_problems() {
        let headers = |name: &str| {
            let mut problems = vec![];
            let session_headers = vec![name.to_owned()];
            PlacementTable { session_headers, ..Default::default() }.check(&mut problems);
            problems.len()
        };
        assert_eq!((headers("X-Chat"), headers("x_chat")), (0, 0));
        for bad in ["x chat", "", "Authorization", "x-berth-delta"] {
            assert_eq!(headers(bad), 1, "{bad}");
        }
        let models = |alias: &str, model: &str, default: &str| {
            let mut problems = vec![];
            let aliases = BTreeMap::from([(alias.to_owned(), model.to_owned())]);
            ModelsTable { default: default.to_owned(), aliases }.check(&mut problems);
            problems.len()
        };
        assert_eq!(models("claude-*", "m:sql", ""), 0);
        assert_eq!(models("", "m", ""), 1);
        assert_eq!(models("a", "m*", "n*"), 2);
    }
}
