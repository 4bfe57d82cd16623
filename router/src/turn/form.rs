//! Reads the model that a request names in a form, such as one with a sound to transcribe. Pure.

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use http::{HeaderMap, header};

use super::request::Error;

const MODEL_FIELD: &str = "model";
const MODEL_BYTES_MAX: u64 = 1024;
/// Forms of the OpenAI API have about ten fields.
const FIELDS_MAX: usize = 256;

/// `None` also for a form that can't be read: the engine says what is wrong with it. A form with
/// too many fields is refused, as an engine would take long to read it.
pub(super) fn read_model(headers: &HeaderMap, body: &Bytes) -> Result<Option<String>, Error> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let boundary = content_type.and_then(|value| multer::parse_boundary(value).ok());
    let Some(boundary) = boundary else { return Ok(None) };
    let limit = multer::SizeLimit::new().for_field(MODEL_FIELD, MODEL_BYTES_MAX);
    let constraints = multer::Constraints::new().size_limit(limit);
    let mut form = multer::Multipart::with_reader_with_constraints(&**body, boundary, constraints);
    let find = async {
        for _ in 0..FIELDS_MAX {
            let Ok(Some(field)) = form.next_field().await else { return Ok(None) };
            if field.name() == Some(MODEL_FIELD) {
                return Ok(field.text().await.ok());
            }
        }
        Err(Error::Field { field: "the body", allowed: "a form of at most 256 fields" })
    };
    // The future waits for nothing, as the whole form is there.
    match pin!(find).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(model) => model,
        Poll::Pending => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(content_type: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::CONTENT_TYPE, content_type.parse().unwrap())])
    }

    #[test]
    fn the_model_is_found_behind_the_sound() {
        let body = "--X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
                    Content-Type: audio/wav\r\n\r\nRIFF--Y\r\n--X\r\n\
                    Content-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n--X--\r\n";
        let form = headers("multipart/form-data; boundary=X");
        let model = read_model(&form, &Bytes::from_static(body.as_bytes())).unwrap();
        assert_eq!(model.as_deref(), Some("whisper-1"));
        let cut = Bytes::from_static(&body.as_bytes()[..90]);
        assert_eq!(read_model(&form, &cut).unwrap(), None, "a form without an end");
        assert_eq!(read_model(&headers("application/json"), &cut).unwrap(), None);
    }

    #[test]
    fn a_form_of_countless_fields_is_refused() {
        let field = "--X\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n\r\n";
        let model = "--X\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--X--\r\n";
        let form = headers("multipart/form-data; boundary=X");
        let read = |fields: usize| read_model(&form, &(field.repeat(fields) + model).into());
        assert_eq!(read(FIELDS_MAX - 1).unwrap().as_deref(), Some("m"));
        assert!(read(FIELDS_MAX).is_err());
    }
}
