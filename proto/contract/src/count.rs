//! Bounds the counts that other processes report, so that no sum or product of them overflows.
//!
//! An overflow panics, and would end the process. So each count from outside is bounded where it is
//! read. The rest of the code relies on that, and adds such counts unchecked.

use serde::{Deserialize, Deserializer};

/// A million times the tokens of the longest contexts, and more than the bytes of any device's
/// memory. A sum of eight million such counts fits a `u64`.
pub const COUNT_MAX: u64 = 1 << 40;

#[must_use]
pub const fn bounded(count: u64) -> u64 {
    if count > COUNT_MAX { COUNT_MAX } else { count }
}

pub fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    u64::deserialize(deserializer).map(bounded)
}

pub fn read_option<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Option::deserialize(deserializer).map(|count: Option<u64>| count.map(bounded))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_beyond_the_bound_is_read_as_the_bound() {
        #[derive(Deserialize)]
        struct Counts {
            #[serde(deserialize_with = "read")]
            one: u64,
            #[serde(default, deserialize_with = "read_option")]
            other: Option<u64>,
        }
        let counts: Counts = serde_json::from_str(r#"{"one":18446744073709551615}"#).unwrap();
        assert_eq!((counts.one, counts.other), (COUNT_MAX, None));
        let counts: Counts = serde_json::from_str(r#"{"one":7,"other":1099511627777}"#).unwrap();
        assert_eq!((counts.one, counts.other), (7, Some(COUNT_MAX)));
    }
}
