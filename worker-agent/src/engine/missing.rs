//! Names the engine's flags without which Berth can do less, for the log. Pure.
//!
//! The owner task logs them once for each engine process.

use contract::load::Retention;
use serde_json::Value;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingFlag {
    pub flag: &'static str,
    pub without: &'static str,
}

#[must_use]
pub fn missing_flags(server_info: &Value, publishes_kv_events: bool) -> Vec<MissingFlag> {
    let is_on = |key: &str| server_info.get(key).and_then(Value::as_bool).unwrap_or(false);
    let retention_flag = |retention: Retention| retention.engine_flag().unwrap_or_default();
    let flags = [
        (
            is_on("enable_streaming_session"),
            retention_flag(Retention::Pinned),
            "no session can be pinned",
        ),
        (
            is_on("enable_session_radix_cache"),
            retention_flag(Retention::Tagged),
            "no session can be tagged",
        ),
        (
            is_on("enable_cache_report"),
            "--enable-cache-report",
            "answers of the OpenAI routes don't say how many tokens were cached",
        ),
        (
            publishes_kv_events,
            "--kv-events-config",
            "routers guess which blocks are resident, from the prompts that they sent",
        ),
    ];
    let missing = flags.into_iter().filter(|(is_set, ..)| !is_set);
    missing.map(|(_, flag, without)| MissingFlag { flag, without }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_flag_that_is_off_is_named_with_what_it_costs() {
        let all = json!({
            "enable_streaming_session": true, "enable_session_radix_cache": true,
            "enable_cache_report": true,
        });
        assert_eq!(missing_flags(&all, true), []);
        assert_eq!(missing_flags(&json!({}), false).len(), 4);
        for (key, flag) in [
            ("enable_streaming_session", "--enable-streaming-session"),
            ("enable_session_radix_cache", "--enable-session-radix-cache"),
            ("enable_cache_report", "--enable-cache-report"),
        ] {
            let mut info = all.clone();
            info[key] = false.into();
            let missing = missing_flags(&info, true);
            assert_eq!(missing.iter().map(|it| it.flag).collect::<Vec<_>>(), [flag]);
        }
        assert_eq!(missing_flags(&all, false)[0].flag, "--kv-events-config");
    }
}
