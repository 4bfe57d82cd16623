//! The files of the dashboard's page, which are a part of the program.

use axum::{
    extract::Path,
    response::{IntoResponse as _, Response},
};
use http::{HeaderName, header};
use service::refusal::Refusal;

use crate::http::errors;

/// The page loads its own files alone, runs no text as a script, and no other page can show it.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const PAGE: &str = include_str!("page/index.html");
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

const FILES: [(&str, &str, &str); 11] = [
    ("style.css", STYLE, include_str!("page/style.css")),
    ("app.js", SCRIPT, include_str!("page/app.js")),
    ("client.js", SCRIPT, include_str!("page/client.js")),
    ("confirm.js", SCRIPT, include_str!("page/confirm.js")),
    ("dom.js", SCRIPT, include_str!("page/dom.js")),
    ("figures.js", SCRIPT, include_str!("page/figures.js")),
    ("workers.js", SCRIPT, include_str!("page/workers.js")),
    ("sessions.js", SCRIPT, include_str!("page/sessions.js")),
    ("life.js", SCRIPT, include_str!("page/life.js")),
    ("placements.js", SCRIPT, include_str!("page/placements.js")),
    ("charts.js", SCRIPT, include_str!("page/charts.js")),
];

pub(super) async fn show_page() -> Response {
    answer("text/html; charset=utf-8", PAGE)
}

pub(super) async fn show_file(Path(name): Path<String>) -> Response {
    match FILES.iter().find(|(known, ..)| *known == name) {
        Some((_, content_type, text)) => answer(content_type, text),
        None => Refusal::into_response(errors::route_unknown_refusal()),
    }
}

fn answer(content_type: &'static str, text: &'static str) -> Response {
    let headers: [(HeaderName, &str); 6] = [
        (header::CONTENT_TYPE, content_type),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Another version of the router has other files.
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    (headers, text).into_response()
}
