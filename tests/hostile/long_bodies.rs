//! Bodies that take long to read, though they are short on their way or say little.

use std::{io::Write as _, time::Duration};

use harness::{
    fleet::{Processes, credential},
    web::Web,
};
use http::Method;

use crate::{attacks::Attack, figures};

/// The bytes of a body.
const BYTES: usize = 12 << 20;
/// The bytes of a text that fits into the context: no body with more of it arrives whole.
const TEXT_BYTES: usize = 2_000_000;
/// The bytes of a body that is sent compressed.
const DECOMPRESSED_BYTES: usize = 60 << 20;

/// A request whose body takes long to read.
#[derive(Debug, Clone)]
struct LongBody {
    route: &'static str,
    headers: Vec<(&'static str, &'static str)>,
    body: Vec<u8>,
}

/// Sends four such bodies at once, each of another kind, again and again.
pub(crate) async fn send(fleet: &Processes) -> anyhow::Result<Attack> {
    let mut attack = Attack::default();
    let bodies = [compressed()?, hints(), nested(), form()];
    let count = bodies.len();
    for LongBody { route, headers, body } in bodies {
        let (url, key) = (fleet.url(0, route), credential("mallory"));
        let answers = attack.answers.clone();
        attack.tasks.spawn(async move {
            let web = Web::default();
            loop {
                let mut all = vec![("authorization", key.as_str())];
                all.extend_from_slice(&headers);
                answers.count(&web.request(Method::POST, &url, &all, body.clone()).await);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
    }
    let answers = attack.answers.clone();
    figures::until("each body is answered", || answers.sum(|_| true) >= count).await?;
    Ok(attack)
}

/// A list of numbers in `nvext`, compressed to a thousandth.
fn compressed() -> anyhow::Result<LongBody> {
    let body = hints_of(DECOMPRESSED_BYTES);
    let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::best());
    encoder.write_all(&body)?;
    let headers = vec![("content-type", "application/json"), ("content-encoding", "gzip")];
    Ok(LongBody { route: "/generate", headers, body: encoder.finish()? })
}

fn hints() -> LongBody {
    let headers = vec![("content-type", "application/json")];
    LongBody { route: "/generate", headers, body: hints_of(BYTES) }
}

fn hints_of(bytes: usize) -> Vec<u8> {
    let numbers = "0,".repeat(bytes / 2);
    let hints = format!(r#"{{"agent_hints":{{"a":[{numbers}0]}}}}"#);
    format!(r#"{{"x":"data:","text":"x","nvext":{hints}}}"#).into_bytes()
}

/// Brackets without an end, which is seen last.
fn nested() -> LongBody {
    let body = format!(r#"{{"text":"x","tools":{}"#, "[".repeat(TEXT_BYTES)).into_bytes();
    LongBody { route: "/generate", headers: vec![("content-type", "application/json")], body }
}

/// A form of countless fields.
fn form() -> LongBody {
    let field = "--X\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n\r\n";
    let body = field.repeat(BYTES / field.len()) + "--X--\r\n";
    let headers = vec![("content-type", "multipart/form-data; boundary=X")];
    LongBody { route: "/v1/audio/transcriptions", headers, body: body.into_bytes() }
}
