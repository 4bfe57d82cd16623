//! Refuses prompts that fit into no worker's context, before an engine tokenizes them.

use std::time::Instant;

use bytes::Bytes;

use super::{
    error::{Error, NoAnswer},
    request::Turn,
    shared::Shared,
};
use crate::shares::Sharer;

/// An engine would refuse such a prompt too, but only after tokenizing all of it, while its other
/// clients wait.
pub(super) async fn check(
    shared: &Shared,
    turn: &Turn,
    path: &str,
    body: &Bytes,
    sharer: &Sharer,
    deadline: Instant,
) -> Result<(), Error> {
    let (model, view) = (turn.model.as_deref(), shared.directory.view());
    let locator = &shared.block_locator;
    let checking = locator.context_if_over(&turn.prompt, model, path, body, &view, sharer);
    match tokio::time::timeout_at(deadline.into(), checking).await {
        Ok(None) => Ok(()),
        Ok(Some(context_tokens)) => Err(Error::PromptOverContext { context_tokens }),
        Err(_) => Err(NoAnswer::TimedOut.into()),
    }
}

/// `None` if no worker is known, or if one cuts longer prompts.
pub(super) fn longest_context_tokens(shared: &Shared) -> Option<u64> {
    let view = shared.directory.view();
    if view.workers().any(|(.., facts)| facts.description.engine.shortens_prompts) {
        return None;
    }
    view.workers().map(|(.., facts)| facts.description.engine.context_tokens.into()).max()
}
