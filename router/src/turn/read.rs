//! The second stage: reads what a request asks for, and changes its body.
//!
//! Reading takes time in proportion to a body's length, or more. So a long body is read on a
//! blocking thread, in one of its client's places, and other requests don't wait. All later stages
//! use the changed body.

use std::sync::Arc;

use contract::{
    abort::TurnNames,
    answers::{count_sequences, has_single_answer, runs_in_background},
    body::Object,
    hints::TurnHints,
    route::Kind,
};
use http::Method;
use service::{auth::keys::PriorityClass, places::INLINE_BYTES_MAX};
use tracing::info;

use super::{
    agent_body,
    arrival::Arrival,
    body::ReceivedBody,
    cache_isolation,
    error::{Error, NoAnswer},
    form, hints,
    model_names::{self, RealModel},
    preamble::{self, PreambleRange},
    priority::TurnPriority,
    receive::Received,
    request::{self, Nvext, Turn},
    responses,
    shared::Shared,
};
use crate::{
    config::{auth::CacheIsolation, tables::PreamblePolicy},
    fleet::snapshot::Snapshot,
    placement::{PairUse, Unpaired},
};

#[derive(Debug)]
pub(super) struct Read {
    pub(super) arrival: Arrival,
    pub(super) turn: Turn,
    /// As later stages use it.
    pub(super) body: ReceivedBody,
}

/// What a request says, read on any thread.
#[derive(Debug)]
struct Contents {
    turn: Turn,
    body: ReceivedBody,
    class: PriorityClass,
}

#[derive(Clone, Copy)]
struct Reader<'a> {
    shared: &'a Shared,
    arrival: &'a Arrival,
    /// `None` if the settings have no other names for models.
    view: Option<&'a Snapshot>,
}

/// Changes the body: removes a volatile preamble, bounds the priority, replaces another name of a
/// model by the real one with its adapter, and adds a salt where caches are isolated.
pub(super) async fn run(shared: &Arc<Shared>, received: Received) -> Result<Read, Error> {
    let deadline = received.arrival.deadline;
    let (mut arrival, contents) = tokio::time::timeout_at(deadline.into(), read(shared, received))
        .await
        .map_err(|_| NoAnswer::TimedOut)??;
    let Contents { turn, body, class } = contents;
    arrival.sharer.class = class;
    arrival.flags.set(turn.wants_stream, turn.is_idempotent());
    Ok(Read { arrival, turn, body })
}

async fn read(shared: &Arc<Shared>, received: Received) -> Result<(Arrival, Contents), Error> {
    let Received { mut arrival, body } = received;
    // Before agents report, no name is known to be real.
    let view = match shared.model_names.is_empty() {
        true => None,
        false => Some(shared.directory.settled_view().await),
    };
    if body.bytes.len() <= INLINE_BYTES_MAX {
        let reader = Reader { shared, arrival: &arrival, view: view.as_deref() };
        let contents = reader.read_any(body)?;
        return Ok((arrival, contents));
    }
    let (places, client) = (Arc::clone(&shared.shares.reading), Arc::clone(&arrival.sharer.name));
    let shared = Arc::clone(shared);
    // These stay here, so that the request ends if its client leaves, though reading goes on.
    let observers = std::mem::take(&mut arrival.observers);
    let read = move || {
        let reader = Reader { shared: &shared, arrival: &arrival, view: view.as_deref() };
        let contents = reader.read_any(body)?;
        Ok::<_, Error>((arrival, contents))
    };
    let (arrival, contents): (Arrival, Contents) = places.run(&client, read).await?;
    Ok((Arrival { observers, ..arrival }, contents))
}

impl Reader<'_> {
    /// The body may be a form.
    fn read_any(self, body: ReceivedBody) -> Result<Contents, Error> {
        let (class, head) = (self.arrival.sharer.class, &self.arrival.head);
        let pairs = PairUse::Never(Unpaired::NotGenerated);
        if self.arrival.kind == Kind::Transcription {
            let model = form::read_model(&head.headers, &body.bytes)?;
            let real_model = model.as_deref().and_then(|name| self.real_model(name));
            let model = real_model.map(|real| real.name).or(model);
            return Ok(Contents { turn: Turn { model, pairs, ..Turn::default() }, body, class });
        }
        if head.method == Method::GET {
            return Ok(Contents { turn: Turn { pairs, ..Turn::default() }, body, class });
        }
        self.read_object(body)
    }

    fn read_object(self, mut body: ReceivedBody) -> Result<Contents, Error> {
        let Self { shared, arrival, .. } = self;
        let (kind, headers) = (arrival.kind, &arrival.head.headers);
        let principal = &*arrival.caller.principal;
        let object = Object::parse(&body.bytes).map_err(request::Error::from)?;
        let nvext = Nvext::read(&object)?;
        let names = TurnNames::in_body(kind, &object);
        let previous_response = responses::previous_response(kind, &object);
        let priority_hint =
            hints::priority(nvext.agent_hints.as_ref()).filter(|_| kind.is_generation());
        let priority = TurnPriority::read(&object, priority_hint, arrival.sharer.limits.priority);
        let class = priority.class;
        let hints = hints::unbounded(nvext.agent_hints.as_ref());
        let has_several_answers = !has_single_answer(kind, &object);
        let is_background = runs_in_background(kind, &object).unwrap_or(true);
        let pairs = find_pair_use(kind, &object, has_several_answers);
        let sequences = count_sequences(kind, &object);
        let merges_logprobs = agent_body::logprobs::wants_input_logprobs(kind, &object);
        let preamble = self.find_preamble(&object);
        let real_model = self.view.and_then(|_| model_names::model_member(&object));
        let real_model = real_model.and_then(|name| self.real_model(&name));
        let model = real_model
            .as_ref()
            .and_then(|real| model_names::with_adapter(&object, Some(real.name.clone())));
        let sent_model = real_model.filter(|real| real.is_sent);
        let isolates = shared.cache_isolation == CacheIsolation::Principal && kind.is_generation();
        let is_changed = preamble.is_some() || priority.changes_body() || sent_model.is_some();
        let session_headers = &shared.session_headers;
        let turn = if !is_changed && !isolates {
            request::read_session(session_headers, headers, &object, &nvext, principal)
        } else {
            body.change(|bytes| match preamble {
                None => bytes,
                Some(range) => range.apply(bytes),
            });
            body.change(|bytes| priority.apply(bytes));
            if let Some(real_model) = sent_model {
                let object = Object::parse(&body.bytes).map_err(request::Error::from)?;
                let renamed_body = real_model.put_into(&object);
                body.change(|_| renamed_body.into());
            }
            if isolates {
                let object = Object::parse(&body.bytes).map_err(request::Error::from)?;
                let salted_body = cache_isolation::add_salt(&object, principal)?;
                body.change(|_| salted_body.into());
            }
            request::read(session_headers, headers, &body.bytes, principal)
        };
        let mut turn = turn?;
        turn.model = model.or(turn.model);
        if !kind.is_generation() {
            // Any worker of the model can answer this request, and it leaves no KV behind.
            turn = Turn { model: turn.model, pairs, ..Turn::default() };
            return Ok(Contents { turn, body, class });
        }
        let is_hint = turn.session.as_ref().is_some_and(|intent| intent.hint.is_some());
        turn.hints = TurnHints { session: is_hint, priority: priority.hint, ..hints };
        turn = Turn {
            names,
            previous_response,
            pairs,
            sequences,
            merges_logprobs,
            has_several_answers,
            is_background,
            ..turn
        };
        Ok(Contents { turn, body, class })
    }

    /// `None` if the name stands for itself.
    fn real_model(self, name: &str) -> Option<RealModel> {
        self.shared.model_names.resolve(name, &self.view?.engines())
    }

    fn find_preamble(self, body: &Object<'_>) -> Option<PreambleRange> {
        if !self.arrival.kind.is_generation() || self.shared.preamble == PreamblePolicy::Keep {
            return None;
        }
        let range = preamble::find(self.arrival.path(), body)?;
        if self.shared.metrics.count_removed_preamble(range.client) == 0 {
            let client = range.client;
            info!(client, "removed a volatile preamble; set preamble = \"keep\" to leave it in");
        }
        Some(range)
    }
}

fn find_pair_use(kind: Kind, body: &Object<'_>, has_several_answers: bool) -> PairUse {
    if !kind.is_generation() {
        PairUse::Never(Unpaired::NotGenerated)
    } else if has_several_answers {
        PairUse::Never(Unpaired::SeveralAnswers)
    } else if agent_body::logprobs::echoes_logprobs(kind, body) {
        PairUse::Never(Unpaired::Echo)
    } else {
        PairUse::May
    }
}
