//! Reads a turn (a request and its answer) from its request, and changes its body.
//!
//! Reading takes time in proportion to a body's length, or more. So a long body is read on a
//! blocking thread, in a place of its client, and other requests don't wait for it. All later steps
//! use the changed body.

use std::sync::Arc;

use contract::{
    abort::TurnNames,
    answers::{count_sequences, has_single_answer, runs_in_background},
    body::Object,
    hints::TurnHints,
    route::Kind,
};
use http::{HeaderMap, Method, request::Parts};
use service::{auth::keys::PriorityClass, places::INLINE_BYTES_MAX};
use tracing::info;

use super::{
    agent_body,
    body::HeldBody,
    cache_isolation,
    error::Error,
    form,
    hinted::Unfit,
    hints,
    model_names::{self, RealModel},
    pair,
    preamble::{self, PreambleRange},
    priority::TurnPriority,
    request::{self, Nvext, Turn},
    responses,
    shared::Shared,
};
use crate::{
    config::{auth::CacheIsolation, tables::PreamblePolicy},
    fleet::snapshot::Snapshot,
    placement::{PairUse, Unpaired},
    shares::Sharer,
};

#[derive(Debug)]
pub(super) struct ReadTurn {
    pub(super) turn: Turn,
    pub(super) unfit: Unfit,
    /// The body, as later steps use it.
    pub(super) held_body: HeldBody,
    pub(super) class: PriorityClass,
}

#[derive(Clone, Copy)]
struct Head<'a> {
    kind: Kind,
    method: &'a Method,
    path: &'a str,
    headers: &'a HeaderMap,
    sharer: &'a Sharer,
    principal: &'a str,
    /// `None` if no other names of models are set.
    view: Option<&'a Snapshot>,
}

/// Removes a volatile preamble from the body, bounds the turn's priority, puts the real name of a
/// model with an adapter in place of an alias, and adds a salt where caches are isolated.
pub(super) async fn read_turn(
    shared: &Arc<Shared>,
    kind: Kind,
    parts: &Parts,
    held_body: HeldBody,
    sharer: &Sharer,
    principal: &str,
) -> Result<ReadTurn, Error> {
    let (method, path, headers) = (&parts.method, parts.uri.path(), &parts.headers);
    // At the start, no name is known for a real one.
    let view = match shared.model_names.is_empty() {
        true => None,
        false => Some(shared.directory.settled_view().await),
    };
    let head = Head { kind, method, path, headers, sharer, principal, view: view.as_deref() };
    if held_body.bytes.len() <= INLINE_BYTES_MAX {
        return head.read_any(shared, held_body);
    }
    let (shared, sharer, principal) = (Arc::clone(shared), sharer.clone(), principal.to_owned());
    let (method, uri, headers) = (method.clone(), parts.uri.clone(), headers.clone());
    let (places, client) = (Arc::clone(&shared.shares.reading), Arc::clone(&sharer.name));
    let read = move || {
        let (method, headers, sharer) = (&method, &headers, &sharer);
        let (path, principal, view) = (uri.path(), &*principal, view.as_deref());
        let head = Head { kind, method, path, headers, sharer, principal, view };
        head.read_any(&shared, held_body)
    };
    places.run(&client, read).await
}

impl Head<'_> {
    /// The body may be a form.
    fn read_any(self, shared: &Shared, held_body: HeldBody) -> Result<ReadTurn, Error> {
        let class = self.sharer.class;
        let pairs = PairUse::Never(Unpaired::NotGenerated);
        if self.kind == Kind::Transcription {
            let model = form::read_model(self.headers, &held_body.bytes)?;
            let real_model = model.as_deref().and_then(|name| self.real_model(shared, name));
            let model = real_model.map(|real| real.name).or(model);
            let turn = Turn { model, pairs, ..Turn::default() };
            return Ok(ReadTurn { turn, unfit: Unfit::default(), held_body, class });
        }
        if self.method == Method::GET {
            let turn = Turn { pairs, ..Turn::default() };
            return Ok(ReadTurn { turn, unfit: Unfit::default(), held_body, class });
        }
        self.read_object(shared, held_body)
    }

    fn read_object(self, shared: &Shared, mut held_body: HeldBody) -> Result<ReadTurn, Error> {
        let Self { kind, headers, principal, .. } = self;
        let object = Object::parse(&held_body.bytes).map_err(request::Error::from)?;
        let nvext = Nvext::read(&object)?;
        let names = TurnNames::in_body(kind, &object);
        let previous_response = responses::previous_response(kind, &object);
        let priority_hint =
            hints::priority(nvext.agent_hints.as_ref()).filter(|_| kind.is_generation());
        let priority = TurnPriority::read(&object, priority_hint, self.sharer.limits.priority);
        let class = priority.class;
        let answer_tokens = hints::answer_tokens(nvext.agent_hints.as_ref());
        let unfit = Unfit {
            has_several_answers: !has_single_answer(kind, &object),
            is_background: runs_in_background(kind, &object).unwrap_or(true),
        };
        let pairs = pair::find_use(kind, &object, unfit);
        let sequences = count_sequences(kind, &object);
        let merges_logprobs = agent_body::logprobs::wants_input_logprobs(kind, &object);
        let preamble = self.find_preamble(shared, &object);
        let real_model = self.view.and_then(|_| model_names::model_member(&object));
        let real_model = real_model.and_then(|name| self.real_model(shared, &name));
        let model = real_model
            .as_ref()
            .and_then(|real| model_names::with_adapter(&object, Some(real.name.clone())));
        let sent_model = real_model.filter(|real| real.is_sent);
        let isolates = shared.cache_isolation == CacheIsolation::Principal && kind.is_generation();
        let is_changed = preamble.is_some() || priority.changes_body() || sent_model.is_some();
        let session_headers = &shared.session_headers;
        let turn = if !is_changed && !isolates {
            request::read_object(session_headers, headers, &object, &nvext, principal)
        } else {
            held_body.change(|bytes| match preamble {
                None => bytes,
                Some(range) => range.apply(bytes),
            });
            held_body.change(|bytes| priority.apply(bytes));
            if let Some(real_model) = sent_model {
                let object = Object::parse(&held_body.bytes).map_err(request::Error::from)?;
                let renamed_body = real_model.put_into(&object);
                held_body.change(|_| renamed_body.into());
            }
            if isolates {
                let object = Object::parse(&held_body.bytes).map_err(request::Error::from)?;
                let salted_body = cache_isolation::add_salt(&object, principal)?;
                held_body.change(|_| salted_body.into());
            }
            request::read(session_headers, headers, &held_body.bytes, principal)
        };
        let mut turn = turn?;
        turn.model = model.or(turn.model);
        if !kind.is_generation() {
            // Any worker can answer this request, and it leaves no KV behind.
            turn = Turn { model: turn.model, pairs, ..Turn::default() };
            return Ok(ReadTurn { turn, unfit, held_body, class });
        }
        let is_hint = turn.session.as_ref().is_some_and(|intent| intent.hint.is_some());
        turn.hints = TurnHints { session: is_hint, priority: priority.hint, answer_tokens };
        turn = Turn { names, previous_response, pairs, sequences, merges_logprobs, ..turn };
        Ok(ReadTurn { turn, unfit, held_body, class })
    }

    /// `None` if the name stands for itself.
    fn real_model(self, shared: &Shared, name: &str) -> Option<RealModel> {
        shared.model_names.resolve(name, &self.view?.engines())
    }

    fn find_preamble(self, shared: &Shared, body: &Object<'_>) -> Option<PreambleRange> {
        if !self.kind.is_generation() || shared.preamble == PreamblePolicy::Keep {
            return None;
        }
        let range = preamble::find(self.path, body)?;
        if shared.metrics.count_removed_preamble(range.client) == 0 {
            let client = range.client;
            info!(client, "removed a volatile preamble; set preamble = \"keep\" to leave it in");
        }
        Some(range)
    }
}
