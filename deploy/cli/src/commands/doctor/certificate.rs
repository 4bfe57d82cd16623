//! Reads when a certificate expires. Pure, but for the reading of the file.
//!
//! Only the validity is read, by its place in the certificate (RFC 5280, 4.1). Those who use the
//! certificate check who signed it.

use std::path::Path;

use rustls::pki_types::{CertificateDer, pem::PemObject as _};

const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// The tag of the version, which an old certificate doesn't have.
const VERSION: u8 = 0xa0;

/// Counts the days from 1970, for the first certificate of a PEM file. `None` if none is readable.
#[must_use]
pub(super) fn last_day(path: &Path) -> Option<i64> {
    let certificate = CertificateDer::from_pem_file(path).ok()?;
    parse_last_day(&certificate)
}

fn parse_last_day(der: &[u8]) -> Option<i64> {
    let mut fields = read_value(read_value(der)?.content)?.content;
    // Serial number, algorithm, issuer.
    let skipped = if fields.first() == Some(&VERSION) { 4 } else { 3 };
    for _ in 0..skipped {
        fields = read_value(fields)?.rest;
    }
    let begin = read_value(read_value(fields)?.content)?;
    let end = read_value(begin.rest)?;
    let time = std::str::from_utf8(end.content).ok()?;
    let digits = match end.tag {
        UTC_TIME if time.get(..2)? < "50" => format!("20{time}"),
        UTC_TIME => format!("19{time}"),
        GENERALIZED_TIME => time.to_owned(),
        _ => return None,
    };
    let number = |from: usize, to: usize| digits.get(from..to)?.parse::<i64>().ok();
    Some(days_from_1970(number(0, 4)?, number(4, 6)?, number(6, 8)?))
}

/// A year begins in March, so that a leap day is its last.
fn days_from_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month > 2 { year } else { year - 1 };
    let month = (month + 9) % 12;
    let days_before_month = (153 * month + 2) / 5;
    let leap_days = year / 4 - year / 100 + year / 400;
    365 * year + leap_days + days_before_month + day - 1 - 719_468
}

/// A value of DER, and what follows it.
struct Der<'a> {
    tag: u8,
    content: &'a [u8],
    rest: &'a [u8],
}

fn read_value(der: &[u8]) -> Option<Der<'_>> {
    let [tag, length, rest @ ..] = der else { return None };
    let (length, rest) = match length {
        0..0x80 => (usize::from(*length), rest),
        0x80.. => {
            let (bytes, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
            // No certificate has 16 MiB.
            let is_short = bytes.len() <= 3;
            let length = bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
            (is_short.then_some(length)?, rest)
        }
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some(Der { tag: *tag, content, rest })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_counted_as_the_calendar_does() {
        for (year, month, day, days) in
            [(1970, 1, 1, 0), (2000, 2, 29, 11_016), (2000, 3, 1, 11_017), (2026, 11, 23, 20_780)]
        {
            assert_eq!(days_from_1970(year, month, day), days, "{year}-{month}-{day}");
        }
    }

    #[test]
    fn the_end_is_read_from_a_certificate() {
        for (year, days) in [(2031, 22_280), (2075, 38_351)] {
            let mut params = rcgen::CertificateParams::default();
            params.not_after = rcgen::date_time_ymd(year, 1, 1);
            let key = rcgen::KeyPair::generate().unwrap();
            let certificate = params.self_signed(&key).unwrap();
            assert_eq!(parse_last_day(certificate.der()), Some(days), "{year}");
            for length in 0..certificate.der().len() {
                // Cut anywhere, it must not panic.
                let _ = parse_last_day(&certificate.der()[..length]);
            }
        }
        assert_eq!(parse_last_day(&[]), None);
    }
}
