//! Changes of cached pages, merged into events as the engine merges them (a pure module).

use super::{
    super::request::Space,
    hash::{self, BlockDigest},
};

/// The memory that an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    Device,
    Host,
}

/// Pages that became resident, each page the successor of the page before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub hashes: Vec<i64>,
    pub parent: Option<i64>,
    pub tokens: Vec<u32>,
    pub block_size: usize,
    pub space: Space,
    /// The session whose request stored the pages; for information only.
    pub session_id: Option<String>,
    pub medium: Medium,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    Stored(Stored),
    /// The extra key of the pages is not published, but events with different keys are not merged.
    Removed {
        hashes: Vec<i64>,
        extra_key: Option<String>,
        medium: Medium,
    },
    Cleared,
}

/// Events that wait to be published. The core takes them with every prefill, every
/// `CoreConfig::decode_log_interval` decode steps and when idle, which bounds the queue.
#[derive(Clone, Debug)]
pub(in super::super) struct Recorder {
    queue: Vec<KvEvent>,
}

impl Recorder {
    /// Creates a recorder with one `Cleared` event, because a starting engine clears its tree.
    pub(in super::super) fn new() -> Recorder {
        Recorder { queue: vec![KvEvent::Cleared] }
    }

    /// Records the new pages of one node; `parent` is the page before them.
    pub(in super::super) fn stored(
        &mut self,
        parent: Option<&BlockDigest>,
        pages: &[BlockDigest],
        tokens: &[u32],
        space: &Space,
        session_id: Option<&str>,
        medium: Medium,
    ) {
        let parent = parent.map(hash::name);
        let hashes = pages.iter().map(hash::name);
        if let Some(KvEvent::Stored(last)) = self.queue.last_mut()
            && parent.is_some()
            && last.hashes.last().copied() == parent
            && last.space == *space
            && last.session_id.as_deref() == session_id
            && last.medium == medium
        {
            last.hashes.extend(hashes);
            last.tokens.extend_from_slice(tokens);
            return;
        }
        self.queue.push(KvEvent::Stored(Stored {
            hashes: hashes.collect(),
            parent,
            tokens: tokens.to_vec(),
            block_size: tokens.len() / pages.len(),
            space: space.clone(),
            session_id: session_id.map(str::to_owned),
            medium,
        }));
    }

    /// Records that a node's pages were evicted.
    pub(in super::super) fn removed(&mut self, pages: &[BlockDigest], space: &Space, from: Medium) {
        let removed = pages.iter().map(hash::name);
        if let Some(KvEvent::Removed { hashes, extra_key, medium }) = self.queue.last_mut()
            && *extra_key == space.extra_key
            && *medium == from
        {
            return hashes.extend(removed);
        }
        let extra_key = space.extra_key.clone();
        self.queue.push(KvEvent::Removed { hashes: removed.collect(), extra_key, medium: from });
    }

    pub(in super::super) fn cleared(&mut self) {
        self.queue.push(KvEvent::Cleared);
    }

    /// Takes the events recorded since the last call.
    pub(in super::super) fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.queue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(recorder: &mut Recorder, chain: &[BlockDigest], from: usize, session: Option<&str>) {
        let parent = from.checked_sub(1).map(|at| &chain[at]);
        let tokens = [7, 8];
        let (pages, space) = (&chain[from..=from], Space::default());
        recorder.stored(parent, pages, &tokens, &space, session, Medium::Device);
    }

    #[test]
    fn pages_that_follow_are_one_event() {
        let chain = hash::chain(None, &[1, 2, 3, 4, 5, 6], 2);
        let mut recorder = Recorder::new();
        assert_eq!(recorder.take_events(), [KvEvent::Cleared]);
        stored(&mut recorder, &chain, 0, None);
        stored(&mut recorder, &chain, 1, None);
        // Another session's page is not merged, although it follows the last page.
        stored(&mut recorder, &chain, 2, Some("s"));
        // The first page of a prompt has no parent, so it starts a new event.
        stored(&mut recorder, &chain, 0, Some("s"));
        let events = recorder.take_events();
        let pages = |event: &KvEvent| match event {
            KvEvent::Stored(stored) => stored.hashes.len(),
            KvEvent::Removed { .. } | KvEvent::Cleared => 0,
        };
        assert_eq!(events.iter().map(pages).collect::<Vec<_>>(), [2, 1, 1]);
        assert!(recorder.take_events().is_empty());
    }

    #[test]
    fn removes_are_joined_but_for_their_extra_key() {
        let chain = hash::chain(None, &[1, 2, 3], 1);
        let mut recorder = Recorder::new();
        recorder.take_events();
        let other = Space { extra_key: Some("k".to_owned()), cache_salt: None };
        recorder.removed(&chain[..2], &Space::default(), Medium::Device);
        recorder.removed(&chain[2..], &Space::default(), Medium::Device);
        recorder.removed(&chain[..1], &other, Medium::Device);
        recorder.removed(&chain[..1], &other, Medium::Host);
        let counts = recorder.take_events().into_iter().map(|event| match event {
            KvEvent::Removed { hashes, .. } => hashes.len(),
            KvEvent::Stored(_) | KvEvent::Cleared => 0,
        });
        assert_eq!(counts.collect::<Vec<_>>(), [3, 1, 1]);
    }
}
