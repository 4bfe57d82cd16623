//! The session controller of one rank: histories, flags and timeouts, but no KV.
//!
//! The controller reproduces the engine's bookkeeping, faults included: `inflight` belongs to the
//! session and not to a turn, so a turn that clears the flag clears it for all turns.

use super::{
    request::{Finish, SessionParams, Space},
    tokenizer::BOS,
};
use std::{collections::BTreeMap, time::Duration};

/// One request in the tree of a non-streaming session.
#[derive(Clone, Debug)]
struct Turn {
    origin: Vec<u32>,
    /// The output; `None` while the request runs.
    output: Option<Vec<u32>>,
}

/// A session opened by `/open_session`.
#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) streaming: bool,
    timeout: Option<Duration>,
    /// The time of the opening, or of the *start* of the last accepted turn.
    last_active: Duration,
    pub(super) inflight: bool,
    pub(super) close_on_finish: bool,
    /// The last committed turn was retracted and has not finished since. If such a turn is aborted
    /// in the queue, the flag stays set and the session can't be closed.
    last_unfinished: bool,
    /// The newest turn's prompt, a buffer that all turns share. Creating the next turn truncates
    /// the buffer to `committed_len`.
    origin: Vec<u32>,
    committed_len: usize,
    last_output: Vec<u32>,
    turns: BTreeMap<String, Turn>,
    /// Where in the tree its history is, since it was demoted.
    pub(super) demoted_to: Option<Space>,
}

impl Session {
    pub(super) fn new(now: Duration, streaming: bool, timeout: Option<Duration>) -> Session {
        Session {
            streaming,
            timeout,
            last_active: now,
            inflight: false,
            close_on_finish: false,
            last_unfinished: false,
            origin: Vec::new(),
            committed_len: 0,
            last_output: Vec::new(),
            turns: BTreeMap::new(),
            demoted_to: None,
        }
    }

    /// Returns the number of tokens in the last successful turn, output included.
    pub(super) fn history_len(&self) -> usize {
        self.committed_len + self.last_output.len()
    }

    /// Returns the tokens of the last successful turn, output included.
    pub(super) fn history(&self) -> Vec<u32> {
        [&self.origin[..self.committed_len], &self.last_output].concat()
    }

    /// Returns the length of the newest turn's prompt, which every running turn of the session
    /// reports.
    pub(super) fn prompt_len(&self) -> usize {
        self.origin.len()
    }

    pub(super) fn expires_at(&self) -> Option<Duration> {
        self.timeout.map(|timeout| self.last_active + timeout)
    }

    pub(super) fn has_unfinished(&self) -> bool {
        self.inflight || self.last_unfinished || self.turns.values().any(|t| t.output.is_none())
    }

    /// Returns the full prompt of a new turn, or the refusal.
    pub(super) fn create(
        &mut self,
        now: Duration,
        rid: &str,
        params: &SessionParams,
        input: Vec<u32>,
    ) -> Result<Vec<u32>, Finish> {
        if self.streaming {
            self.create_streaming(now, params, input)
        } else {
            self.create_normal(now, rid, params, input)
        }
    }

    fn create_streaming(
        &mut self,
        now: Duration,
        params: &SessionParams,
        mut input: Vec<u32>,
    ) -> Result<Vec<u32>, Finish> {
        if self.inflight {
            return Err(Finish::bad_request("Streaming session already has an active request."));
        }
        let unsupported = [
            (params.replace, "replace"),
            (params.drop_previous_output, "drop_previous_output"),
            (params.offset != 0, "offset"),
        ];
        if let Some((_, what)) = unsupported.iter().find(|(set, _)| *set) {
            return Err(Finish::bad_request(format!("Streaming sessions do not support {what}.")));
        }
        self.origin.truncate(self.committed_len);
        self.origin.extend_from_slice(&self.last_output);
        strip_bos(&mut input, !self.origin.is_empty());
        self.origin.append(&mut input);
        require_input(&self.origin)?;
        self.inflight = true;
        self.last_active = now;
        Ok(self.origin.clone())
    }

    fn create_normal(
        &mut self,
        now: Duration,
        rid: &str,
        params: &SessionParams,
        mut input: Vec<u32>,
    ) -> Result<Vec<u32>, Finish> {
        let last = match &params.rid {
            None => None,
            Some(rid) => Some(
                self.turns
                    .get(rid)
                    .ok_or_else(|| Finish::bad_request("Invalid request session id"))?,
            ),
        };
        let mut prompt = Vec::new();
        if let Some(last) = last {
            let output = last.output.as_ref().ok_or_else(|| {
                Finish::bad_request(
                    "Session request is appending to a request that hasn't finished.",
                )
            })?;
            prompt.clone_from(&last.origin);
            if !params.drop_previous_output {
                prompt.extend_from_slice(output);
            }
            strip_bos(&mut input, true);
            if params.offset != 0 {
                // A negative offset counts from the end, as a Python slice does.
                let len = i64::try_from(prompt.len()).unwrap_or(i64::MAX);
                let at = if params.offset < 0 { len + params.offset } else { params.offset };
                prompt.truncate(usize::try_from(at.max(0)).unwrap_or(usize::MAX));
            }
        }
        prompt.append(&mut input);
        require_input(&prompt)?;
        if params.replace && params.rid.is_none() {
            self.turns.clear();
        }
        self.turns.insert(rid.to_owned(), Turn { origin: prompt.clone(), output: None });
        self.last_active = now;
        Ok(prompt)
    }

    /// Records that a turn ended successfully. The engine treats a retraction the same way.
    pub(super) fn finish_turn(&mut self, rid: &str, output: &[u32], finished: bool) {
        if !self.streaming {
            if let Some(turn) = self.turns.get_mut(rid) {
                turn.output = finished.then(|| output.to_vec());
            }
            return;
        }
        self.inflight = false;
        self.last_unfinished = !finished;
        self.committed_len = self.origin.len();
        self.last_output = output.to_vec();
    }

    /// Discards a turn: the history stays that of the last successful turn.
    pub(super) fn abort_turn(&mut self, rid: &str) {
        self.inflight = false;
        self.turns.remove(rid);
    }
}

fn strip_bos(input: &mut Vec<u32>, has_history: bool) {
    if has_history && input.first() == Some(&BOS) {
        input.remove(0);
    }
}

fn require_input(prompt: &[u32]) -> Result<(), Finish> {
    if prompt.is_empty() {
        return Err(Finish::bad_request(
            "A session request must contain input tokens after restoring history.",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(session: &mut Session, delta: &[u32]) -> Result<Vec<u32>, Finish> {
        session.create(Duration::ZERO, "r", &SessionParams::default(), delta.to_vec())
    }

    #[test]
    fn aborted_turn_leaves_no_trace() {
        let mut session = Session::new(Duration::ZERO, true, None);
        turn(&mut session, &[BOS, 1]).unwrap();
        session.finish_turn("r", &[7], true);
        turn(&mut session, &[2, 3]).unwrap();
        session.abort_turn("r");
        assert_eq!(turn(&mut session, &[BOS, 4]).unwrap(), [BOS, 1, 7, 4]);
        assert!(turn(&mut session, &[5]).is_err());
    }

    #[test]
    fn normal_session_branches_by_rid() {
        let mut session = Session::new(Duration::ZERO, false, None);
        let params = |rid: Option<&str>, offset| SessionParams {
            rid: rid.map(str::to_owned),
            offset,
            ..SessionParams::default()
        };
        session.create(Duration::ZERO, "a", &params(None, 0), vec![1, 2]).unwrap();
        assert!(session.create(Duration::ZERO, "b", &params(Some("a"), 0), vec![3]).is_err());
        session.finish_turn("a", &[9], true);
        let whole = session.create(Duration::ZERO, "b", &params(Some("a"), 0), vec![3]).unwrap();
        let cut = session.create(Duration::ZERO, "c", &params(Some("a"), 1), vec![3]).unwrap();
        assert_eq!((whole, cut), (vec![1, 2, 9, 3], vec![1, 3]));
        assert!(session.create(Duration::ZERO, "d", &params(Some("x"), 0), vec![3]).is_err());
    }
}
