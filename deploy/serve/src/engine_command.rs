//! Makes the command of one engine: adds the flags that Berth profits from. Pure.

use cli::flags::{self, EngineFlag};

const KEY_FLAGS: [&str; 2] = ["--api-key", "--admin-api-key"];
/// SGLang's default.
pub const DEFAULT_PORT: u16 = 30_000;

/// What one engine gets of its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// For an engine whose command names no port.
    pub free_port: u16,
    /// The first ports of its KV events, and to ask for them again; the next ones are for its
    /// further DP ranks.
    pub kv_events_ports: (u16, u16),
    /// Empty: all that the engine finds.
    pub gpus: Vec<u16>,
}

/// A command as it is started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineCommand {
    pub words: Vec<String>,
    /// Where the engine listens, for a URL.
    pub host: String,
    pub environment: Vec<(&'static str, String)>,
    pub port: u16,
    /// The flags that the user didn't give, with what they are for; without their values.
    pub added: Vec<EngineFlag>,
}

impl EngineCommand {
    /// Without keys: a log may be read by others.
    #[must_use]
    pub fn shown(&self) -> String {
        let (mut shown, mut is_key) = (vec![], false);
        for word in &self.words {
            let (name, value) = word.split_once('=').unwrap_or((word, ""));
            shown.push(match (is_key, KEY_FLAGS.contains(&name) && !value.is_empty()) {
                (true, _) => "***".to_owned(),
                (false, true) => format!("{name}=***"),
                (false, false) => word.clone(),
            });
            is_key = KEY_FLAGS.contains(&word.as_str());
        }
        shown.join(" ")
    }
}

/// The user's words, whose flags are written as `--flag value` or `--flag=value`.
#[derive(Debug, Clone, Copy)]
pub struct GivenCommand<'a>(pub &'a [String]);

impl GivenCommand<'_> {
    fn has(&self, flag: &str) -> bool {
        self.0.iter().any(|word| word.split('=').next() == Some(flag))
    }

    /// The last one counts, as in the engine.
    fn value(&self, flags: &[&str]) -> Option<&str> {
        let mut value = None;
        for (word, next) in self.0.iter().zip(self.0.iter().skip(1).map(Some).chain([None])) {
            value = match word.split_once('=') {
                Some((name, text)) if flags.contains(&name) => Some(text),
                None if flags.contains(&word.as_str()) => next.map(String::as_str),
                _ => value,
            };
        }
        value
    }

    /// `None` if the command names none.
    ///
    /// # Errors
    /// The text says what to give.
    pub fn port(&self) -> Result<Option<u16>, String> {
        let Some(text) = self.value(&["--port"]) else { return Ok(None) };
        let port = text.parse().ok().filter(|port| *port > 0);
        port.map(Some).ok_or_else(|| format!("--port {text} of the engine is no port"))
    }

    /// Where the agent finds the engine: on an engine of all addresses, at loopback.
    #[must_use]
    pub fn host(&self) -> String {
        match self.value(&["--host"]) {
            None | Some("0.0.0.0" | "::" | "*" | "localhost") => "127.0.0.1".to_owned(),
            Some(host) if host.contains(':') => format!("[{}]", host.trim_matches(['[', ']'])),
            Some(host) => host.to_owned(),
        }
    }

    /// Whether the engine demands a key.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.value(&["--api-key"]).is_some()
    }

    /// At least 1. Each has ports of its own for KV events.
    #[must_use]
    pub fn dp_ranks(&self) -> u16 {
        let text = self.value(&["--dp", "--dp-size", "--data-parallel-size"]);
        text.and_then(|text| text.parse().ok()).unwrap_or(1).max(1)
    }

    /// The engine is half of a prefill/decode pair, and has no use for the flags of sessions.
    fn is_half(&self) -> bool {
        self.value(&["--disaggregation-mode"]).is_some_and(|mode| mode != "null")
    }

    /// # Errors
    /// The text says what to give.
    pub fn complete(&self, place: &Place, adds_flags: bool) -> Result<EngineCommand, String> {
        let given_port = self.port()?;
        let mut command = EngineCommand {
            words: self.0.to_vec(),
            host: self.host(),
            environment: vec![],
            port: given_port.unwrap_or(DEFAULT_PORT),
            added: vec![],
        };
        if !place.gpus.is_empty() {
            let gpus: Vec<String> = place.gpus.iter().map(u16::to_string).collect();
            command.environment = vec![
                // The agent numbers GPUs in this order, as NVML does.
                ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()),
                ("CUDA_VISIBLE_DEVICES", gpus.join(",")),
            ];
        }
        if !adds_flags {
            return Ok(command);
        }
        command.port = given_port.unwrap_or(place.free_port);
        if given_port.is_none() {
            command.words.extend(["--port".to_owned(), command.port.to_string()]);
        }
        let of_gpus = [
            "--tp",
            "--tp-size",
            "--tensor-parallel-size",
            "--dp",
            "--dp-size",
            "--data-parallel-size",
            "--pp",
            "--pp-size",
            "--pipeline-parallel-size",
        ];
        if place.gpus.len() > 1 && self.value(&of_gpus).is_none() {
            command.words.extend(["--tp-size".to_owned(), place.gpus.len().to_string()]);
        }
        let of_sessions = [flags::STREAMING_SESSION, flags::SESSION_RADIX_CACHE];
        let of_sessions = of_sessions.into_iter().filter(|_| !self.is_half());
        for flag in of_sessions.chain([flags::CACHE_REPORT, flags::KV_EVENTS]) {
            if self.has(flag.name) {
                continue;
            }
            command.words.push(flag.name.to_owned());
            if flag == flags::KV_EVENTS {
                let (port, replay_port) = place.kv_events_ports;
                command.words.push(flags::kv_events_config(port, replay_port));
            }
            command.added.push(flag);
        }
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn place() -> Place {
        Place { free_port: 30_010, kv_events_ports: (5557, 5558), gpus: vec![] }
    }

    fn complete(text: &str) -> EngineCommand {
        GivenCommand(&words(text)).complete(&place(), true).unwrap()
    }

    #[test]
    fn a_bare_command_gets_a_port_and_all_flags() {
        let command = complete("python3 -m sglang.launch_server --model-path m");
        assert_eq!(command.port, 30_010);
        assert_eq!(command.added.len(), 4);
        let text = command.words.join(" ");
        assert!(text.starts_with("python3 -m sglang.launch_server --model-path m --port 30010 "));
        for part in ["--enable-streaming-session ", "tcp://127.0.0.1:5557", "127.0.0.1:5558"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn what_the_user_has_set_stays() {
        let given = "e --port=31000 --enable-cache-report --kv-events-config {} \
                     --enable-streaming-session --enable-session-radix-cache";
        let command = complete(given);
        assert_eq!((command.words, command.port), (words(given), 31_000));
        let command = complete("e --port 1 --port 2");
        assert_eq!(command.port, 2, "the engine takes the last one");
        assert!(GivenCommand(&words("e --port no")).complete(&place(), true).is_err());
    }

    #[test]
    fn keys_are_not_shown_and_the_engine_is_found_where_it_listens() {
        let shown = complete("e --api-key secret --admin-api-key=secret --host 10.0.0.5").shown();
        assert!(!shown.contains("secret") && shown.contains("--api-key *** --admin-api-key=***"));
        assert_eq!(complete("e --host 10.0.0.5").host, "10.0.0.5");
        assert_eq!(complete("e --host ::1").host, "[::1]");
        for host in ["0.0.0.0", "::", "localhost"] {
            assert_eq!(complete(&format!("e --host {host}")).host, "127.0.0.1");
        }
    }

    #[test]
    fn a_half_of_a_pair_gets_no_flags_of_sessions() {
        let added = complete("e --disaggregation-mode decode").added;
        assert_eq!(added, [flags::CACHE_REPORT, flags::KV_EVENTS]);
        assert_eq!(complete("e --disaggregation-mode null").added.len(), 4);
    }

    #[test]
    fn a_command_that_is_left_alone_has_its_own_port_or_the_engine_s_default() {
        let leave_alone = |text: &str| GivenCommand(&words(text)).complete(&place(), false);
        let command = leave_alone("e --x").unwrap();
        assert_eq!((command.words, command.port), (words("e --x"), DEFAULT_PORT));
        assert_eq!(leave_alone("e --port 5").unwrap().port, 5);
    }

    #[test]
    fn an_engine_of_several_gpus_sees_those_and_runs_on_all() {
        let place = Place { gpus: vec![2, 3], ..place() };
        let command = GivenCommand(&words("e")).complete(&place, true).unwrap();
        assert!(command.environment.contains(&("CUDA_VISIBLE_DEVICES", "2,3".to_owned())));
        assert!(command.words.join(" ").contains("--tp-size 2"));
        let command = GivenCommand(&words("e --tp 1")).complete(&place, true).unwrap();
        assert!(!command.words.join(" ").contains("--tp-size"));
        assert_eq!(GivenCommand(&words("e --dp 4")).dp_ranks(), 4);
    }
}
