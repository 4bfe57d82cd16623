//! Sends the list of workers to everybody who watches the dashboard, as server-sent events.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use contract::api::Workers;
use http::header;
use serde::Serialize;
use service::{
    auth::gate::GatePass,
    refusal::{Code, Refusal},
    tasks::Tasks,
};
use tokio::sync::{mpsc, watch};
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};

use super::workers;
use crate::turn::shared::Shared;

/// Each stream takes one of the admin port's connections.
const WATCHERS_MAX: usize = 16;
/// A list of 200 workers has about half a megabyte.
const INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub(super) struct LiveFleet {
    events: Arc<watch::Sender<Bytes>>,
    tasks: Tasks,
}

#[derive(Serialize)]
struct Event {
    /// Changes when the router restarts.
    router: String,
    version: &'static str,
    fleet: Workers,
}

impl LiveFleet {
    pub(super) fn start(shared: &Arc<Shared>, tasks: &Tasks) -> Self {
        let live = Self { events: Arc::new(watch::Sender::default()), tasks: tasks.clone() };
        let (events, shared) = (Arc::clone(&live.events), Arc::clone(shared));
        let token = tasks.token();
        tasks.spawn(async move {
            while token.run_until_cancelled(tokio::time::sleep(INTERVAL)).await.is_some() {
                if events.receiver_count() > 0 {
                    events.send_replace(build_event(&shared));
                }
            }
        });
        live
    }

    /// The stream lasts as long as `pass` is valid.
    pub(super) fn subscribe(&self, pass: GatePass) -> Response {
        if self.events.receiver_count() >= WATCHERS_MAX {
            let message = format!("{WATCHERS_MAX} pages watch the fleet already; close one");
            return Refusal::new(Code::ConnectionsFull, message).into_response();
        }
        let mut receiver = self.events.subscribe();
        let (sender, stream) = mpsc::channel::<Bytes>(1);
        let token = self.tasks.token();
        self.tasks.spawn(async move {
            let forward = async {
                loop {
                    tokio::select! {
                        biased;
                        () = sender.closed() => return,
                        changed = receiver.changed() => if changed.is_err() { return },
                    }
                    if !pass.is_valid() {
                        return;
                    }
                    let event = receiver.borrow_and_update().clone();
                    // While a slow page reads, newer lists replace each other.
                    if sender.send(event).await.is_err() {
                        return;
                    }
                }
            };
            token.run_until_cancelled(forward).await;
        });
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-store"),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        ];
        let frames = ReceiverStream::new(stream).map(Ok::<_, std::convert::Infallible>);
        (headers, Body::from_stream(frames)).into_response()
    }
}

fn build_event(shared: &Shared) -> Bytes {
    let event = Event {
        router: format!("{:08x}", shared.process_id),
        version: env!("CARGO_PKG_VERSION"),
        fleet: workers::build_list(shared),
    };
    let data = serde_json::to_string(&event).expect("plain fields always serialise");
    format!("event: fleet\ndata: {data}\n\n").into()
}
