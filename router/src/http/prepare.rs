//! Prepares requests for the routes: CORS, a slash at the end of the path, compressed bodies.
//!
//! A body is decompressed as the route reads it, so the limit of a body's size counts decompressed
//! bytes. `turn::body` bounds how much longer a body becomes.

use std::sync::Arc;

use axum::{body::Body, extract::Request, response::Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, header};
use http_body_util::BodyExt as _;
use service::{
    refusal::{Code, Refusal},
    server::App,
};
use tower::{Layer as _, ServiceExt as _, util::option_layer};
use tower_http::{
    cors::{AllowHeaders, AllowOrigin, CorsLayer, ExposeHeaders},
    decompression::RequestDecompressionLayer,
    normalize_path::NormalizePath,
};

use crate::turn::body::Compression;

#[cfg(feature = "encodings")]
const ENCODINGS: &[&str] = &["gzip", "deflate", "br", "zstd"];
#[cfg(not(feature = "encodings"))]
const ENCODINGS: &[&str] = &["gzip", "deflate"];
const CORS_MAX_AGE: std::time::Duration = std::time::Duration::from_secs(3600);

/// Adds the layers that must see a request before its route is known. In `cors_origins`, `*` stands
/// for all.
pub(super) fn wrap<A: App>(app: A, cors_origins: &[String]) -> impl App + use<A> {
    let cors = (!cors_origins.is_empty()).then(|| cors(cors_origins));
    option_layer(cors).layer(NormalizePath::trim_trailing_slash(app))
}

fn cors(origins: &[String]) -> CorsLayer {
    let origin = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        // The settings were checked when they were loaded.
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(ExposeHeaders::any())
        .max_age(CORS_MAX_AGE)
}

pub(super) async fn decompress<F>(
    mut request: Request,
    serve: impl FnOnce(Request) -> F,
) -> Result<Response, Refusal>
where
    F: Future<Output = Response>,
{
    match Encoding::read(request.headers()) {
        Encoding::None => Ok(serve(request).await),
        Encoding::Known(name) => {
            // The layer below knows each by this name alone.
            request.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static(name));
            let compression = Arc::new(Compression::default());
            request.extensions_mut().insert(Arc::clone(&compression));
            let request = request.map(|body| count_bytes(body, compression));
            let mut serve = Some(serve);
            let inner = tower::service_fn(move |request: http::Request<_>| {
                let serve = serve.take().expect("the service is called once");
                let answer = serve(request.map(Body::new));
                async { Ok::<_, std::convert::Infallible>(answer.await) }
            });
            let service = RequestDecompressionLayer::new().layer(inner);
            let response = service.oneshot(request).await.expect("it can't fail");
            Ok(response.map(Body::new))
        }
        Encoding::Unknown => {
            let known = ENCODINGS.join(", ");
            let message = format!(
                "the body is compressed in a way that the router doesn't know; send it as it is, \
                 or as one of {known}"
            );
            Err(Refusal::new(Code::ContentEncoding, message))
        }
    }
}

fn count_bytes(body: Body, compression: Arc<Compression>) -> Body {
    Body::new(body.map_frame(move |frame| {
        compression.count(frame.data_ref().map_or(0, Bytes::len));
        frame
    }))
}

#[derive(Debug, PartialEq, Eq)]
enum Encoding {
    None,
    Known(&'static str),
    Unknown,
}

impl Encoding {
    /// The header's words have no letter case.
    fn read(headers: &HeaderMap) -> Self {
        let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
        let (first, None) = (encodings.next(), encodings.next()) else { return Self::Unknown };
        let name = first.map_or(&b""[..], HeaderValue::as_bytes).trim_ascii();
        let is = |known: &str| known.as_bytes().eq_ignore_ascii_case(name);
        if name.is_empty() || is("identity") {
            return Self::None;
        }
        // RFC 9110: an old name of the same.
        let name = if is("x-gzip") { Some("gzip") } else { None };
        name.or_else(|| ENCODINGS.iter().copied().find(|known| is(known)))
            .map_or(Self::Unknown, Self::Known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoding_is_known_in_any_letter_case_and_by_its_old_name() {
        let read = |values: &[&'static str]| {
            let named =
                |value: &&'static str| (header::CONTENT_ENCODING, HeaderValue::from_static(value));
            Encoding::read(&HeaderMap::from_iter(values.iter().map(named)))
        };
        for value in ["gzip", "GZIP", "x-gzip", "X-GZip", " gzip "] {
            assert_eq!(read(&[value]), Encoding::Known("gzip"), "{value}");
        }
        assert_eq!(read(&["Zstd"]), Encoding::Known("zstd"));
        for values in [&[][..], &[""], &["Identity"]] {
            assert_eq!(read(values), Encoding::None, "{values:?}");
        }
        for values in [&["compress"][..], &["gzip, gzip"], &["gzip", "gzip"]] {
            assert_eq!(read(values), Encoding::Unknown, "{values:?}");
        }
    }
}
