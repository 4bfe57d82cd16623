//! Reads the model that a request names in a form, such as one with a sound to transcribe. Pure.

use bytes::Bytes;
use http::{HeaderMap, header};

/// The field of a form that names the model.
const MODEL_FIELD: &str = "model";
/// Longest name of a model that is read.
const MODEL_BYTES_MAX: u64 = 1024;

/// Returns the model that a form names. `None` if it names none, or isn't a form that can be read:
/// the engine says what is wrong with it.
pub(super) async fn read_model(headers: &HeaderMap, body: &Bytes) -> Option<String> {
    let boundary =
        multer::parse_boundary(headers.get(header::CONTENT_TYPE)?.to_str().ok()?).ok()?;
    let limit = multer::SizeLimit::new().for_field(MODEL_FIELD, MODEL_BYTES_MAX);
    let constraints = multer::Constraints::new().size_limit(limit);
    let mut form = multer::Multipart::with_reader_with_constraints(&**body, boundary, constraints);
    while let Some(field) = form.next_field().await.ok()? {
        if field.name() == Some(MODEL_FIELD) {
            return field.text().await.ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(content_type: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::CONTENT_TYPE, content_type.parse().unwrap())])
    }

    #[tokio::test]
    async fn the_model_is_found_behind_the_sound() {
        let body = "--X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
                    Content-Type: audio/wav\r\n\r\nRIFF--Y\r\n--X\r\n\
                    Content-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n--X--\r\n";
        let form = headers("multipart/form-data; boundary=X");
        let model = read_model(&form, &Bytes::from_static(body.as_bytes())).await;
        assert_eq!(model.as_deref(), Some("whisper-1"));
        let cut = Bytes::from_static(&body.as_bytes()[..90]);
        assert_eq!(read_model(&form, &cut).await, None, "a form without an end");
        assert_eq!(read_model(&headers("application/json"), &cut).await, None);
    }
}
