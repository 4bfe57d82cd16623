//! Defines the tables of the agent's settings file, with the default of each key and its reason.
//!
//! [`super::Config`] has one field for each table, under the table's name in the file. A key is
//! named `table.key` in messages. `super` loads and checks the settings.

use std::{net::SocketAddr, path::PathBuf};

use http::Uri;

service::settings! {
    /// The engine beside the agent, and how the agent calls and watches it.
    pub struct EngineTable {
        /// The engine's base URL.
        ///
        /// The port that SGLang takes by default.
        url: String = "http://127.0.0.1:30000".into();
        /// The time limit for the engine's answer to a control call.
        ///
        /// `/server_info` asks the scheduler, which may be in a long prefill step.
        call_ms_max: u64 = 10_000;
        /// The interval at which the engine's `/v1/loads` is read.
        ///
        /// The engine answers from a snapshot in under a millisecond.
        load_interval_ms: u64 = 200;
        /// The engine counts as stuck if turns wait in it and it runs nothing for this long.
        ///
        /// This is longer than any prefill step.
        stall_ms_max: u64 = 10_000;
        /// The engine counts as silent if it has said nothing for this long, beyond the time that
        /// its prompts take. Turns are then refused until it speaks again.
        ///
        /// A scheduler that works takes a snapshot with each prefill step and every 15 decode
        /// steps, so several a second. It is as silent during a pause of its process.
        silent_ms_max: u64 = 10_000;
        /// The size of the model's vocabulary. 0: the agent reads it from the model's config.json.
        vocabulary: u32 = 0;
        /// The time the engine takes for one stage of staged prefill. A long prompt is computed in
        /// stages before its turn, so that a short prompt waits for at most one stage. With 0,
        /// there are no stages, and every prompt is sent to the engine at once.
        ///
        /// A user hardly notices a wait of this length. In the simulation `berth-sim`, each stage
        /// costs 10 ms more than its tokens. There, stages of 0.4 s are worse because of that cost,
        /// and stages of 0.8 s are worse because short prompts wait longer.
        prefill_stage_ms: u64 = 600;
        /// The host at which decode engines reach a prefill engine's bootstrap server. Empty, the
        /// default: the host at which routers reach this agent.
        ///
        /// The engine is on the agent's host, which most fleets reach under one address.
        bootstrap_host: String;
        /// The shortest time between two requests to the shim to publish the engine's radix tree
        /// again. The agent requests that after it has missed KV events.
        ///
        /// With one token per page, publishing a tree of a million tokens takes 1.4 s of the
        /// engine's scheduler, which is 5 % of this interval. With 16 tokens per page it takes 0.1
        /// s.
        republish_interval_ms: u64 = 30_000;
        /// How fast the engine loads KV from the host's memory to the device, until the shim has
        /// measured it. Only for engines with a hierarchical cache.
        ///
        /// PCIe 4.0 with 16 lanes has 32 GB/s, of which copies of KV reach about 20.
        host_load_bytes_per_s: u64 = 20_000_000_000;
    }
}

impl EngineTable {
    /// Returns what is wrong with the engine's URL; `None` if nothing is.
    pub(super) fn url_fault(&self) -> Option<&'static str> {
        let Ok(uri) = self.url.parse::<Uri>() else { return Some("it is no URL") };
        match (uri.scheme_str(), uri.authority()) {
            // The agent is beside its engine, and tells routers of TLS by its own certificates.
            (Some("https"), _) => Some(
                "the agent calls its engine without TLS, on the same host; start the engine \
                 without --ssl-certfile, and set tls.cert of the agent for its own ports",
            ),
            (Some("http"), Some(_)) if uri.path() != "/" || uri.query().is_some() => Some(
                "it has a path, and engines serve their routes without one, also with \
                 --fastapi-root-path; name the engine's own port, not that of a proxy",
            ),
            (Some("http"), Some(_)) => None,
            _ => Some("it must begin with http:// and a host"),
        }
    }
}

service::settings! {
    /// The addresses of the agent's ports.
    pub struct ListenTable {
        /// The address for turns (HTTP).
        ///
        /// Loopback, so that nothing is exposed by accident. So are the other ports.
        data_addr: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 31000));
        /// The address for routers (gRPC).
        ///
        /// The next port after that for turns.
        control_addr: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 31001));
        /// The address for metrics and health (HTTP).
        ///
        /// The next port after that for routers.
        admin_addr: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 31002));
    }

    /// How long sessions are kept, and how much of the engine pinned sessions may hold.
    pub struct SessionsTable {
        /// A session without a turn for this long is closed.
        ///
        /// 99.5 % of a coding agent's turns follow within an hour of the previous turn.
        idle_ms_max: u64 = 3_600_000;
        /// The longest idle limit that a client may ask for its session. At least `idle_ms_max`.
        ///
        /// A client that a person left over night goes on in the morning. A forgotten session is
        /// gone a day later.
        idle_ms_cap: u64 = 86_400_000;
        /// After this idle time, a pinned session's KV is freed if other sessions need the room.
        ///
        /// 87 % of a coding agent's turns follow the previous turn within this time.
        demote_idle_ms: u64 = 120_000;
        /// Whether to pin sessions automatically. A session is pinned if its next turns usually
        /// come soon, and if the shim can trim the full histories that its client sends. The
        /// session's KV may be freed after `demote_idle_ms` of idle time.
        ///
        /// A session's KV in the radix tree may be evicted before its next turn, and pinned KV
        /// isn't. The cost is low, because a pinned session yields its room after idle time.
        auto_pin: bool = true;
        /// The share of each rank's pool that pinned sessions may hold, from 0 to 1.
        ///
        /// The rest of the pool is for running turns.
        pin_budget_ratio: f64 = 0.7;
        /// The share of each rank's request rows that pinned sessions may hold, from 0 to 1. The
        /// other rows are for turns outside pinned sessions.
        ///
        /// A pinned session holds its row between turns too. With the other half, as many turns
        /// without a pin run at once, however many sessions clients pin.
        pin_rows_ratio: f64 = 0.5;
        /// The number of request rows of each rank that pinned sessions never take.
        ///
        /// If pinned sessions hold all rows, the engine can never run a request again. One free row
        /// is enough to prevent that.
        rows_reserve: u32 = 1;
        /// The maximum number of turns of one session that wait behind its running turn. Further
        /// turns get status 409.
        ///
        /// A client sends its next turn after the answer. A turn that comes earlier is usually a
        /// mistake, of which the client had better know.
        turns_queued_per_session_max: u32 = 0;
    }

    /// The bounds on turns and their bodies.
    pub struct LimitsTable {
        /// The maximum number of turns inside the engine, per rank. Further turns wait.
        ///
        /// This is more than any engine's useful batch size, and less than its number of rows.
        turns_in_flight_max: u32 = 512;
        /// The maximum number of turns that wait for room in the engine. Further turns get status
        /// 429.
        ///
        /// This is ten seconds of work for an engine that ends 100 turns per second.
        turns_queued_max: usize = 1024;
        /// The share of the engine's places for turns that one client may use while another client
        /// is active, from 0 to 1. A client that is alone may use all.
        ///
        /// Running turns can't be taken back. With half, as many places as one client's turns fill
        /// are left to all others.
        principal_turns_ratio: f64 = 0.5;
        /// The maximum number of sessions, of all clients together. Further opens get status 429.
        ///
        /// A session takes less than 1 KiB, so they fit into the agent's 40 MiB.
        sessions_max: usize = 16_384;
        /// The maximum number of sessions of one client. Further opens get status 429.
        ///
        /// With half of the table, no client can fill it alone.
        principal_sessions_max: usize = 8192;
        /// The longest time that a turn waits for room. Then the turn gets status 429.
        ///
        /// Clients of coding agents give up after a minute or two.
        queue_wait_ms_max: u64 = 60_000;
        /// The time limit of a turn, after which it is aborted.
        ///
        /// The longest generations of coding agents take tens of minutes.
        turn_ms_max: u64 = 3_600_000;
        /// The longest request body, in bytes.
        ///
        /// A transcript of 1M tokens is about 5 MiB of JSON, and ten times as much with images.
        body_bytes_max: usize = 64 << 20;
        /// The maximum bytes of all request bodies in memory together.
        ///
        /// Eight of the longest bodies, or a thousand usual ones.
        body_bytes_in_flight_max: usize = 512 << 20;
    }
}

impl LimitsTable {
    /// Lowers the limits on turns so that they fit into `connections` of routers, with some to
    /// spare. Returns whether a limit was lowered.
    ///
    /// A router that finds no connection can't say whose turns are too many, and refuses any. With
    /// connections to spare, the queue refuses the turns of the principal that has most.
    pub fn fit_to_connections(&mut self, connections: usize) -> bool {
        let before = (self.turns_in_flight_max, self.turns_queued_max);
        let in_flight_max = u32::try_from(connections / 2).unwrap_or(u32::MAX).max(1);
        self.turns_in_flight_max = before.0.min(in_flight_max);
        self.turns_queued_max = before.1.min((connections / 4).max(1));
        before != (self.turns_in_flight_max, self.turns_queued_max)
    }
}

service::settings! {
    /// The load reports to routers.
    pub struct ReportsTable {
        /// The longest time between two load reports. Routers use the reports as heartbeats.
        ///
        /// Routers consider a worker stale after 3 s, which is six missed reports.
        interval_ms: u64 = 500;
    }

    /// The end of the agent.
    pub struct ShutdownTable {
        /// How long running turns may continue at shutdown.
        ///
        /// Most turns end within this time. Longer turns are aborted.
        drain_ms_max: u64 = 30_000;
        /// Whether sessions stay open at the engine at SIGTERM, for the next agent process to take
        /// up. SIGINT closes them in any case.
        ///
        /// Without a supervisor that starts the next agent, the sessions would stay open. The
        /// systemd unit sets `--handover`.
        handover: bool = false;
    }

    /// The audits of the KV pool's pages.
    pub struct AuditTable {
        /// The interval at which every page of the KV pool is audited. 0: only on demand.
        ///
        /// An audit takes well under a millisecond of the scheduler's thread.
        interval_s: u64 = 10;
    }

    /// The agent's files and sockets.
    pub struct FilesTable {
        /// The folder for the journal (the file that lists the open sessions) and for the shim's
        /// socket. It must be the same for every agent of an engine, and belong to the agent's
        /// user. Empty: `berth` in `XDG_RUNTIME_DIR`, else `/run/berth`, if they belong to the
        /// user; else `berth` in `XDG_STATE_HOME` or `~/.local/state`.
        state_dir: PathBuf;
        /// The path of the socket on which the agent listens for the engine's shim. Empty:
        /// `engine-<port>.sock` in `state_dir`. The shim finds that path without configuration if
        /// `state_dir` is empty too.
        shim_socket: PathBuf;
    }

    /// The GPUs that the agent reads.
    pub struct GpuTable {
        /// The engine's GPUs or MIG slices, by UUID, NVML index or PCI address. Empty: the devices
        /// that the engine's processes run on, if the shim reports those processes.
        devices: Vec<String>;
        /// The path of the NVML library. Empty: the loader finds the driver's own library.
        nvml_library: PathBuf;
        /// Whether to read the GPUs' performance counters too.
        ///
        /// Most fleets run DCGM, which reads these counters too. A second reader can disturb the
        /// readings of the first.
        gpm: bool = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_leave_connections_to_spare_if_there_are_few() {
        let mut limits = LimitsTable::default();
        assert!(!limits.fit_to_connections(8_192), "enough for the defaults");
        assert_eq!(limits, LimitsTable::default());
        // 1,024 descriptors.
        assert!(limits.fit_to_connections(352));
        assert_eq!((limits.turns_in_flight_max, limits.turns_queued_max), (176, 88));
        assert!(limits.fit_to_connections(0));
        assert_eq!((limits.turns_in_flight_max, limits.turns_queued_max), (1, 1));
    }
}
