//! Bounds the streams that the control port serves at once, and counts refusals and claims.
//!
//! A stream keeps its place until it ends or its connection closes, also while its router reads
//! nothing of it.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use contract::placement_claim::{self, PlacementClaim};
use prometheus_client::metrics::counter::Counter;
use service::metrics::By;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::Stream;
use tonic::Status;

service::metrics! {
    pub struct Metrics {
        /// Streams of routers that the control port refused, because it has as many as it may have
        refused: By<Counter> = "control_streams_refused", By::label("stream");
        /// Claims of routers on the workers of sessions, by result
        claims: By<Counter> = "placement_claims", By::label("result");
    }
}

impl Metrics {
    pub(super) fn count_claim(&self, claim: &Result<PlacementClaim, placement_claim::Error>) {
        let result = match claim {
            Ok(claim) if claim.is_granted => "granted",
            Ok(_) => "held",
            Err(_) => "full",
        };
        self.claims.get(result).inc();
    }
}

#[derive(Debug, Clone)]
pub(super) struct Places {
    free: Arc<Semaphore>,
    count: usize,
    refused: Counter,
}

impl Places {
    pub(super) fn new(stream: &'static str, count: usize, metrics: &Metrics) -> Self {
        let refused = metrics.refused.get(stream).clone();
        Self { free: Arc::new(Semaphore::new(count)), count, refused }
    }

    pub(super) fn take(&self) -> Result<OwnedSemaphorePermit, Status> {
        Arc::clone(&self.free).try_acquire_owned().map_err(|_| {
            self.refused.inc();
            let count = self.count;
            Status::resource_exhausted(format!("this agent has {count} such streams; try again"))
        })
    }
}

#[derive(Debug)]
pub(super) struct PlacedStream<T> {
    messages: mpsc::Receiver<Result<T, Status>>,
    _place: OwnedSemaphorePermit,
}

impl<T> PlacedStream<T> {
    pub(super) fn new(
        messages: mpsc::Receiver<Result<T, Status>>,
        place: OwnedSemaphorePermit,
    ) -> Self {
        Self { messages, _place: place }
    }
}

impl<T> Stream for PlacedStream<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.messages.poll_recv(context)
    }
}
