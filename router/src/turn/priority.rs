//! Bounds the priority that a turn asks for by its client's key. Pure.
//!
//! A turn asks by the body's member `priority`, as the engine reads it: a whole number, of which
//! more is more urgent. Its sign is the turn's class here: below 0 is `low`, 0 is `normal`, above 0
//! is `high`. A turn that asks for more than the key's bound gets the bound, and the number in its
//! body is replaced. A body without `priority` stays as it is, and its turn has the key's class.

use bytes::Bytes;
use proto::body::{self, Object};
use service::auth::keys::{KeyPriority, PriorityClass};

const KEY: &str = "priority";

/// The class of a turn, and the number that its body must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TurnPriority {
    pub(super) class: PriorityClass,
    /// The number that replaces the body's own. `None`: the body stays.
    replacement: Option<i64>,
}

impl TurnPriority {
    /// Reads the priority of a turn whose key has these classes.
    pub(super) fn read(object: &Object<'_>, of_key: KeyPriority) -> Self {
        let bound = of_key.bound();
        let Some(asked) = object.get(KEY).filter(|value| value.get() != "null") else {
            return Self { class: of_key.class.min(bound), replacement: None };
        };
        // The engine refuses what isn't a number. Here it must not count as more than the bound.
        let asked = asked.get().parse::<i64>().ok();
        let asked_class = match asked {
            Some(..0) => PriorityClass::Low,
            Some(0) => PriorityClass::Normal,
            Some(1..) => PriorityClass::High,
            None => of_key.class,
        };
        let may_stay = match asked {
            Some(_) => asked_class <= bound,
            None => bound == PriorityClass::High,
        };
        let class = asked_class.min(bound);
        let replacement = (!may_stay).then_some(match bound {
            PriorityClass::Low => -1,
            PriorityClass::Normal | PriorityClass::High => 0,
        });
        Self { class, replacement }
    }

    /// Whether the body needs another number.
    pub(super) fn changes_body(self) -> bool {
        self.replacement.is_some()
    }

    /// Returns the body with the number that the turn gets. All other bytes stay.
    pub(super) fn apply(self, bytes: Bytes) -> Bytes {
        let Some(replacement) = self.replacement else { return bytes };
        let Ok(object) = Object::parse(&bytes) else { return bytes };
        let parts = object.rewrite(&[KEY]);
        body::assemble(&bytes, &parts, &format!("\"{KEY}\":{replacement}")).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str, class: PriorityClass, bound: PriorityClass) -> (PriorityClass, String) {
        let of_key = KeyPriority { class, bound: Some(bound) };
        let priority = TurnPriority::read(&Object::parse(body.as_bytes()).unwrap(), of_key);
        let bytes = priority.apply(Bytes::from(body.to_owned()));
        (priority.class, String::from_utf8(bytes.to_vec()).unwrap())
    }

    #[test]
    fn nobody_gets_more_than_the_bound_of_the_key() {
        use PriorityClass::{High, Low, Normal};
        let same = |body: &str| body.to_owned();
        let plain = r#"{ "text" : "a" }"#;
        assert_eq!(read(plain, Low, High), (Low, same(plain)));
        assert_eq!(read(plain, High, Normal), (Normal, same(plain)));
        let high = r#"{"text":"a", "priority": 7 ,"n":1.0}"#;
        assert_eq!(read(high, Low, High), (High, same(high)));
        let lowered = r#"{"text":"a" ,"n":1.0,"priority":0}"#;
        assert_eq!(read(high, Normal, Normal), (Normal, lowered.to_owned()));
        let lowest = r#"{"text":"a" ,"n":1.0,"priority":-1}"#;
        assert_eq!(read(high, Low, Low), (Low, lowest.to_owned()));
        let low = r#"{"priority":-5}"#;
        assert_eq!(read(low, Normal, Normal), (Low, same(low)));
        let hidden = r#"{"\u0070riority":9}"#;
        assert_eq!(read(hidden, Normal, Normal), (Normal, r#"{"priority":0}"#.to_owned()));
        let twice = r#"{"priority":9,"priority":0}"#;
        assert_eq!(read(twice, Normal, Normal), (Normal, same(twice)), "the last one counts");
        for odd in [r#"{"priority":1e3}"#, r#"{"priority":"9"}"#, r#"{"priority":9.5}"#] {
            assert_eq!(read(odd, Normal, Normal), (Normal, r#"{"priority":0}"#.to_owned()));
        }
    }
}
