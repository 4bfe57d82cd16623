//! Puts sessions below the sessions that started them. Pure.

use std::collections::BTreeMap;

use contract::api::FleetSession;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionLine<'a> {
    /// How many sessions of the list are above it: 0 without a parent in the list.
    pub depth: usize,
    pub session: &'a FleetSession,
    /// If it wasn't found itself, it is here because a session below it was.
    pub is_found: bool,
}

/// The parents come from both lists. A family stands where its first member stands in the order of
/// `found`. A session without a known parent stands alone; sessions that name each other in a
/// circle are all shown.
#[must_use]
pub fn below_parents<'a>(
    found: &[&'a FleetSession],
    parents: &[&'a FleetSession],
) -> Vec<SessionLine<'a>> {
    let sessions: Vec<&FleetSession> = found.iter().chain(parents).copied().collect();
    let mut numbers = BTreeMap::new();
    for (number, session) in sessions.iter().enumerate() {
        numbers.entry(session.digest.as_str()).or_insert(number);
    }
    let parent = |number: usize| numbers.get(sessions[number].parent.as_deref()?).copied();
    let mut children = vec![vec![]; sessions.len()];
    let mut roots = vec![];
    let mut is_linked = vec![false; sessions.len()];
    for found in 0..found.len() {
        // Everything above a linked session is linked, too.
        let mut next = Some(found);
        while let Some(number) = next
            && !std::mem::replace(&mut is_linked[number], true)
        {
            next = parent(number).filter(|above| *above != number);
            match next {
                Some(above) => children[above].push(number),
                None => roots.push(number),
            }
        }
    }
    let mut lines = vec![];
    let mut is_placed = vec![false; sessions.len()];
    // What no root leads to is in a circle.
    for start in roots.into_iter().chain(0..found.len()) {
        let mut next = vec![(0, start)];
        while let Some((depth, number)) = next.pop() {
            if std::mem::replace(&mut is_placed[number], true) {
                continue;
            }
            let is_found = number < found.len();
            lines.push(SessionLine { depth, session: sessions[number], is_found });
            next.extend(children[number].iter().rev().map(|child| (depth + 1, *child)));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn session(id: &str, parent: &str) -> FleetSession {
        let parent = (!parent.is_empty()).then(|| parent.to_owned());
        FleetSession { digest: id.into(), parent, ..FleetSession::default() }
    }

    /// Returns the lines of these sessions, each `id<parent`: a `-` for each session above, and a
    /// `?` for a session that was not found itself.
    fn shown(found: &str, parents: &str) -> String {
        let read = |text: &str| -> Vec<FleetSession> {
            text.split_whitespace()
                .map(|word| {
                    let (id, parent) = word.split_once('<').unwrap_or((word, ""));
                    session(id, parent)
                })
                .collect()
        };
        let (found, parents) = (read(found), read(parents));
        let found: Vec<&FleetSession> = found.iter().collect();
        let parents: Vec<&FleetSession> = parents.iter().collect();
        let text = |line: &SessionLine<'_>| {
            let mark = if line.is_found { "" } else { "?" };
            format!("{}{}{mark}", "-".repeat(line.depth), line.session.digest)
        };
        below_parents(&found, &parents).iter().map(text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn children_stand_below_their_parents_in_the_list_s_order() {
        assert_eq!(shown("a b<a c d<a e<b", ""), "a -b --e -d c");
        assert_eq!(shown("c z<a b<a a", ""), "c a -z -b", "a family stands where its first does");
        assert_eq!(shown("orphan<gone a", ""), "orphan a");
    }

    #[test]
    fn a_found_session_has_its_parents_above_it() {
        assert_eq!(shown("x c<b y<a", "b<a a"), "x a? -b? --c -y");
        assert_eq!(shown("x", "b<a a"), "x", "those that no found session needs are left out");
    }

    #[test]
    fn sessions_that_name_each_other_are_all_shown() {
        assert_eq!(shown("self<self a", ""), "self a");
        assert_eq!(shown("x<y y<x z<y a", ""), "a x -y --z");
    }

    proptest! {
        #[test]
        fn every_found_session_is_shown_once(parents in prop::collection::vec(0_usize..12, 0..12)) {
            let sessions: Vec<FleetSession> = (0..parents.len())
                .map(|number| session(&number.to_string(), &parents[number].to_string()))
                .collect();
            let found: Vec<&FleetSession> = sessions.iter().collect();
            let lines = below_parents(&found, &[]);
            let mut ids: Vec<usize> =
                lines.iter().map(|line| line.session.digest.parse().unwrap()).collect();
            ids.sort_unstable();
            prop_assert_eq!(ids, (0..parents.len()).collect::<Vec<_>>());
        }
    }
}
