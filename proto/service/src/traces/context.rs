//! Reads and writes W3C trace context: the headers `traceparent` and `tracestate`. Pure.

use std::num::{NonZeroU64, NonZeroU128};

use http::{HeaderMap, HeaderName, HeaderValue};

/// Names the sender's span, and says whether its trace is exported.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// What other tracing systems add. It is passed on as it is.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The standard wants a state of this length passed on. A longer one is too, but not exported.
const STATE_BYTES_MAX: usize = 512;

const SAMPLED: u128 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceId(pub NonZeroU128);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanId(pub NonZeroU64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    pub trace_id: TraceId,
    pub span_id: SpanId,
    pub is_sampled: bool,
}

impl TraceId {
    /// Processes with the same ratio choose the same traces.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact in an f64")]
    #[must_use]
    pub fn is_in_sample(self, ratio: f64) -> bool {
        // The last bits of an id are random in every system.
        let bits = self.0.get() & ((1 << 53) - 1);
        (bits as f64) < ratio * (1_u64 << 53) as f64
    }
}

impl TraceParent {
    /// Reads the header. Returns `None` if it is missing, malformed or there twice.
    #[must_use]
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next()?;
        if values.next().is_some() {
            return None;
        }
        Self::parse(value.to_str().ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let version = parse_hex(parts.next()?, 2)?;
        let trace_id = parse_hex(parts.next()?, 32)?;
        let span_id = parse_hex(parts.next()?, 16)?;
        let flags = parse_hex(parts.next()?, 2)?;
        // Later versions may add parts, and keep these four.
        let has_more = parts.next().is_some();
        if version == 0xff || (version == 0 && has_more) {
            return None;
        }
        Some(Self {
            trace_id: TraceId(NonZeroU128::new(trace_id)?),
            span_id: SpanId(NonZeroU64::new(u64::try_from(span_id).ok()?)?),
            is_sampled: flags & SAMPLED != 0,
        })
    }

    #[must_use]
    pub fn to_header(self) -> HeaderValue {
        let Self { trace_id, span_id, is_sampled } = self;
        let flags = u8::from(is_sampled);
        let text = format!("00-{:032x}-{:016x}-{flags:02x}", trace_id.0, span_id.0);
        HeaderValue::from_str(&text).expect("hex digits are legal")
    }
}

fn parse_hex(text: &str, digits: usize) -> Option<u128> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_hex = text.len() == digits && text.bytes().all(is_digit);
    if is_hex { u128::from_str_radix(text, 16).ok() } else { None }
}

/// Empty if there is no state, or if it is too long or not text.
#[must_use]
pub fn trace_state(headers: &HeaderMap) -> String {
    let mut state = String::new();
    for value in headers.get_all(TRACESTATE) {
        let Ok(members) = value.to_str() else { return String::new() };
        if !state.is_empty() {
            state.push(',');
        }
        state.push_str(members);
        if state.len() > STATE_BYTES_MAX {
            return String::new();
        }
    }
    state
}

#[must_use]
pub fn context_headers(headers: &HeaderMap) -> HeaderMap {
    let mut context = HeaderMap::new();
    for name in [TRACEPARENT, TRACESTATE] {
        for value in headers.get_all(&name) {
            context.append(name.clone(), value.clone());
        }
    }
    context
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn headers(values: &[(HeaderName, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in values {
            headers.append(name.clone(), HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn a_clients_context_is_read_and_written_as_it_was() {
        let parent = TraceParent::from_headers(&headers(&[(TRACEPARENT, SENT)])).unwrap();
        assert!(parent.is_sampled);
        assert_eq!(parent.span_id.0.get(), 0xb7ad_6b71_6920_3331);
        assert_eq!(parent.to_header(), SENT);
        let later = TraceParent::parse(&format!("{}-more", SENT.replacen("00", "42", 1)));
        assert_eq!(later, Some(parent), "a later version keeps the first parts");
        let other_flags = TraceParent::parse(&SENT.replace("-01", "-fe")).unwrap();
        assert!(!other_flags.is_sampled);
    }

    #[test]
    fn a_malformed_context_is_ignored() {
        let zero_trace = format!("00-{:032x}-b7ad6b7169203331-01", 0);
        let zero_span = format!("00-0af7651916cd43dd8448eb211c80319c-{:016x}-01", 0);
        let wrong = [
            "",
            "00",
            &SENT[..54],
            &format!("{SENT}-more"),
            &SENT.replacen("00", "ff", 1),
            &SENT.to_uppercase(),
            &SENT.replace('-', "_"),
            &SENT.replace("b7ad", "+7ad"),
            &zero_trace,
            &zero_span,
        ];
        for text in wrong {
            assert_eq!(TraceParent::parse(text), None, "{text:?} was taken");
        }
        let twice = headers(&[(TRACEPARENT, SENT), (TRACEPARENT, SENT)]);
        assert_eq!(TraceParent::from_headers(&twice), None);
    }

    #[test]
    fn state_of_several_headers_is_joined_and_bounded() {
        let two = headers(&[(TRACESTATE, "a=1"), (TRACESTATE, "b=2")]);
        assert_eq!(trace_state(&two), "a=1,b=2");
        assert_eq!(context_headers(&two), two);
        let long = "a=".to_owned() + &"x".repeat(STATE_BYTES_MAX);
        let long = HeaderMap::from_iter([(TRACESTATE, HeaderValue::try_from(long).unwrap())]);
        assert_eq!(trace_state(&long), "");
        assert_eq!(context_headers(&long), long, "but it is passed on");
    }

    #[test]
    fn a_sample_has_its_ratio_and_ends_with_none_and_all() {
        let id = |bits: u128| TraceId(NonZeroU128::new(1 << 127 | bits).unwrap());
        let (least, greatest) = (id(0), id(u128::MAX));
        assert!(!least.is_in_sample(0.0) && greatest.is_in_sample(1.0));
        let mut random = fastrand::Rng::with_seed(7);
        let sampled = (0..10_000).filter(|_| id(random.u128(..)).is_in_sample(0.25)).count();
        assert!((2_300..2_700).contains(&sampled), "{sampled}");
    }

    proptest! {
        #[test]
        fn any_context_that_is_written_can_be_read(trace in 1_u128.., span in 1_u64.., is_sampled: bool) {
            let parent = TraceParent {
                trace_id: TraceId(NonZeroU128::new(trace).unwrap()),
                span_id: SpanId(NonZeroU64::new(span).unwrap()),
                is_sampled,
            };
            let headers = HeaderMap::from_iter([(TRACEPARENT, parent.to_header())]);
            prop_assert_eq!(TraceParent::from_headers(&headers), Some(parent));
        }

        #[test]
        fn no_text_breaks_the_reader(text: String) {
            TraceParent::parse(&text);
        }
    }
}
