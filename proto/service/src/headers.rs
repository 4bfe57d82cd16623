//! Removes the headers that a router or an agent must not pass on from a request or an answer.

use contract::envelope::TRUSTED;
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};

/// The header by which a client can choose the engine's DP rank. On the OpenAI routes, it takes
/// precedence over the rank in the body.
const ENGINE_RANK_HEADER: &str = "x-data-parallel-rank";
/// The beginning of the names of headers by which a server lets pages read its answers.
const CORS_PREFIX: &str = "access-control-";
/// The beginning of the names of headers by which a browser says what caused a request.
const BROWSER_PREFIX: &str = "sec-";
/// The beginning of the names of Berth's own headers, such as the code of an agent's refusal.
const OWN_PREFIX: &str = "x-berth-";
/// The beginning of the names of headers that override members of the body inside the engine.
const ENGINE_OVERRIDE_PREFIX: &str = "x-override-";

fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "proxy-connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// Removes what concerns one connection, and what `is_unwanted`. It looks at each header once: a
/// message has fewer headers than there are unwanted names.
fn remove(headers: &mut HeaderMap, is_unwanted: impl Fn(&str) -> bool) {
    let named_in_connection: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let is_removed = |name: &&HeaderName| {
        is_hop_by_hop(name.as_str())
            || is_unwanted(name.as_str())
            || named_in_connection.contains(name)
    };
    let removed: Vec<HeaderName> = headers.keys().filter(is_removed).cloned().collect();
    for name in removed {
        headers.remove(name);
    }
}

/// Returns the value of `Allow` for a route that takes these methods. A route that takes GET takes
/// HEAD, too.
#[must_use]
pub fn allow(methods: &[Method]) -> HeaderValue {
    let head = methods.contains(&Method::GET).then_some(Method::HEAD);
    let names: Vec<&str> = methods.iter().chain(&head).map(Method::as_str).collect();
    HeaderValue::from_str(&names.join(",")).expect("the names of methods are legal")
}

/// An engine must not speak to browsers, nor name its own address. Pages of which origins may read
/// an answer is the router's decision.
pub fn strip_answer(headers: &mut HeaderMap) {
    strip_answer_and(headers, &[CORS_PREFIX]);
}

/// Removes the same of an engine's answer, and what only an agent may say.
pub fn strip_engine_answer(headers: &mut HeaderMap) {
    strip_answer_and(headers, &[CORS_PREFIX, OWN_PREFIX]);
}

fn strip_answer_and(headers: &mut HeaderMap, prefixes: &[&str]) {
    remove(headers, |name| {
        matches!(name, "set-cookie" | "location")
            || prefixes.iter().any(|prefix| name.starts_with(prefix))
    });
}

/// Removes what must not reach the next receiver:
/// - headers that concern the client's connection, or that the next connection sets itself;
/// - headers that an agent trusts, because only a router may send them ([`TRUSTED`]);
/// - headers by which a client could choose the engine's rank or override members of the body;
/// - headers by which browsers speak of their pages. A router checks those, for itself.
pub fn strip_request(headers: &mut HeaderMap) {
    remove(headers, |name| {
        matches!(
            name,
            "content-length"
                | "host"
                | "expect"
                | ENGINE_RANK_HEADER
                | "origin"
                | "referer"
                | "cookie"
        ) || TRUSTED.iter().any(|trusted| trusted == name)
            || name.starts_with(ENGINE_OVERRIDE_PREFIX)
            || name.starts_with(BROWSER_PREFIX)
    });
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn headers(names: &[&'static str]) -> HeaderMap {
        let value = HeaderValue::from_static("1");
        names.iter().map(|&name| (HeaderName::from_static(name), value.clone())).collect()
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn headers_of_one_connection_end_there_and_lengths_stay() {
        let mut all = headers(&["keep-alive", "te", "x-mine", "content-length", "x-other"]);
        all.insert(header::CONNECTION, HeaderValue::from_static("x-mine, close"));
        remove(&mut all, |_| false);
        assert_eq!(names(&all), ["content-length", "x-other"]);
    }

    #[test]
    fn a_route_says_what_it_takes() {
        assert_eq!(allow(&[Method::POST, Method::PUT]), "POST,PUT");
        assert_eq!(allow(&[Method::GET]), "GET,HEAD");
    }

    #[test]
    fn an_engine_speaks_to_no_browser() {
        let mut all = headers(&[
            "access-control-allow-origin",
            "access-control-allow-credentials",
            "set-cookie",
            "location",
            "connection",
            "content-type",
            "retry-after",
        ]);
        strip_answer(&mut all);
        assert_eq!(names(&all), ["content-type", "retry-after"]);
        all.insert("x-berth-refusal", HeaderValue::from_static("not_a_router"));
        strip_engine_answer(&mut all);
        assert_eq!(names(&all), ["content-type", "retry-after"]);
    }

    #[test]
    fn a_client_instructs_neither_agent_nor_engine_by_headers() {
        let mut all = headers(&[
            "x-data-parallel-rank",
            "x-override-priority",
            "host",
            "expect",
            "content-length",
            "authorization",
            "origin",
            "cookie",
            "referer",
            "sec-fetch-site",
            "x-berth-session-id",
        ]);
        for name in TRUSTED {
            all.insert(name, HeaderValue::from_static("1"));
        }
        strip_request(&mut all);
        assert_eq!(names(&all), ["authorization", "x-berth-session-id"]);
    }
}
