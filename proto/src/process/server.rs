//! An HTTP/1 server with the limits that an open port needs: header bytes, time to send a header,
//! connections at once. Connections end gracefully when the process stops.

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

use super::tasks::Tasks;

/// Bytes of a request's line and headers; beyond it the answer is 431.
pub const HEADER_BYTES_MAX: usize = 32 * 1024;
/// Connections beside those with turns: probes, lists, idle clients, and whoever is to be told that
/// there are too many turns.
const CONNECTIONS_BESIDE: usize = 512;
/// A client that takes longer to send its header is cut off.
const HEADER_TIME_MAX: Duration = Duration::from_secs(30);
/// A client that takes nothing of its answer for so long is cut off: what it holds on to, a turn
/// and its session's gate, is not its own.
const WRITE_STALL_MAX: Duration = Duration::from_secs(60);
/// After a failed accept (out of file descriptors, say) the loop rests this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until the tasks are cancelled, then lets each connection finish its request. A connection
/// has one turn at a time, so there are some more than turns may be: each costs about 40 KiB while
/// it reads, and beyond them the backlog waits.
pub async fn serve(listener: TcpListener, app: Router, turns_max: usize, tasks: Tasks) {
    let slots = Arc::new(Semaphore::new(turns_max.saturating_add(CONNECTIONS_BESIDE)));
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
    // Tokens are small writes that must not wait for an acknowledgement.
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

    // Time stands still while anything moves, and jumps to the next timer when nothing does.
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
