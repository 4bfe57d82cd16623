//! Accepts the control port's connections, within a limit and a time limit for their handshakes.
//!
//! Handshakes run side by side, so a silent peer doesn't delay the routers. Routers send pings over
//! their few connections, so one that is silent after its handshakes is the gRPC server's matter.
//! Here, a connection beyond the limit is closed at once, one without a handshake after its time
//! limit.

use std::{
    future::Future as _,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use service::{
    server,
    tasks::Tasks,
    tls::server::{self as tls, ServerStream, ServerTls},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::Sleep,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;
use tracing::{debug, warn};

/// A router sends its part of the HTTP/2 handshake with its first packet.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// The preface and the head of the settings frame.
const HANDSHAKE_BYTES: usize = 24 + 9;
/// A failed accept is retried after this pause, for example when file descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The server's task takes each connection at once.
const ACCEPTED_QUEUED_MAX: usize = 16;

const PORT: &str = "control";

#[derive(Debug)]
pub(super) struct ConnectionLimits {
    pub(super) connections_max: usize,
    pub(super) metrics: server::Metrics,
}

pub(super) fn accept(
    listener: TcpListener,
    limits: ConnectionLimits,
    tls: Option<ServerTls>,
    tasks: &Tasks,
) -> ReceiverStream<io::Result<ControlConnection>> {
    let (sender, receiver) = mpsc::channel(ACCEPTED_QUEUED_MAX);
    let (token, connection_tasks) = (tasks.token(), tasks.clone());
    tasks.spawn(async move {
        tokio::select! {
            biased;
            () = token.cancelled() => {}
            () = accept_all(listener, limits, tls, sender, connection_tasks) => {}
        }
    });
    ReceiverStream::new(receiver)
}

async fn accept_all(
    listener: TcpListener,
    limits: ConnectionLimits,
    tls: Option<ServerTls>,
    sender: mpsc::Sender<io::Result<ControlConnection>>,
    tasks: Tasks,
) {
    let ConnectionLimits { connections_max, metrics } = limits;
    let permits = Arc::new(Semaphore::new(connections_max));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _peer)) => stream,
            Err(error) => {
                warn!(%error, port = PORT, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
            metrics.count_full(PORT);
            debug!("too many connections to the control port");
            continue;
        };
        let (tls, sender, token) = (tls.clone(), sender.clone(), tasks.token());
        let metrics = metrics.clone();
        tasks.spawn(async move {
            let handshake = async {
                stream.set_nodelay(true)?;
                tls::accept(tls.as_ref(), stream).await
            };
            let accepted = tokio::select! {
                biased;
                () = token.cancelled() => return,
                accepted = handshake => accepted,
            };
            match accepted {
                // The receiver is gone when the server has ended.
                Ok(stream) => {
                    drop(sender.send(Ok(ControlConnection::new(stream, permit))).await);
                }
                Err(error) => {
                    metrics.count_failed_handshake(PORT, &error);
                    debug!(%error, port = PORT, "TLS handshake failed");
                }
            }
        });
    }
}

/// Reading fails if the handshake is late, or once the connection must be closed.
#[derive(Debug)]
pub(super) struct ControlConnection {
    stream: ServerStream<TcpStream>,
    /// The bytes that are missing of the handshake, and its time limit. `None` after the handshake.
    handshake: Option<(usize, Pin<Box<Sleep>>)>,
    _permit: OwnedSemaphorePermit,
    info: ControlConnectInfo,
    close_order: Pin<Box<WaitForCancellationFutureOwned>>,
}

#[derive(Debug, Clone)]
pub(super) struct ControlConnectInfo {
    close_token: CancellationToken,
}

impl ControlConnectInfo {
    pub(super) fn close(&self) {
        self.close_token.cancel();
    }

    /// Cancelling the token closes the connection.
    pub(super) fn close_order(&self) -> CancellationToken {
        self.close_token.clone()
    }
}

impl ControlConnection {
    fn new(stream: ServerStream<TcpStream>, permit: OwnedSemaphorePermit) -> Self {
        let late = Box::pin(tokio::time::sleep(HANDSHAKE_TIME_MAX));
        let close_token = CancellationToken::new();
        Self {
            stream,
            handshake: Some((HANDSHAKE_BYTES, late)),
            _permit: permit,
            close_order: Box::pin(close_token.clone().cancelled_owned()),
            info: ControlConnectInfo { close_token },
        }
    }
}

impl Connected for ControlConnection {
    type ConnectInfo = ControlConnectInfo;

    fn connect_info(&self) -> ControlConnectInfo {
        self.info.clone()
    }
}

impl AsyncRead for ControlConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.close_order.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let filled_before = buffer.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(context, buffer);
        if let Some((missing_bytes, late)) = &mut this.handshake {
            *missing_bytes = missing_bytes.saturating_sub(buffer.filled().len() - filled_before);
            if *missing_bytes == 0 {
                this.handshake = None;
            } else if late.as_mut().poll(context).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        polled
    }
}

impl AsyncWrite for ControlConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio_stream::StreamExt as _;

    use super::*;

    fn one_connection() -> ConnectionLimits {
        let metrics = server::Metrics::default();
        ConnectionLimits { connections_max: 1, metrics }
    }

    async fn listener() -> (TcpListener, std::net::SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        (listener, addr)
    }

    #[tokio::test]
    async fn a_connection_beyond_the_limit_is_closed_and_a_place_comes_back() {
        let (listener, addr) = listener().await;
        let mut incoming = accept(listener, one_connection(), None, &Tasks::default());
        let _first_client = TcpStream::connect(addr).await.unwrap();
        let first = incoming.next().await.unwrap().unwrap();
        let mut second_client = TcpStream::connect(addr).await.unwrap();
        let waited = tokio::time::timeout(Duration::from_millis(200), incoming.next()).await;
        assert!(waited.is_err(), "the second connection was accepted");
        assert_eq!(second_client.read(&mut [0; 1]).await.unwrap_or(0), 0);
        drop(first);
        let _third_client = TcpStream::connect(addr).await.unwrap();
        assert!(incoming.next().await.unwrap().is_ok());
    }

    // Tokio's paused clock jumps to the next timer when no task can run.
    #[tokio::test(start_paused = true)]
    async fn a_connection_without_a_handshake_fails() {
        let (listener, addr) = listener().await;
        let mut incoming = accept(listener, one_connection(), None, &Tasks::default());
        let _client = TcpStream::connect(addr).await.unwrap();
        let mut connection = incoming.next().await.unwrap().unwrap();
        let error = connection.read(&mut [0; 100]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
