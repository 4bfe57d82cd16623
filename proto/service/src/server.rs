//! An HTTP/1 server with the limits that an open port needs.
//!
//! Limited are the bytes of a header, the time to send a header, the time without progress of an
//! answer, and the number of connections. Connections end gracefully when the process stops.

use std::{sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_io_timeout::TimeoutStream;
use tracing::{debug, warn};

use crate::tasks::Tasks;

/// Bytes of a request's line and headers; longer ones are answered with 431.
pub const HEADER_BYTES_MAX: usize = 32 * 1024;
/// Connections allowed beyond one for each turn: for probes, lists, idle clients, and clients that
/// get the refusal that there are too many turns.
const CONNECTIONS_SPARE: usize = 512;
/// Time within which a client must send its header, or the connection is closed.
const HEADER_TIME_MAX: Duration = Duration::from_secs(30);
/// Time a client may read nothing of its answer before the connection is closed. Such a client
/// keeps a turn and its session's gate occupied, which others need.
const WRITE_STALL_MAX: Duration = Duration::from_secs(60);
/// Pause after a failed accept, for example when file descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until the tasks are cancelled, then lets each connection finish its request.
///
/// A connection has at most one turn at a time, so the limit is `turns_max` plus a fixed number.
/// Each connection costs about 40 KiB while it reads. Further connections wait in the listen
/// backlog.
pub async fn serve(listener: TcpListener, app: Router, turns_max: usize, tasks: Tasks) {
    let slots = Arc::new(Semaphore::new(turns_max.saturating_add(CONNECTIONS_SPARE)));
    let token = tasks.token();
    loop {
        let accepted = tokio::select! {
            biased;
            () = token.cancelled() => return,
            accepted = accept(&listener, &slots) => accepted,
        };
        let (stream, slot) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(app.clone());
        let connection_token = token.clone();
        tasks.spawn(async move {
            let _slot = slot;
            let mut stream = TimeoutStream::new(stream);
            stream.set_write_timeout(Some(WRITE_STALL_MAX));
            let stream = Box::pin(stream);
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIME_MAX)
                .max_buf_size(HEADER_BYTES_MAX)
                .serve_connection(TokioIo::new(stream), service);
            let mut connection = std::pin::pin!(connection);
            let ended = tokio::select! {
                biased;
                ended = connection.as_mut() => ended,
                () = connection_token.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                debug!(%error, "connection ended early");
            }
        });
    }
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> std::io::Result<(tokio::net::TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.expect("the semaphore is never closed");
    let (stream, _peer) = listener.accept().await?;
    // Answers stream as small writes, one per token, which must not wait for an acknowledgement.
    stream.set_nodelay(true)?;
    Ok((stream, slot))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use axum::{body::Body, routing::get};
    use bytes::Bytes;
    use http_body_util::StreamBody;
    use tokio::io::AsyncWriteExt as _;
    use tokio_util::sync::CancellationToken;

    use super::*;

    // Tokio's paused clock jumps to the next timer when no task can run.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_stops_reading_loses_its_answer() {
        let dropped = CancellationToken::new();
        let guard = dropped.clone();
        let endless = move || {
            let held = guard.clone().drop_guard();
            let frame = move || {
                let _held = &held;
                Ok::<_, Infallible>(http_body::Frame::data(Bytes::from(vec![b'x'; 65_536])))
            };
            let frames = tokio_stream::iter(std::iter::repeat_with(frame));
            std::future::ready(Body::new(StreamBody::new(frames)))
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let tasks = Tasks::default();
        tasks.spawn(serve(listener, Router::new().route("/", get(endless)), 1, tasks.clone()));
        let mut client = tokio::net::TcpStream::connect(addr).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let asked = tokio::time::Instant::now();
        dropped.cancelled().await;
        assert!(asked.elapsed() >= WRITE_STALL_MAX);
        drop(client);
    }
}
