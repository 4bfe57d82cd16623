//! Serves HTTP/1 with the limits that a port open to any client needs.
//!
//! Router and agent use [`serve`] for the data port, which receives turns (requests to the model).
//! The server limits the size of a request's header, the time to send the header, the time without
//! progress of an answer, and the number of connections. When the process stops, connections finish
//! their running requests. The size of bodies is limited in `budget`, and the number of turns by
//! the routes in `app`. With certificates, the port speaks TLS and nothing else.

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

use crate::{
    tasks::Tasks,
    tls::server::{self as tls, ServerTls},
};

/// The most bytes of a request's line and headers. A request with more is answered with 431.
pub const HEADER_BYTES_MAX: usize = 32 * 1024;
/// Number of connections allowed beyond one for each turn. They are for probes, lists, idle
/// clients, and clients whose turn is refused because too many turns run.
const SPARE_CONNECTIONS: usize = 512;
/// Time within which a client must send its header. Otherwise the connection is closed.
const HEADER_TIME_MAX: Duration = Duration::from_secs(30);
/// Time for which a client may read nothing of its answer before its connection is closed. Until
/// then, the client occupies one of the turns that may run, and its session's other turns wait.
const WRITE_STALL_TIME_MAX: Duration = Duration::from_secs(60);
/// Pause after a failed accept, for example when file descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves the routes `app` until `tasks` are cancelled. Then each connection finishes its running
/// request.
///
/// A connection has at most one turn at a time, so the limit on connections is `turns_max` plus a
/// fixed number. Further connections wait in the listen backlog. Each connection takes about 40 KiB
/// while it reads, and with `tls` 40 KiB more.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    turns_max: usize,
    tls: Option<ServerTls>,
    tasks: Tasks,
) {
    let connection_slots = Arc::new(Semaphore::new(turns_max.saturating_add(SPARE_CONNECTIONS)));
    let stop_token = tasks.token();
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop_token.cancelled() => return,
            accepted = accept(&listener, &connection_slots) => accepted,
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
        let (connection_token, tls) = (stop_token.clone(), tls.clone());
        tasks.spawn(async move {
            let _slot = slot;
            let mut stream = TimeoutStream::new(stream);
            stream.set_write_timeout(Some(WRITE_STALL_TIME_MAX));
            let accepted = tokio::select! {
                biased;
                () = connection_token.cancelled() => return,
                accepted = tls::accept(tls.as_ref(), Box::pin(stream)) => accepted,
            };
            let stream = match accepted {
                Ok(stream) => stream,
                Err(error) => return debug!(%error, "TLS handshake failed"),
            };
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

/// Waits for a free connection slot, and then accepts a connection.
async fn accept(
    listener: &TcpListener,
    connection_slots: &Arc<Semaphore>,
) -> std::io::Result<(tokio::net::TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let slot =
        Arc::clone(connection_slots).acquire_owned().await.expect("the semaphore is never closed");
    let (stream, _peer) = listener.accept().await?;
    // An answer is streamed in small writes, one per token. Without `nodelay`, TCP would hold each
    // write back until the client has acknowledged the previous write.
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
        tasks.spawn(serve(
            listener,
            Router::new().route("/", get(endless)),
            1,
            None,
            tasks.clone(),
        ));
        let mut client = tokio::net::TcpStream::connect(addr).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let asked = tokio::time::Instant::now();
        dropped.cancelled().await;
        assert!(asked.elapsed() >= WRITE_STALL_TIME_MAX);
        drop(client);
    }
}
