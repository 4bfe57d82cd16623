//! Bounds the priority that a turn asks for by its client's key. Pure.
//!
//! The engine reads the body's member `priority` as a whole number, of which more is more urgent.
//! Its sign is the turn's class: below 0 is `low`, 0 is `normal`, above 0 is `high`. A number above
//! the key's bound is replaced. A body without `priority` stays: a hint counts within the bound,
//! and the agent adds it to the body if its engine takes priorities. Without a hint the key's class
//! counts.

use bytes::Bytes;
use contract::body::{self, Object};
use service::auth::keys::{KeyPriority, PriorityClass};

const KEY: &str = "priority";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TurnPriority {
    pub(super) class: PriorityClass,
    /// `None`: the body stays.
    replacement: Option<i64>,
    /// Within the key's bound, if the body states no priority.
    pub(super) hint: Option<i64>,
}

impl TurnPriority {
    pub(super) fn read(object: &Object<'_>, hint: Option<i64>, of_key: KeyPriority) -> Self {
        let bound = of_key.bound();
        let Some(asked) = object.get(KEY).filter(|value| value.get() != "null") else {
            let class = hint.map_or(of_key.class, class_of).min(bound);
            let hint = hint.map(|asked| if class_of(asked) <= bound { asked } else { most(bound) });
            return Self { class, replacement: None, hint };
        };
        // The engine refuses what isn't a number. Here it must not count as more than the bound.
        let asked = asked.get().parse::<i64>().ok();
        let asked_class = asked.map_or(of_key.class, class_of);
        let may_stay = match asked {
            Some(_) => asked_class <= bound,
            None => bound == PriorityClass::High,
        };
        let class = asked_class.min(bound);
        Self { class, replacement: (!may_stay).then_some(most(bound)), hint: None }
    }

    pub(super) fn changes_body(self) -> bool {
        self.replacement.is_some()
    }

    /// All other bytes stay.
    pub(super) fn apply(self, bytes: Bytes) -> Bytes {
        let Some(replacement) = self.replacement else { return bytes };
        let Ok(object) = Object::parse(&bytes) else { return bytes };
        let parts = object.rewrite(&[KEY]);
        body::assemble(&bytes, &parts, &format!("\"{KEY}\":{replacement}")).into()
    }
}

fn class_of(priority: i64) -> PriorityClass {
    match priority {
        ..0 => PriorityClass::Low,
        0 => PriorityClass::Normal,
        1.. => PriorityClass::High,
    }
}

/// Returns the priority of a turn that asks for more than `bound`.
fn most(bound: PriorityClass) -> i64 {
    match bound {
        PriorityClass::Low => -1,
        PriorityClass::Normal | PriorityClass::High => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str, class: PriorityClass, bound: PriorityClass) -> (PriorityClass, String) {
        let of_key = KeyPriority { class, bound: Some(bound) };
        let object = Object::parse(body.as_bytes()).unwrap();
        let priority = TurnPriority::read(&object, None, of_key);
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

    #[test]
    fn a_hint_is_bounded_as_a_stated_priority_is_and_leaves_the_body() {
        use PriorityClass::{High, Low, Normal};
        let hinted = |body: &str, hint, class, bound| {
            let of_key = KeyPriority { class, bound: Some(bound) };
            let priority =
                TurnPriority::read(&Object::parse(body.as_bytes()).unwrap(), Some(hint), of_key);
            assert!(!priority.changes_body() || body.len() > 2);
            (priority.class, priority.hint)
        };
        assert_eq!(hinted("{}", 7, Normal, High), (High, Some(7)));
        assert_eq!(hinted("{}", 7, Normal, Normal), (Normal, Some(0)));
        assert_eq!(hinted("{}", 7, Low, Low), (Low, Some(-1)));
        assert_eq!(hinted("{}", -3, High, High), (Low, Some(-3)));
        assert_eq!(hinted(r#"{"priority":-5}"#, 7, Normal, High), (Low, None), "it says so itself");
    }
}
