//! Reads the flags of a body by which the agent decides.
//!
//! Refuses members that reach into the engine.

use proto::{
    answers::runs_in_background,
    body::Object,
    flags::{NotAFlag, read_flag},
    route::Kind,
};
use service::refusal::{Code, Refusal};

/// Members of SGLang's own API by which its processes speak to each other: addresses to which one
/// of them connects or answers, advice to its cache, and names of what it follows. No client may
/// choose them. The other APIs don't have them.
const INTERNAL_KEYS: [&str; 5] =
    ["encoder_urls", "http_worker_ipc", "http_worker_ipcs", "kv_hints", "conversation_id"];

/// Returns whether the body asks for a stream.
///
/// # Errors
/// A refusal with status 400, if a flag can't be read, the turn would run in the background, or a
/// member reaches into the engine.
pub(super) fn read_wants_stream(kind: Kind, object: &Object<'_>) -> Result<bool, Refusal> {
    let is_internal =
        |key: &str| matches!(kind, Kind::Generate | Kind::Encode) && INTERNAL_KEYS.contains(&key);
    let mut members = object.members().iter();
    let internal = members.find(|it| is_internal(&it.key) && it.value.get() != "null");
    if let Some(member) = internal {
        let message = format!(
            "{} is for SGLang's own processes, and would reach into the engine; leave it out",
            member.key
        );
        return Err(Refusal::new(Code::InvalidField, message));
    }
    let unreadable = |key: &'static str| {
        move |error: NotAFlag| {
            Refusal::new(Code::InvalidField, format!("{key}: {error}; send true or false"))
        }
    };
    if runs_in_background(kind, object).map_err(unreadable("background"))? {
        return Err(Refusal::new(
            Code::BackgroundUnsupported,
            "a turn in the background would run on after its answer, and its result be lost with \
             the engine: leave `background` out, and read the answer",
        ));
    }
    read_flag(object.get("stream")).map_err(unreadable("stream"))
}
